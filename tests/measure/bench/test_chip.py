"""`tomat bench chip` on two CPU devices: its record, resumed, and read by the plan side."""

import csv
import json
from pathlib import Path

import pytest
from json_keys import assert_keys_of_before

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.hardware.chips import CHIPS
from tomat.measure.bench import chip
from tomat.measure.bench.chip import time_row
from tomat.measure.bench.chip_record import Machine, measured_peaks
from tomat.measure.bench.chip_rows import quick_rows
from tomat.measure.bench.collectives import KINDS, QUICK_SIZES_BYTES
from tomat.perf.timed_kernels.own import SPLASH, TIMED_WITH
from tomat.perf.timed_kernels.timings import COLUMNS, read_timings

ROWS = [row for row in quick_rows() if row[0] not in SPLASH]


def bench(csv_file: Path, *words: str) -> dict:
    assert main(["bench", "chip", "--output", str(csv_file), *words]) == 0
    return json.loads(csv_file.with_suffix(".json").read_text())


def cells(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.fixture(scope="module")
def timed(tmp_path_factory) -> tuple[Path, dict]:
    file = tmp_path_factory.mktemp("chip") / "cpu.csv"
    return file, bench(file)


def test_every_kernel_has_a_row_and_every_collective_a_figure(timed, tmp_path):
    file, report = timed
    assert_keys_of_before("bench chip", report)
    found = cells(file)
    assert [(row["op"], json.loads(row["shapes"])) for row in found] == [(op, arguments) for op, arguments, _ in ROWS]
    for row in found:
        low, median, high = (float(row[f"ms_{which}"]) for which in ("min", "median", "max"))
        assert 0 < low <= median <= high and int(row["runs"]) >= 3 and row["chip"] == "cpu"
        assert json.loads(row["settings"])[TIMED_WITH] == report["timed_with"]
    assert not report["rows_left_out"] and not report["rows_not_begun"] and report["dispatch_seconds"] > 0
    # No peak of a CPU is known; its arrays are too small to say anything of its memory.
    assert report["best_matmul"]["flops_per_second"] > 0 and report["best_matmul"]["share"] is None
    assert report["best_hbm"]["bytes_per_second"] is None
    kinds = [(row["kind"], row["bytes_per_device"]) for row in report["collectives"]]
    assert kinds == [(kind, size) for kind in KINDS for size in QUICK_SIZES_BYTES]
    assert all(row["n_devices"] == 2 and row["seconds_min"] > 0 for row in report["collectives"])
    assert report["collective_fits"].keys() == KINDS.keys()
    # The plan side reads the record of a chip that it knows.
    with pytest.raises(TomatError, match="chip 'cpu' is not known"):
        read_timings(file)
    of_v6e = tmp_path / "v6e.csv"
    of_v6e.write_text(file.read_text().replace("\ncpu,", "\nv6e,"))
    timings, refused = read_timings(of_v6e)
    assert not refused and [(each.op, each.arguments) for each in timings] == [row[:2] for row in ROWS]


@pytest.fixture
def no_collectives(monkeypatch):
    monkeypatch.setattr(chip, "time_collectives", lambda *_, **__: [])


def test_what_is_in_the_file_is_not_timed_again(timed, no_collectives, tmp_path, capsys):
    file, report = timed
    before = cells(file)
    other = {**before[0], "chip": "v6e"}
    older = {**before[1], "settings": before[1]["settings"].replace(report["timed_with"], "jax 0.1")}
    damaged = {**before[2], "ms_median": "fast"}
    changed = tmp_path / "changed.csv"
    with changed.open("w", newline="") as opened:
        rows = [other, older, damaged, *before[4:]]
        csv.writer(opened).writerows([COLUMNS, *([row[name] for name in COLUMNS] for row in rows)])
    bench(changed)
    assert f"{len(ROWS) - 4} rows of {len(ROWS)} are in {changed} already" in capsys.readouterr().out.replace("\n", "")
    after = cells(changed)
    assert after[: len(before) - 3] == [other, *before[4:]]
    # What another JAX timed and what is damaged are replaced, what is missing is added.
    assert [row["op"] for row in after[len(before) - 3 :]] == [row["op"] for row in before[:4]]
    assert all(float(row["ms_median"]) > 0 and report["timed_with"] in row["settings"] for row in after[-4:])


def test_the_record_is_for_nobody_but_the_user_of_a_cpu(no_collectives, tmp_path, capsys):
    # Nothing is begun after no time at all, and that is said.
    report = bench(tmp_path / "none.csv", "--minutes", "1e-9")
    said = " ".join(capsys.readouterr().out.split())
    assert "cannot use these rows" in said and "2 rows of splash attention left out" in said
    assert f"{len(ROWS)} rows not begun" in said and len(report["rows_not_begun"]) == len(ROWS)
    assert not (tmp_path / "none.csv").exists() and report["best_matmul"]["row"] is None
    # A file of something else stays as it is.
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    assert main(["bench", "chip", "--output", str(tmp_path / "other.csv")]) == 2
    assert "has the columns a, b" in capsys.readouterr().err
    assert (tmp_path / "other.csv").read_text() == "a,b\n1,2\n"


def test_rows_that_do_not_fit_or_cannot_run_say_so():
    here = Machine.here()
    small = Machine(here.device, None, "", memory_bytes=2**20)
    with pytest.raises(TomatError, match="it needs 1.5 MiB"):
        time_row(small, ("tomat_copy", {"x": "f32[256,512]"}, {}), seconds=0.01)
    with pytest.raises(TomatError, match="the device refuses it"):
        time_row(here, ("tomat_matmul", {"x": "f32[8,16]", "w": "f32[8,16]"}, {}), seconds=0.01)


def test_peaks_are_shares_of_the_table():
    def row(op: str, ms: float, settings: dict | None = None, **shapes: str) -> dict[str, str]:
        whole = {"settings": json.dumps(settings or {}), "shapes": json.dumps(shapes)}
        return {"chip": "v6e", "op": op, "ms_median": str(ms), **whole}

    v6e = CHIPS["v6e"]
    assert v6e.hbm_bytes_per_second is not None
    product_ms = 1e3 * 2 * 8192**3 / (0.75 * v6e.peak_bf16_flops_per_second)
    copied_ms = 1e3 * 2 * 2**30 / (0.8 * v6e.hbm_bytes_per_second)
    rows = [
        row("tomat_matmul", product_ms, x="bf16[8192,8192]", w="bf16[8192,8192]"),
        row("tomat_matmul", product_ms / 4, x="f32[8192,8192]", w="f32[8192,8192]"),
        row("tomat_copy", copied_ms, x="f32[65536,4096]"),
        # On the chip, and several rounds in one program: neither says anything of HBM.
        row("tomat_copy", 1e-3, x="f32[1024,1024]"),
        row("tomat_add", copied_ms, {"loop": 2}, x="f32[65536,4096]", y="f32[65536,4096]"),
    ]
    peaks = measured_peaks(v6e, rows)
    assert peaks["best_matmul"]["share"] == pytest.approx(0.75) and peaks["best_hbm"]["share"] == pytest.approx(0.8)
    assert peaks["best_hbm"]["row"] == "tomat_copy x f32[65536,4096]"
