"""Which libtpu compiles which operation, and the programs of tokamax's rows: what they compute, and what is refused."""

import dataclasses
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calibrate_with_libtpu import build_parser, libtpu_in, read_compilers, read_tokamax
from calibrate_with_libtpu_programs import (
    CHUNKED_LOSS,
    FORMULAS,
    OPS,
    RAGGED,
    VERSION,
    blockwise_loss,
    formula,
    kept_backward,
    no_program,
)
from reported import reported

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.perf.plan.compile.topology import compiler_version
from tomat.perf.timed_kernels.timings import COLUMNS, KernelTiming

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: uv sync --extra plan")

TIMINGS = Path(__file__).parents[1] / "fixtures" / "kernels" / "timings.csv"


@pytest.fixture
def other(tmp_path):
    """The installed libtpu, under another version, in a folder."""
    folder, found = tmp_path / "other", importlib.util.find_spec("libtpu")
    facts = folder / "libtpu-0.0.1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: libtpu\nVersion: 0.0.1\n")
    (folder / "libtpu").mkdir()
    (folder / "libtpu" / "libtpu.so").symlink_to(Path(found.origin).with_name("libtpu.so"))
    return folder


def test_each_operation_may_have_a_compiler_of_its_own(other, tmp_path):
    assert read_compilers(()) == {}
    assert read_compilers([str(other), f"normalization={other}"]) == dict.fromkeys(
        ("", "normalization"), libtpu_in(other)
    )
    assert compiler_version() != libtpu_in(other).name == "libtpu 0.0.1"
    with pytest.raises(TomatError, match="--libtpu gives two compilers of normalization"):
        read_compilers([f"normalization={other}", f"normalization={other}"])
    (tmp_path / "odd=name").mkdir()
    with pytest.raises(TomatError, match="odd=name holds no libtpu"):
        read_compilers([str(tmp_path / "odd=name")])  # a path, not an operation


def test_the_script_reads_its_flags_before_anything_is_compiled(other, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "timings.csv").write_text("chip\n")
    for kernels, libtpu, message in (
        ("timings.csv", tmp_path, "holds no libtpu"),
        ("timings.csv", other, "timings.csv"),
        (str(TIMINGS), f"of_nobody={other}", "--libtpu names the operation of_nobody; the rows are of chunked_xla_"),
    ):
        words = ["--kernels", kernels, "--tracking_dir", "tracking", "--libtpu", str(libtpu)]
        assert main(words, build_parser()) == 2
        told = capsys.readouterr().err
        assert message in told and told.count("\n") == 1
    assert not (tmp_path / "tracking").exists()


ATTENTION = {"q": "bf16[2,256,2,128]", "k": "bf16[2,256,2,128]", "v": "bf16[2,256,2,128]"}
CALL = {
    **ATTENTION, "precision": ["BF16_BF16_F32", "BF16_BF16_F32"], "logits_dtype": "float32", "logits_scale": 0.1,
    "mask": {"bool_mask": None, "q_start": None, "q_end": None, "k_start": None, "k_end": None, "is_causal": True},
    "normalize_output": True,
}  # fmt: skip
TILES = {
    "block_q": 128, "block_kv": 128, "block_kv_compute": 128, "q_layout": 1, "k_layout": 1, "v_layout": 1,
    "use_experimental_scheduler": True, "use_base2_exp": True,
}  # fmt: skip


@pytest.mark.slow
def test_tokamaxs_rows_are_compiled_by_the_libtpu_that_is_given(other, tmp_path):
    op, mask = "pallas_mosaic_tpu_flash_attention", {**CALL["mask"], "is_causal": False}
    cells = [json.dumps(cell).replace('"', '""') for cell in (CALL | {"mask": mask}, TILES)]
    row = f'v6e,{op},"{cells[0]}","{cells[1]}",0.1,0.09,0.11,5,'
    (tmp_path / "t.csv").write_text(",".join(COLUMNS) + f"\n{row}\n")
    words = ["--kernels", tmp_path / "t.csv", "--libtpu", other, "--tracking_dir", tmp_path]
    record = reported(tmp_path, *words, "--cache_dir", tmp_path / "cache", parser=build_parser())
    of_v6e = record["chips"]["v6e"]
    assert of_v6e["compilers"] == {op: "libtpu 0.0.1"} and of_v6e["all"]["unscheduled_pallas_kernels"] == 0


def test_every_operation_of_the_data_has_a_program_or_is_known_to_have_none():
    assert importlib.metadata.version("tokamax") == VERSION  # whose private names the programs are made with
    timings, _ = read_tokamax(TIMINGS)
    assert not {row.op for row in timings} - OPS.keys() - set(RAGGED) - set(FORMULAS)
    assert all(row.peak_memory_bytes for row in timings)
    none, ragged = (dataclasses.replace(timings[0], op=op) for op in ("none_such", RAGGED[0]))
    assert "no operation none_such" in str(no_program(none)) and "sizes of its groups" in str(no_program(ragged))


def test_memory_in_mebibytes_is_seen_for_all_rows_of_an_operation(tmp_path):
    """Two lines of TPU7x: 34090.5009765625 is no whole number of bytes as megabytes. The last row is refused."""
    lines = [",".join(COLUMNS)]
    loss = ("34090.5009765625", "2400.25", "")
    written = (("a", "10.5"), *(("loss", memory) for memory in loss), ("a", "603.979776"), ("a", "abc"))
    lines += [f"v6e,{op},{{}},{{}},2.0,1.9,2.1,5,{memory}" for op, memory in written]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    found = [timing.peak_memory_bytes for timing in read_tokamax(tmp_path / "t.csv")[0]]
    assert found == [10_500_000, 35_746_481_152, 2_516_844_544, None, 603_979_776]


LOSS = {"x": "f32[48,16]", "labels": "i32[48]", "w": "bf16[16,96]", "reduction": "mean"}
BLOCKS = {"b_block_size": 16, "v_block_size": 32}


def timing(arguments: dict, settings: dict) -> KernelTiming:
    return KernelTiming(2, "v6e", CHUNKED_LOSS, arguments, settings, 1e-3, None)


def test_the_loss_in_blocks_is_that_of_all_logits():
    one, two, three = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(one, (48, 16)), jax.random.normal(two, (16, 96))
    labels = jax.random.randint(three, (48,), 0, 96)
    logits = x @ w
    each = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    loss, normalisers = blockwise_loss(x, labels, w, block_rows=64, block_columns=32, mean=True)
    np.testing.assert_allclose(loss, each.mean(), rtol=1e-5)
    np.testing.assert_allclose(normalisers, jax.nn.logsumexp(logits, axis=-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({**LOSS, "bias": "f32[3]"}, BLOCKS), (LOSS, {**BLOCKS, "unroll": 2}), ({**LOSS, "x": 3}, BLOCKS),
    ],
)  # fmt: skip
def test_other_arguments_are_refused(arguments, settings):
    with pytest.raises(TomatError, match="b_block_size"):
        formula(timing(arguments, settings))


def test_a_backward_pass_of_what_is_kept_computes_nothing_again():
    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        inner = jnp.exp(x)
        out = jnp.tanh(inner @ w)
        return out, (inner, w, out)

    one, two, three = jax.random.split(jax.random.key(0), 3)
    x, w, d_out = jax.random.normal(one, (4, 8)), jax.random.normal(two, (8, 3)), jax.random.normal(three, (4, 3))
    out, backward, kept = jax.vjp(forward, x, w, has_aux=True)
    of_kept = kept_backward(forward, x, w)
    for found, expected in zip(of_kept(kept, d_out), backward(d_out), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    compiled = jax.jit(of_kept).lower(kept, d_out).compile().as_text()
    assert compiled is not None and "dot(" in compiled and "tanh(" not in compiled and "exponential(" not in compiled
    # Other values than those that the inputs have: it reads what it is given.
    assert not np.allclose(of_kept((*kept[:2], 0.5 * out), d_out)[0], backward(d_out)[0])
    with pytest.raises(TomatError, match="needs more than what the forward pass keeps"):
        kept_backward(lambda x: (jnp.sin(x), ()), jnp.ones(3))
