"""Splash kernels in a loop of 12 turns that hands their mask on, and the schedules of the compiler."""

from pathlib import Path

import pytest

from tomat.perf.cost.llo import OpSchedule, read_schedules

SHAPE = "bf16[8,16,8192,64]{3,2,1,0}"
CARRY = f"(s32[], s8[1,4,4]{{2,1,0}}, {SHAPE})"
PROGRAM = f"""HloModule m, entry_computation_layout={{(s32[], s8[1,4,4]{{2,1,0}}, {SHAPE})->{SHAPE}}}
body {{
  p = {CARRY} parameter(0)
  i = s32[] get-tuple-element(p), index=0
  blocks = s8[1,4,4]{{2,1,0}} get-tuple-element(p), index=1
  x = {SHAPE} get-tuple-element(p), index=2
  two = s32[] constant(2)
  next = s32[] add(i, two)
  blocks.vmem = s8[1,4,4]{{2,1,0:S(1)}} copy(blocks)
  changed = s8[1,4,4]{{2,1,0}} negate(blocks)
  KERNELS
  ROOT t = {CARRY} tuple(next, HANDED_ON, LAST)
}}
cond {{
  p = {CARRY} parameter(0)
  i = s32[] get-tuple-element(p), index=0
  n = s32[] constant(26)
  ROOT lt = pred[] compare(i, n), direction=LT
}}
ENTRY main {{
  start = s32[] parameter(0)
  given = s8[1,4,4]{{2,1,0}} parameter(1)
  x = {SHAPE} parameter(2)
  three = s32[] constant(3)
  mask = s8[1,4,4]{{2,1,0}} constant({{ {{ {{1,0,0,0}}, {{2,1,0,0}}, {{2,2,1,0}}, {{2,2,2,1}} }} }})
  init = {CARRY} tuple(START, MASK, x)
  loop = {CARRY} while(init), condition=cond, body=body
  y = {SHAPE} get-tuple-element(loop), index=2
  ROOT twice = {SHAPE} add(y, y)
}}
"""


@pytest.fixture(scope="session")
def splash_hlo():
    """Writes the program: of each of its kernels its name, its scope and its backend's configuration."""

    def write(*kernels: tuple[str, str, str], handed_on="blocks", start="three", mask="mask") -> str:
        calls = [
            f'{name} = {SHAPE} custom-call(blocks.vmem, blocks.vmem, x, x, x), custom_call_target="tpu_custom_call", '
            f'metadata={{op_name="jit(step)/{scope}/pallas_call"}}{config}'
            for name, scope, config in kernels
        ]
        tokens = {"HANDED_ON": handed_on, "LAST": kernels[-1][0], "START": start, "MASK": mask}
        text = PROGRAM.replace("KERNELS", "\n  ".join(calls))
        for token, name in tokens.items():
            text = text.replace(token, name)
        return text

    return write


@pytest.fixture(scope="session")
def schedules() -> dict[str, OpSchedule]:
    return read_schedules(Path(__file__).parent / "data" / "llo")
