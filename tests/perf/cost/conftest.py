"""Splash kernels in a loop of 12 turns that hands their mask on, and the schedules of the compiler."""

from pathlib import Path

import pytest
from hlo_text import counted_loop, text_of

from tomat.perf.cost.llo import OpSchedule, read_schedules

SHAPE, MASK = "bf16[8,16,8192,64]{3,2,1,0}", "s8[1,4,4]{2,1,0}"


@pytest.fixture(scope="session")
def splash_hlo():
    """Writes the program: of each of its kernels its name, its scope and its backend's configuration."""

    def write(*kernels: tuple[str, str, str], handed_on="blocks", start="three", mask="mask") -> str:
        body = "blocks.vmem = s8[1,4,4]{2,1,0:S(1)} copy(blocks)\nchanged = s8[1,4,4]{2,1,0} negate(blocks)"
        for name, scope, config in kernels:
            body += f"""
{name} = {SHAPE} custom-call(blocks.vmem, blocks.vmem, x, x, x), custom_call_target="tpu_custom_call",
  metadata={{op_name="jit(step)/{scope}/pallas_call"}}{config}"""
        elements = {"i": "s32[]", "blocks": MASK, "x": SHAPE}
        loop = counted_loop("loop", elements, body, "26", step=2, i="next", blocks=handed_on, x=kernels[-1][0])
        carry = f"({', '.join(elements.values())})"
        entry = f"""start = s32[] parameter(0)
  given = {MASK} parameter(1)
  x = {SHAPE} parameter(2)
  three = s32[] constant(3)
  mask = {MASK} constant({{ {{ {{1,0,0,0}}, {{2,1,0,0}}, {{2,2,1,0}}, {{2,2,2,1}} }} }})
  init = {carry} tuple({start}, {mask}, x)
  loop = {carry} while(init), condition=loop_cond, body=loop_body
  y = {SHAPE} get-tuple-element(loop), index=2
  ROOT twice = {SHAPE} add(y, y)"""
        return text_of(entry, loop)

    return write


@pytest.fixture(scope="session")
def schedules() -> dict[str, OpSchedule]:
    return read_schedules(Path(__file__).parent / "data" / "llo")
