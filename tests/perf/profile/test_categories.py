import importlib
import re
from pathlib import Path

import pytest
from trace_builder import serialise_program

import tomat
import tomat.model
from tomat.perf.profile.categories import (
    FRAME_RULES,
    Category,
    Direction,
    Evidence,
    Part,
    classify,
    classify_program,
    part_of,
)
from tomat.perf.profile.hlo import Frame
from tomat.perf.profile.hlo_files import program_from_bytes, program_from_text
from tomat.perf.profile.hlo_kernels import executed_kernels
from tomat.perf.profile.protos import new_message

BACKWARD = "jit(step)/transpose(jvp(Model))/while/body/checkpoint/"


def test_every_file_of_the_rules_exists():
    """Among those whose code a training step runs, as call frames name them; or a module has moved."""
    folders = [
        Path(importlib.import_module(name).__path__[0]) for name in ("tomat", "optax", "levanter", "haliax", "jax")
    ]
    files = "\n".join(str(path) for folder in folders for path in folder.rglob("*.py"))
    assert [file.pattern for file, _, _ in FRAME_RULES if not re.search(file.pattern, files, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("now", "before", "function", "part"),
    [
        ("model/loss/density_loss.py", "training/loss.py", "density_loss", Part.LOSS),
        ("model/loss/xla.py", "training/loss_kernels.py", "_density_terms", Part.LOSS),
        ("model/loss/pallas_kernels.py", "training/loss_pallas_kernels.py", "_statistics_kernel", Part.LOSS),
        ("model/causal_blocks.py", "model/flash.py", "_blockwise_forward", Part.ATTENTION_CORE),
        ("model/attention.py", "training/attention.py", "Attention._attend", Part.ATTENTION_CORE),
        ("model/attention.py", "training/attention.py", "Attention.__call__", Part.ATTENTION_PROJECTIONS),
        ("model/norm_rotary.py", "training/norm_rotary.py", "norm_rotary", Part.NORM_ROTARY),
        ("model/decoder.py", "training/model.py", "DensityDecoderLayer.__call__", Part.LAYER_OTHER),
        ("train/guards/loss.py", "training/guard_loss.py", "guard_updates", Part.OUTSIDE),
    ],
)
def test_modules_that_moved_are_told_where_they_are_and_where_they_were(now, before, function, part):
    assert (Path(tomat.__path__[0]) / now).is_file()
    for file in (now, before):
        assert part_of("", (Frame(f"/home/me/tomat/{file}", function, 1),)) == part
        assert part_of("", (Frame(f"tomat/{file}", function, 1),)) == part


@pytest.mark.parametrize(
    ("opcode", "inner", "path", "target", "expected"),
    [
        ("custom-call", {"custom-call"}, "online-softmax", "tpu_custom_call", Category.ATTENTION_FORWARD),
        ("fusion", {"convolution", "add"}, "jit(s)/jvp(M)/LlamaMlp/dot_general", "", Category.MATMUL),
        ("fusion", {"convolution"}, "jit(s)/jvp(loss)/dot_general", "", Category.LOSS),
        ("fusion", {"dot"}, "jit(s)/jvp(M)/Attention/dot_product_attention/dot", "", Category.ATTENTION_FORWARD),
        ("fusion", {"dot"}, BACKWARD + "Attention/dot_product_attention/dot", "", Category.ATTENTION_BACKWARD),
        ("fusion", {"dot"}, BACKWARD + "rematted_computation/dot_product_attention/dot", "",
         Category.ATTENTION_FORWARD),
        ("fusion", {"copy", "bitcast", "convert"}, "jit(s)/jvp(M)/LlamaMlp/x", "", Category.COPIES),
        ("fusion", {"all-reduce", "add"}, BACKWARD + "x", "", Category.COLLECTIVES_EXPOSED),
        ("all-gather-done", {"all-gather-done"}, "", "", Category.COLLECTIVES_EXPOSED),
        ("fusion", {"multiply", "add"}, "jit(s)/optimizer/mul", "", Category.OPTIMIZER),
        ("fusion", {"gather"}, "jit(s)/jvp(M)/Embedding.embed/gather", "", Category.EMBEDDING),
        ("custom-call", {"custom-call"}, "jit(s)/jvp(M)/my_kernel", "tpu_custom_call", Category.CUSTOM_KERNELS),
        ("custom-call", {"custom-call"}, "jvp(A)/norm_rotary_fwd/pallas_call", "tpu_custom_call", Category.NORM_ROTARY),
        ("custom-call", {"custom-call"}, "", "__cublas$lt$matmul", Category.MATMUL),
        ("custom-call", {"custom-call"}, "", "__cudnn$fmhaSoftmax", Category.ATTENTION_FORWARD),
        ("custom-call", {"custom-call"}, "", "xla_python_cpu_callback", Category.HOST),
        ("while", {"while"}, "jit(s)/jvp(M)/while", "", Category.CONTROL),
        ("fusion", {"multiply", "exponential"}, "jit(s)/jvp(M)/LlamaMlp/mul", "", Category.ELEMENTWISE),
    ],
)  # fmt: skip
def test_categories(opcode, inner, path, target, expected):
    evidence = [Evidence(path, (), 1.0)] if path else []
    assert classify(opcode, frozenset(inner), evidence, target).category == expected


def test_the_v6e_program(v6e_program):
    verdicts = classify_program(v6e_program)
    assert {k.instruction.name for k in executed_kernels(v6e_program)} == set(verdicts)
    kernels = {k.instruction.name: k.instruction for k in executed_kernels(v6e_program)}
    flash = {n: verdicts[n] for n, i in kernels.items() if i.custom_call_target == "tpu_custom_call"}
    assert {verdict.part for verdict in flash.values()} == {Part.ATTENTION_CORE}
    found = sorted((n.split(".")[0], v.category, v.direction) for n, v in flash.items())
    # The forward kernel runs in both loops under the same path: in the backward loop it is a recomputation.
    assert [row[1:] for row in found if row[0] == "splash_mha_fwd_residuals"] == [
        (Category.ATTENTION_FORWARD, Direction.FORWARD), (Category.ATTENTION_FORWARD, Direction.RECOMPUTE),
    ]  # fmt: skip
    assert ("splash_mha_dq_no_residuals", Category.ATTENTION_BACKWARD, Direction.BACKWARD) in found
    for name, instruction in kernels.items():
        opcodes = {i.opcode for i in v6e_program.inner(instruction)}
        if opcodes & {"all-gather", "all-reduce", "all-to-all"}:
            assert verdicts[name].category == Category.COLLECTIVES_EXPOSED
        if instruction.opcode in ("copy-start", "copy-done"):
            assert verdicts[name].category in (Category.COPIES, Category.EMBEDDING)
    assert not [n for n, v in verdicts.items() if v.category == Category.UNATTRIBUTED]
    optimizer = [v for n, v in verdicts.items() if v.category == Category.OPTIMIZER]
    assert optimizer and all(v.direction == Direction.NONE for v in optimizer)


def test_renaming_every_instruction_changes_no_verdict(v6e_program):
    """Categories do not hang on names: the same program with its instructions renamed is judged the same."""
    proto = new_message("HloProto")
    proto.ParseFromString(serialise_program(v6e_program))
    names = {}
    for computation in proto.hlo_module.computations:
        for instruction in computation.instructions:
            names[instruction.name] = f"x{len(names)}"
            instruction.name = names[instruction.name]
    renamed = classify_program(program_from_bytes(proto.SerializeToString(), "renamed"))
    before = classify_program(v6e_program)
    assert {names[name]: verdict for name, verdict in before.items()} == renamed


def test_attention_in_blocks_of_queries_is_found_forward_and_backward():
    """Its backward pass is written by hand: the file that calls it is all that tells it from the projections."""
    import haliax as hax
    import jax
    import jax.numpy as jnp

    from tomat.model.causal_blocks import causal_attention

    Batch, KvHead, Group, Size = (
        hax.Axis(name, size)
        for name, size in (("batch", 2), ("kv_head", 2), ("q_heads_per_group", 1), ("head_size", 32))
    )
    Pos, KeyPos = hax.Axis("position", 64), hax.Axis("key_position", 64)

    def attention(q, k, v):
        with jax.named_scope("DensityAttention"):
            return jnp.sin(causal_attention(q, k, v, 2).array).sum()

    args = [hax.ones((Batch, KvHead, Group, Pos, Size)), *[hax.ones((Batch, KvHead, KeyPos, Size))] * 2]
    text = jax.jit(jax.grad(attention, argnums=(0, 1, 2))).lower(*args).compile().as_text()
    found = {v.category for v in classify_program(program_from_text(text, "attention")).values()}
    assert {Category.ATTENTION_FORWARD, Category.ATTENTION_BACKWARD} <= found
    assert Category.MATMUL not in found
