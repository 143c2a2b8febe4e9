"""Timed kernels compiled for a v6e that is not here by the real compiler, and judged."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
from forked import instead_of_compiling
from shared_folder import alone, shared_folder

from tomat.base.errors import TomatError
from tomat.measure.bench.chip_rows import quick_rows
from tomat.perf.plan.compile.process import Limits
from tomat.perf.plan.compile.topology import compiler_version
from tomat.perf.timed_kernels.own import TIMED_WITH
from tomat.perf.timed_kernels.programs import Compiler, TimedProgram, timed_programs
from tomat.perf.timed_kernels.timings import COLUMNS, KernelTiming, RefusedRow
from tomat.report.pages.calibration_page import calibrate_kernels

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: uv sync --extra plan")

(SPLASH,) = [row for row in quick_rows() if row[0] == "tomat_splash_attention"]
PRODUCT = ("tomat_matmul", {"x": "bf16[512,256]", "w": "bf16[256,512]"}, {})
ROWS = [
    KernelTiming(line, "v6e", op, arguments, {**settings, TIMED_WITH: "jax"}, 1e-5, None)
    for line, (op, arguments, settings) in enumerate((PRODUCT, SPLASH, (*PRODUCT[:2], {"loop": 2})), start=2)
]
ROWS.append(dataclasses.replace(ROWS[0], line=5, op="normalization"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return shared_folder(tmp_path_factory, "timed-kernels")


@pytest.fixture(scope="module")
def compiled(cache) -> list[TimedProgram | RefusedRow]:
    with alone(cache), pytest.MonkeyPatch.context() as patch:
        instead_of_compiling(patch)
        return list(timed_programs(ROWS, cache))


def test_programs_have_the_work_of_their_shapes_and_other_rows_say_why_they_have_none(compiled):
    product, splash, loop, foreign = compiled
    assert isinstance(product, TimedProgram) and isinstance(splash, TimedProgram)
    assert product.timing.line == 2 and not product.work.unscheduled_pallas
    assert splash.work.kernels and not splash.work.unscheduled_pallas
    assert sum(times * each.mxu_seconds for each, times in product.work.kernels) >= 2 * 512 * 256 * 512 / 918e12
    # Operands and result, some of them fetched beside other kernels.
    copies = [(copy.size_bytes, n * times) for each, n in product.work.kernels for copy, times in each.copies]
    moved = sum(size * times for size, times in copies)
    assert 2**18 <= moved <= product.peak_memory_bytes >= 2 * (2 * 512 * 256 + 512 * 512) / 2
    assert product.memory_error is None
    assert isinstance(loop, RefusedRow) and isinstance(foreign, RefusedRow)
    assert (loop.line, foreign.line) == (4, 5) and "no setting loop" in loop.reason
    assert "normalization is no operation of tomat's own" in foreign.reason


def test_what_was_compiled_is_found_again(compiled, cache, monkeypatch):
    monkeypatch.setattr("tomat.perf.plan.compile.process.subprocess.Popen", None)  # nothing may be started
    assert list(timed_programs(ROWS, cache, workers=2)) == compiled


def test_another_compiler_is_another_program_and_has_to_be_there(compiled, cache, tmp_path):
    other = Compiler("libtpu 0.0.1", tmp_path / "libtpu.so")
    with pytest.raises(TomatError, match="libtpu.so is gone; expected libtpu 0.0.1 there"):
        list(timed_programs(ROWS[:1], cache, compiler_of=lambda op: other))
    other.library.write_text("no library")
    with pytest.raises(TomatError, match="libtpu 0.0.1 cannot describe v6e-1"):
        list(timed_programs(ROWS[:1], cache, compiler_of=lambda op: other))


def test_an_interrupt_ends_the_compile_in_progress(tmp_path, monkeypatch):
    """A compiler ignores an interrupt for minutes."""
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(300)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def compiler_of(op: str) -> Compiler:
        if op == PRODUCT[0]:
            while not list(tmp_path.glob(".work-*/stderr.txt")):  # of the other row's process
                time.sleep(0.1)
            raise KeyboardInterrupt
        return Compiler("libtpu 0")

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(timed_programs(ROWS[:2], tmp_path, workers=2, child="sleeper", compiler_of=compiler_of))
    assert time.monotonic() - began < 60 and not list(tmp_path.glob(".work-*"))


def test_a_kernel_that_takes_too_long_costs_its_own_row(tmp_path):
    (refused,) = timed_programs(ROWS[:1], tmp_path, limits=Limits(seconds=0.5))
    assert (
        isinstance(refused, RefusedRow)
        and refused.line == 2
        and "took longer than" in refused.reason
        and "\n" not in refused.reason
    )
    assert not list(tmp_path.glob(".work*"))


def test_the_file_becomes_a_page_and_a_record(compiled, cache, tmp_path):
    lines = [",".join(COLUMNS)]
    for row in ROWS:
        cells = [json.dumps(dict(value)).replace('"', '""') for value in (row.arguments, row.settings)]
        lines.append(f'v6e,{row.op},"{cells[0]}","{cells[1]}",0.1,0.09,0.11,5,')
    lines.append(lines[1].replace(",0.1,", ",-0.1,"))
    file, kept = tmp_path / "timings.csv", tmp_path / "tracking" / "kernels.json"
    file.write_text("\n".join(lines) + "\n")
    record = calibrate_kernels(file, tmp_path / "tracking", cache_dir=cache)
    of_v6e, installed = record["chips"]["v6e"], compiler_version()
    assert of_v6e["all"]["kernels"] == 2 and not of_v6e["fitted"]
    assert of_v6e["compilers"] == {PRODUCT[0]: installed, SPLASH[0]: installed}
    assert [row["line"] for row in record["refused"]] == [4, 5, 6]
    assert json.loads(kept.read_text()) == record
    # Once more, where other chips were calibrated before: what is on record of them stays. Older records named one
    # compiler of a chip, or one of all.
    older = {name: value for name, value in of_v6e.items() if name != "compilers"}
    chips = {"v5p": older, "v4": {**older, "compiler": "libtpu 0.0.8"}}
    other = {"line": 9, "row": "v5p ragged_dot", "reason": "no groups"}
    kept.write_text(json.dumps({"compiler": "libtpu 0.0.9", "chips": chips, "refused": [*record["refused"], other]}))
    again = calibrate_kernels(file, tmp_path / "tracking", cache_dir=cache)
    assert [row["line"] for row in again["refused"]] == [4, 5, 6, 9]
    compilers = {chip: values["compilers"][PRODUCT[0]] for chip, values in again["chips"].items()}
    assert compilers == {"v4": "libtpu 0.0.8", "v5p": "libtpu 0.0.9", "v6e": installed}
    page = (tmp_path / "tracking" / "kernels.md").read_text()
    assert "Too few kernels to fit: " in page and f"| {installed} |" in page
    assert "profiling/calibrate_with_libtpu.py" in page and "in another unit" in page
    file.write_text("\n".join([lines[0], lines[4], lines[3], lines[5]]) + "\n")
    with pytest.raises(TomatError, match="line 2: normalization is no operation of tomat's own"):
        calibrate_kernels(file, tmp_path / "empty", cache_dir=cache)
    assert not (tmp_path / "empty").exists()
    with pytest.raises(TomatError, match="no row of the chip v5p"):
        calibrate_kernels(file, tmp_path / "tracking", cache_dir=cache, chips=["v5p"])
