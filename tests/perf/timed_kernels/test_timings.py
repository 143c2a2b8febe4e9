"""Reading kernel timings: `data/kernels/timings.csv` holds 48 rows of openxla/tokamax's autotuning data as facts
(`tokamax/data/autotuning` at commit 783ea95, 2026-08-21, Apache-2.0)."""

import csv
from pathlib import Path

import pytest

from tomat.base.errors import TomatError
from tomat.perf.timed_kernels.timings import COLUMNS, read_timings

FILE = Path(__file__).parents[2] / "fixtures" / "kernels" / "timings.csv"
GOOD = {
    "chip": "v6e", "op": "dot_product_attention",
    "shapes": '{"q":"bf16[8,512,4,64]","k":"bf16[8,512,2,64]","v":"bf16[8,512,2,64]"}', "settings": "{}",
    "ms_median": "2.0", "ms_min": "1.9", "ms_max": "2.1", "runs": "5", "peak_memory_mb": "10.5",
}  # fmt: skip


def written(path: Path, *rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    return path


def test_rows_have_the_units_of_their_names():
    timings, refused = read_timings(FILE)
    assert len(timings) == len(FILE.read_text().splitlines()) - 1 and not refused
    with FILE.open(newline="") as file:
        for timing, row in zip(timings, csv.DictReader(file), strict=True):
            assert timing.seconds == pytest.approx(float(row["ms_median"]) / 1e3)
            assert timing.peak_memory_bytes == pytest.approx(float(row["peak_memory_mb"]) * 10**6, abs=1)
    assert {timing.chip for timing in timings} == {"v5e", "v5p", "v6e", "tpu7x"}


def test_keys_tell_programs_apart_and_shapes_stay_together(tmp_path):
    causal = {**GOOD, "shapes": GOOD["shapes"].replace("}", ',"mask":{"is_causal":true}}')}
    tiles = {**GOOD, "op": "pallas_mosaic_tpu_dot_product_attention", "settings": '{"block_q":128}'}
    longer = {**GOOD, "shapes": GOOD["shapes"].replace("512", "1024")}
    timings, _ = read_timings(
        written(tmp_path / "t.csv", {**GOOD, "runs": "5.0"}, causal, tiles, longer, {**GOOD, "ms_median": "2.05"})
    )
    assert len({timing.key for timing in timings}) == 4
    assert [timing.shape_key == timings[0].shape_key for timing in timings] == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ms_median": "2000000", "ms_max": "2000000"}, "ms_median is 2000000; expected float <= 60000"),
        ({"ms_median": "0"}, "in another unit"),
        ({"ms_median": "nan"}, "ms_median is 'nan'"),
        ({"ms_min": "3"}, "in this order"),
        ({"chip": "v9"}, "chip 'v9' is not known"),
        ({"runs": "2.5"}, "runs"),
        ({"peak_memory_mb": "1e9"}, "peak_memory_mb"),
        ({"shapes": "[1, 2]"}, "shapes is list of 2; expected object"),
        ({"settings": "{"}, "expected object"),
    ],
)
def test_a_row_that_cannot_be_is_named_and_the_others_count(tmp_path, changed, says):
    timings, refused = read_timings(written(tmp_path / "t.csv", GOOD, {**GOOD, **changed}, GOOD))
    assert [timing.line for timing in timings] == [2, 4]
    [row] = refused
    assert row.line == 3 and says in row.reason and "\n" not in row.reason


def test_a_file_of_something_else_is_refused(tmp_path):
    for content in (b"", b"a,b\n1,2\n", b"\xff\xfe\x00", b",".join(name.encode() for name in COLUMNS)):
        (tmp_path / "t.csv").write_bytes(content)
        with pytest.raises(TomatError, match=r"t\.csv"):
            read_timings(tmp_path / "t.csv")
    with pytest.raises(TomatError, match="cannot be read"):
        read_timings(tmp_path / "none.csv")
