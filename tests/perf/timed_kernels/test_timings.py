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


IN_MEBIBYTES = ("linear_softmax", "normalization_vjp", "triangle")


def test_rows_have_the_units_of_their_names():
    timings, refused = read_timings(FILE)
    assert len(timings) == len(FILE.read_text().splitlines()) - 1 and not refused
    with FILE.open(newline="") as file:
        for timing, row in zip(timings, csv.DictReader(file), strict=True):
            assert timing.seconds == pytest.approx(float(row["ms_median"]) / 1e3)
            mebibytes = timing.chip == "tpu7x" and any(part in timing.op for part in IN_MEBIBYTES)
            unit = 2**20 if mebibytes else 10**6
            assert timing.peak_memory_bytes == pytest.approx(float(row["peak_memory_mb"]) * unit, abs=1)
    assert {timing.chip for timing in timings} == {"v5e", "v5p", "v6e", "tpu7x"}


def test_memory_in_mebibytes_is_seen_for_all_rows_of_an_operation(tmp_path):
    """Two lines of TPU7x: 34090.5009765625 is no whole number of bytes as megabytes."""
    loss = {**GOOD, "op": "loss", "peak_memory_mb": "34090.5009765625"}
    rows = (GOOD, loss, {**loss, "peak_memory_mb": "2400.25"}, {**GOOD, "peak_memory_mb": "603.979776"})
    timings, _ = read_timings(written(tmp_path / "t.csv", *rows))
    assert [t.peak_memory_bytes for t in timings] == [10_500_000, 35_746_481_152, 2_516_844_544, 603_979_776]


def test_keys_tell_programs_apart_and_shapes_stay_together(tmp_path):
    causal = {**GOOD, "shapes": GOOD["shapes"].replace("}", ',"mask":{"is_causal":true}}')}
    tiles = {**GOOD, "op": "pallas_mosaic_tpu_dot_product_attention", "settings": '{"block_q":128}'}
    longer = {**GOOD, "shapes": GOOD["shapes"].replace("512", "1024")}
    timings, _ = read_timings(written(tmp_path / "t.csv", GOOD, causal, tiles, longer, {**GOOD, "ms_median": "2.05"}))
    assert len({timing.key for timing in timings}) == 4
    assert [timing.shape_key == timings[0].shape_key for timing in timings] == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ms_median": "2000000", "ms_max": "2000000"}, "is it in another unit"),
        ({"ms_median": "0"}, "is it in another unit"),
        ({"ms_median": "nan"}, "finite"),
        ({"ms_min": "3"}, "in this order"),
        ({"chip": "v9"}, "chip 'v9' is not known"),
        ({"runs": "2.5"}, "runs"),
        ({"peak_memory_mb": "1e9"}, "peak_memory_mb"),
        ({"shapes": "[1, 2]"}, "a JSON object"),
        ({"shapes": "{}"}, "no array"),
        ({"settings": "{"}, "a JSON object"),
        ({"shapes": GOOD["shapes"].replace('k":"bf16[8,512', 'k":"bf16[8,500')}, "do not fit together"),
        ({"shapes": GOOD["shapes"].replace('q":"bf16[8,512,4,64', 'q":"bf16[8,512,4,32')}, "do not fit together"),
        ({"shapes": GOOD["shapes"].replace('q":"bf16[8,512,4', 'q":"bf16[8,512,3')}, "no multiple"),
        ({"shapes": GOOD["shapes"].replace("[8,", "[0,")}, "empty axis"),
        ({"shapes": '{"x":"f32[8,16]","labels":"i32[9]","w":"f32[16,32]"}'}, "do not fit together"),
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
