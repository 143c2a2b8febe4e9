"""Timed kernels compiled for chips that are not here by the real compiler, and judged."""

import dataclasses
import gzip
import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from another_libtpu import another_libtpu
from shared_folder import alone, shared_folder

from tomat.base.errors import TomatError
from tomat.base.ports.tokamax import OPS
from tomat.base.records import typed
from tomat.hardware.chip_table import TPUS
from tomat.hardware.chips import slice_named
from tomat.perf.cost.llo import OpSchedule, Region
from tomat.perf.plan.compile.topology import OtherLibtpu, compiler_version
from tomat.perf.timed_kernels.compile import SCHEDULE_FILE, SMALLEST_SLICES, CompiledKernel, compile_kernels
from tomat.perf.timed_kernels.programs import DEFAULTS_OF, FORMULAS, RAGGED, _bound
from tomat.perf.timed_kernels.timings import COLUMNS, KernelTiming, read_timings
from tomat.report.pages.kernels_page import calibrate_kernels, timed_program

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: uv sync --extra plan")

TIMINGS = Path(__file__).parents[2] / "fixtures" / "kernels" / "timings.csv"
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


def timing(op: str, line: int = 2, settings: dict | None = None, **arguments: object) -> KernelTiming:
    whole = {**CALL, **arguments}
    return KernelTiming(line, "v6e", op, whole, settings or {}, 1e-4, 9e-5, 1.1e-4, 5, None)


FULL_MASK = {**CALL["mask"], "is_causal": False}
FLASH = timing("pallas_mosaic_tpu_flash_attention", 3, TILES, mask=FULL_MASK)
SMALL = [
    timing("dot_product_attention"), FLASH, timing("none_such", 4),
    timing("dot_product_attention", 5, precision="F32_F32"),
    dataclasses.replace(FLASH, line=6, settings={**TILES, "block_q": 100}),
    timing("dot_product_attention_vjp", 7, out=CALL["q"], dout=CALL["q"], residuals=["f32[2,2,256]"] * 2),
]  # fmt: skip


@pytest.fixture
def other_libtpu(tmp_path) -> OtherLibtpu:
    folder = another_libtpu(tmp_path / "other")
    return OtherLibtpu("0.0.1", folder / "libtpu" / "libtpu.so")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return shared_folder(tmp_path_factory, "timed-kernels")


@pytest.fixture(scope="module")
def kernels(cache) -> dict[int, CompiledKernel]:
    with alone(cache):
        return {kernel.timing.line: kernel for kernel in compile_kernels(SMALL, cache)}


@pytest.mark.slow
def test_rows_without_a_program_say_why_and_the_others_count(kernels):
    assert sorted(kernels) == [2, 3, 4, 5, 6, 7]
    assert {line for line, kernel in kernels.items() if kernel.folder is None} == {4, 5, 6}
    assert "no operation none_such" in kernels[4].reason
    assert all(kernels[line].reason and "\n" not in kernels[line].reason for line in (4, 5, 6))


def test_listings_say_what_the_final_bundles_say(kernels, tmp_path, monkeypatch):
    monkeypatch.setattr("tomat.perf.timed_kernels.compile.LISTED_CHIPS", ())
    regions = 0
    for whole in compile_kernels(SMALL[:2], tmp_path):
        listed, bundled = (_schedules(kernel) for kernel in (kernels[whole.timing.line], whole))
        # But for the slots that bundles fill, and for what runs before, between and after the operations.
        assert listed == {name: bundled[name] for name in listed}
        assert all(name == "TLP" or name.startswith("<") for name in bundled.keys() - listed.keys())
        regions += sum(len(list(schedule.body.walk())) - 1 for schedule in listed.values())
    assert regions > 2  # of the flash kernel's loop; the other has none


def _schedules(kernel: CompiledKernel) -> dict[str, OpSchedule]:
    def bare(region: Region) -> Region:
        return dataclasses.replace(region, slots=(), regions=tuple(map(bare, region.regions)))

    assert kernel.folder is not None
    kept = json.loads(gzip.decompress((kernel.folder / SCHEDULE_FILE).read_bytes()))
    schedules = typed(kept, dict[str, OpSchedule], "kept", "")
    return {n: dataclasses.replace(s, body=bare(s.body), units=(), capacity=()) for n, s in schedules.items()}


def test_what_was_compiled_is_found_again(kernels, cache, monkeypatch):
    monkeypatch.setattr("tomat.perf.plan.compile.process.subprocess.Popen", None)  # nothing may be started
    told: list[int] = []
    again = compile_kernels(SMALL[:2], cache, on_kernel=lambda kernel: told.append(kernel.timing.line))
    assert [kernel.folder for kernel in again] == [kernels[2].folder, kernels[3].folder] and told == [2, 3]


def test_a_kernel_that_takes_too_long_costs_its_own_row(tmp_path):
    slow = [dataclasses.replace(SMALL[0], arguments={**CALL, "logits_scale": scale}) for scale in (0.2, 0.3)]
    # Before they began with a row, since imports take seconds; the end of one process is the other's too.
    with pytest.raises(TomatError, match="took longer than"):
        compile_kernels(slow, tmp_path, workers=2, longest_seconds=0.01)
    assert not list(tmp_path.glob(".work*"))


def test_the_work_of_a_program_is_that_of_its_shapes(kernels):
    dense, flash = timed_program(kernels[2]), timed_program(kernels[3])
    assert not dense.work.pallas and flash.work.pallas and not flash.work.unscheduled_pallas
    for program in (dense, flash):
        moved = sum(times * kernel.hbm_bytes for kernel, times in program.work.kernels)
        # 256 KB of queries, of keys, of values, of outputs, some of them fetched beside other kernels; no more than all
        # logits in f32 ten times.
        assert 2**18 <= moved < 4 * 2**18 + 10 * 4 * 256 * 256 * 4
        products = sum(times * kernel.mxu_seconds for kernel, times in program.work.kernels)
        assert products >= 2 * 2 * 4 * 256 * 256 * 128 / 918e12
    assert dense.memory_error is None and dense.peak_memory_bytes > 4 * 2 * 2 * 256 * 256 / 2


def test_damage_in_the_cache_is_said(kernels, tmp_path):
    kernel = kernels[2]
    for name in ("result.json", "schedule.json.gz", "program.hlo.pb.gz"):
        folder = tmp_path / name.split(".")[0]
        folder.mkdir()
        for file in kernel.folder.iterdir():
            content = file.read_bytes()
            (folder / file.name).write_bytes(content[: len(content) // 2] if file.name == name else content)
        with pytest.raises(TomatError, match=r"damaged|cannot be read|Delete"):
            timed_program(dataclasses.replace(kernel, folder=folder))


def test_the_file_becomes_a_page_and_a_record(kernels, cache, tmp_path):
    lines = [",".join(COLUMNS)]
    for row in SMALL[:3]:
        cells = [json.dumps(dict(value)).replace('"', '""') for value in (row.arguments, row.settings)]
        lines.append(f'v6e,{row.op},"{cells[0]}","{cells[1]}",0.1,0.09,0.11,5,')
    lines.append(lines[1].replace(",0.1,", ",-0.1,"))
    file, kept = tmp_path / "timings.csv", tmp_path / "tracking" / "kernels.json"
    file.write_text("\n".join(lines) + "\n")
    record = calibrate_kernels(file, tmp_path / "tracking", cache_dir=cache)
    of_v6e, installed = record["chips"]["v6e"], compiler_version()
    assert of_v6e["all"]["kernels"] == 2 and not of_v6e["fitted"]
    assert of_v6e["compilers"] == {SMALL[0].op: installed, FLASH.op: installed}
    assert [row["line"] for row in record["refused"]] == [4, 5]
    assert json.loads(kept.read_text()) == record
    # Once more, where other chips were calibrated before: what is on record of them stays. Older records named one
    # compiler of a chip, or one of all.
    older = {name: value for name, value in of_v6e.items() if name != "compilers"}
    chips = {"v5p": older, "v4": {**older, "compiler": "libtpu 0.0.8"}}
    other = {"line": 9, "row": "v5p ragged_dot", "reason": "no groups"}
    kept.write_text(json.dumps({"compiler": "libtpu 0.0.9", "chips": chips, "refused": [*record["refused"], other]}))
    again = calibrate_kernels(file, tmp_path / "tracking", cache_dir=cache)
    assert [row["line"] for row in again["refused"]] == [4, 5, 9]
    compilers = {chip: values["compilers"][FLASH.op] for chip, values in again["chips"].items()}
    assert compilers == {"v4": "libtpu 0.0.8", "v5p": "libtpu 0.0.9", "v6e": installed}
    page = (tmp_path / "tracking" / "kernels.md").read_text()
    assert "Too few kernels to fit: " in page and f"| {installed} |" in page
    assert "no operation none_such" in page and "is it in another unit" in page
    file.write_text("\n".join([lines[0], lines[3]]) + "\n")
    with pytest.raises(TomatError, match="line 2: tokamax .* has no operation none_such"):
        calibrate_kernels(file, tmp_path / "empty", cache_dir=cache)
    assert not (tmp_path / "empty").exists()
    with pytest.raises(TomatError, match="no row of the chip v5p"):
        calibrate_kernels(file, tmp_path / "tracking", cache_dir=cache, chips=["v5p"])


@pytest.mark.slow
def test_kernels_are_compiled_by_the_libtpu_that_is_given(kernels, cache, other_libtpu, tmp_path):
    other = other_libtpu
    assert compiler_version(other) == "libtpu 0.0.1"
    (compiled,) = compile_kernels(SMALL[:1], cache, compiler_of={SMALL[0].op: other}.get)
    assert compiled.folder not in (None, kernels[2].folder)  # what another compiler made is not taken for it
    assert timed_program(compiled).peak_memory_bytes == timed_program(kernels[2]).peak_memory_bytes
    broken = dataclasses.replace(other, version="0.0.2", library=tmp_path / "broken.so")
    with pytest.raises(TomatError, match="broken.so is gone; expected libtpu 0.0.2"):
        compile_kernels(SMALL[:1], cache, compiler_of=lambda op: broken)
    broken.library.write_text("no library")
    with pytest.raises(TomatError, match="libtpu 0.0.2 cannot describe v6e-1"):
        compile_kernels(SMALL[:1], cache, compiler_of=lambda op: broken)


def test_what_can_have_no_program_starts_no_process(cache, monkeypatch):
    monkeypatch.setattr("tomat.perf.plan.compile.process.subprocess.Popen", None)
    ragged = dataclasses.replace(SMALL[0], op=RAGGED[0])
    assert [kernel.folder for kernel in compile_kernels([ragged, SMALL[2]], cache)] == [None, None]


def test_every_operation_of_the_data_has_a_program_or_is_known_to_have_none_and_every_chip_a_slice():
    ops = {row.op for row in read_timings(TIMINGS)[0]}
    assert not ops - OPS.keys() - set(RAGGED) - set(FORMULAS)
    assert {slice_named(name).chip.name for name in SMALLEST_SLICES.values()} == {chip.name for chip in TPUS}


def test_a_backward_pass_has_the_defaults_of_its_forward_call_for_what_its_row_leaves_out():
    rows = [row for row in read_timings(TIMINGS)[0] if row.op in DEFAULTS_OF]
    assert {row.op for row in rows} == DEFAULTS_OF.keys()
    for row in rows:
        operation, arguments = _bound(row)
        inspect.signature(operation._fwd).bind(**arguments, config=None)
        defaults = {"bias": None, "logits_soft_cap": None, "dropout_mask": None, "dropout_rate": 0.0}
        left_out = defaults.keys() - row.arguments.keys()
        assert left_out and all(arguments[name] == defaults[name] for name in left_out)
        assert arguments["logits_scale"] == row.arguments["logits_scale"]


def test_the_backward_pass_of_attention_is_the_gradient():
    """Of one that a row describes, in numbers, beside JAX's own."""
    arguments = {
        **CALL, "q": "f32[2,16,2,8]", "k": "f32[2,16,2,8]", "v": "f32[2,16,2,8]", "bias": "f32[1,2,16,16]",
        "precision": ["F32_F32_F32"] * 2, "out": "f32[2,16,2,8]", "dout": "f32[2,16,2,8]",
        "residuals": ["f32[2,2,16]"] * 2,
    }  # fmt: skip
    row = dataclasses.replace(SMALL[0], op="dot_product_attention_vjp", arguments=arguments)
    operation, call = _bound(row)
    keys = jax.random.split(jax.random.key(0), 5)
    values = [
        jax.random.normal(key, call[name].shape)
        for key, name in zip(keys, ("q", "k", "v", "bias", "dout"), strict=True)
    ]
    d_out = values.pop()

    def attend(q, k, v, bias):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * 0.1 + bias
        scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), scores, -jnp.inf)
        top = scores.max(-1)
        sums = jnp.exp(scores - top[..., None]).sum(-1)
        weights = jnp.exp(scores - top[..., None]) / sums[..., None]
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest"), (top, sums)

    out, backward, residuals = jax.vjp(attend, *values, has_aux=True)
    given = {**call, "residuals": residuals, "out": out, "dout": d_out}
    given |= dict(zip(("q", "k", "v", "bias"), values, strict=True))
    found, _ = operation._fwd(**given, config=None)
    for name, expected in zip(("q", "k", "v", "bias"), backward(d_out), strict=True):
        np.testing.assert_allclose(found[name], expected, rtol=2e-4, atol=2e-6)
