"""Forward, recompute and backward: the FLOPs of each pass are known by hand, whatever the names say."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from hlo_text import program_of
from trace_builder import serialise_program

from tomat.perf.profile.categories import Direction, Part, classify_program
from tomat.perf.profile.directions import settled
from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_costs import kernel_flops
from tomat.perf.profile.hlo_files import program_from_bytes, program_from_text
from tomat.perf.profile.hlo_kernels import executed_kernels
from tomat.perf.profile.program_breakdown import breakdown_from_program
from tomat.perf.profile.protos import new_message

ROWS, WIDTH, LAYERS, MICROBATCHES = 32, 64, 3, 2
ONE_FORWARD = MICROBATCHES * LAYERS * 2 * (2 * ROWS * WIDTH * WIDTH)
"""FLOPs of the two products of each layer."""


def compiled(policy, scan_layers: bool = False) -> HloProgram:
    """A step over microbatches of layers of two products each; `policy` is of `jax.checkpoint`, None for none."""

    def layer(x, weights):
        with jax.named_scope("mlp"):
            return jnp.sin(jnp.sin(x @ weights[0]) @ weights[1])

    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)

    def loss(parameters, x):
        start, weights = parameters
        x = x * start
        if scan_layers:
            x = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]
        else:
            for number in range(LAYERS):
                x = layer(x, weights[number])
        return x.sum()

    def step(parameters, batch):
        def microbatch(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(parameters, x)), None

        return jax.lax.scan(microbatch, jax.tree.map(jnp.zeros_like, parameters), batch)[0]

    parameters = (jnp.ones(WIDTH), jnp.ones((LAYERS, 2, WIDTH, WIDTH)))
    lowered = jax.jit(step).lower(parameters, jnp.ones((MICROBATCHES, ROWS, WIDTH)))
    return program_from_text(lowered.compile().as_text(), "step")


def passes(program: HloProgram, verdicts) -> dict[Direction, float]:
    """FLOPs of the products in each direction, in forward passes."""
    found = Counter()
    for kernel in executed_kernels(program):
        verdict = verdicts[kernel.instruction.name]
        opcodes = {inner.opcode for inner in program.inner(kernel.instruction)}
        if verdict.part == Part.MLP and opcodes & {"dot", "custom-call"}:
            found[verdict.direction] += (kernel_flops(program, kernel.instruction) or 0.0) * kernel.executions
    return {direction: round(total / ONE_FORWARD, 2) for direction, total in found.items() if total}


def renamed(program: HloProgram, change) -> HloProgram:
    """The program with other paths on its instructions."""
    proto = new_message("HloProto")
    proto.ParseFromString(serialise_program(program))
    for computation in proto.hlo_module.computations:
        for instruction in computation.instructions:
            instruction.metadata.op_name = change(instruction.metadata.op_name)
    return program_from_bytes(proto.SerializeToString(), "renamed")


@pytest.fixture(scope="module")
def everything_kept() -> HloProgram:
    return compiled(None)


@pytest.fixture(scope="module")
def recomputed() -> HloProgram:
    return compiled(jax.checkpoint_policies.nothing_saveable)


def test_layers_in_a_loop_over_microbatches_have_a_forward_pass(everything_kept):
    """All of it was called recompute: the body of the loop holds the backward pass too."""
    verdicts, notes = settled(everything_kept)
    assert passes(everything_kept, verdicts) == {Direction.FORWARD: 1.0, Direction.BACKWARD: 2.0}
    assert notes == []


def test_what_names_tell_stays():
    program = compiled(jax.checkpoint_policies.nothing_saveable, scan_layers=True)
    verdicts, notes = settled(program)
    found = passes(program, verdicts)
    # The last product of a layer is not needed for its gradients, so XLA may leave it out.
    assert found.pop(Direction.RECOMPUTE) in (0.5, 1.0)
    assert found == {Direction.FORWARD: 1.0, Direction.BACKWARD: 2.0} and notes == []


def test_what_xla_merged_is_forward(recomputed):
    """The last layer is computed once, for its gradients alone, and is named as recomputed."""
    names = classify_program(recomputed)
    assert passes(recomputed, names) == {Direction.FORWARD: 0.67, Direction.RECOMPUTE: 1.0, Direction.BACKWARD: 2.0}
    verdicts, notes = settled(recomputed)
    assert passes(recomputed, verdicts) == {Direction.FORWARD: 1.0, Direction.RECOMPUTE: 0.67, Direction.BACKWARD: 2.0}
    assert len(notes) == 1


def as_recompute(path: str) -> str:
    """The name of the recomputed operation, with which one of the forward pass may be merged."""
    return re.sub(r"(?<!transpose\()jvp\(mlp\)", "transpose(jvp())/checkpoint/rematted_computation/mlp", path)


def as_nothing(path: str) -> str:
    """A name that tells no pass: that of a Pallas kernel."""
    return path if "transpose(" in path and "rematted" not in path else "mlp/my_kernel/pallas_call"


@pytest.mark.parametrize("change", [as_recompute, as_nothing])
def test_a_forward_pass_under_another_name_is_found_by_arithmetic(change, everything_kept, recomputed):
    program = renamed(everything_kept, change)
    names = classify_program(program)
    assert Direction.FORWARD not in passes(program, names)
    verdicts, notes = settled(program)
    assert passes(program, verdicts) == {Direction.FORWARD: 1.0, Direction.BACKWARD: 2.0}
    (note,) = notes
    assert "layer: MLP: names do not tell forward from recompute" in note and "0 FLOP recompute" in note
    breakdown = breakdown_from_program(program, device_kind="cpu", kernel_seconds=lambda _: 1e-6)
    assert note in breakdown.notes and "layer: MLP, forward" in {row.name for row in breakdown.parts}
    # Of nearly two, the first is forward.
    twice = renamed(recomputed, change)
    verdicts, notes = settled(twice)
    assert passes(twice, verdicts) == {Direction.FORWARD: 1.0, Direction.RECOMPUTE: 0.67, Direction.BACKWARD: 2.0}
    assert len(notes) == 1


@pytest.mark.parametrize(("n_forward", "expected"), [(2, {"forward": 2}), (4, {"forward": 2, "recompute": 2})])
def test_kernels_of_unknown_flops_are_counted(n_forward, expected):
    """Each backward kernel runs once for each forward pass."""
    call = 'f32[8]{0} custom-call(a), custom_call_target="tpu_custom_call", metadata={op_name="flash_attention_NAME/k"}'
    kernels = ["fwd"] * n_forward + ["bwd_dq"] * 2 + ["bwd_dkv"] * 2
    lines = [f"  k{i} = {call.replace('NAME', name)}" for i, name in enumerate(kernels)]
    lines[-1] = lines[-1].replace("  k", "  ROOT k", 1)
    program = program_of("\n".join(("a = f32[8]{0} parameter(0)", *lines)))
    verdicts, notes = settled(program)
    assert {v.part for v in verdicts.values()} == {Part.ATTENTION_CORE}
    found = Counter(str(verdict.direction) for verdict in verdicts.values())
    assert found == {**expected, "backward": 4} and len(notes) == 1
    order = [str(verdicts[f"k{i}"].direction) for i in range(n_forward)]
    assert order == sorted(order)
