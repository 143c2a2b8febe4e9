import json

import pytest

from tomat.base.errors import TomatError
from tomat.model.tiles import LossTiles, TunedSizes, TunedTiles, load_table, tuned_tiles
from tomat.model.vmem import VMEM_BYTES, VMEM_SHARE, check_vmem, vmem_bytes

SMALL, WIDE, OTHER_CHIP, FLOAT32 = (LossTiles(size, 16, 128, 16) for size in (16, 32, 64, 128))
TABLE = (
    TunedTiles("TPU v6 lite", 1024, 18570, "bfloat16", SMALL),
    TunedTiles("TPU v6 lite", 2048, 18570, "bfloat16", WIDE),
    TunedTiles("TPU v5 lite", 1280, 18570, "bfloat16", OTHER_CHIP),
    TunedTiles("TPU v6 lite", 1280, 18570, "float32", FLOAT32),
)


def test_nearest_entry():
    for asked, expected in (
        (("TPU v6 lite", 1024, 18570, "bfloat16"), SMALL),
        (("TPU v6 lite", 1280, 16384, "bfloat16"), SMALL),
        (("TPU v6 lite", 1792, 16384, "bfloat16"), WIDE),
        (("TPU v5 lite", 2048, 18570, "bfloat16"), OTHER_CHIP),
        (("TPU v6 lite", 1024, 18570, "float32"), FLOAT32),
        (("cpu", 2048, 18570, "bfloat16"), WIDE),
    ):
        assert tuned_tiles(*asked, table=TABLE) == expected, asked


def test_the_tables_that_are_shipped_fit_their_chips_and_say_where_they_come_from():
    assert load_table(TunedTiles)
    for entry in load_table(TunedTiles):
        assert None not in vars(entry.tiles).values()
        itemsize = {"bfloat16": 2, "float32": 4}[entry.dtype]
        check_vmem(entry.tiles, entry.tiles.resident_rows or 0, entry.width, itemsize, 5, entry.device_kind)
    for table, kernel in ((TunedTiles, "pallas"), (TunedSizes, "whole_head")):
        for entry in json.loads(table.FILE.read_text())["entries"]:
            rows = [row for row in entry["provenance"]["candidates"] if row["kernel"] == kernel and "seconds" in row]
            best = min(rows, key=lambda row: row["seconds"])
            assert best["tiles"] == entry["tiles"] and best["seconds"] == entry["planned_seconds"]
            assert entry["provenance"]["compiler"].startswith("libtpu ")


def test_refuses_tiles_and_fills_what_is_not_set():
    for sizes, message in (
        ((4096, 256, 500, 32), "block_ids is 500; expected a positive multiple of 128"),
        ((4096, 8, 512, 8), "block_rows is 8; expected a positive multiple of 16"),
        ((4096, 768, 512, 32), "expected resident_rows to be a multiple of block_rows"),
        ((4096, 256, 512, 96), "expected block_rows to be a multiple of chunk_rows"),
    ):
        with pytest.raises(TomatError, match=message):
            LossTiles(*sizes)
    assert LossTiles(block_ids=256).filled(LossTiles(4096, 256, 512, 32)) == LossTiles(4096, 256, 256, 32)
    with pytest.raises(TomatError, match="multiple of chunk_rows"):
        LossTiles(block_rows=16).filled(LossTiles(4096, 256, 512, 32))


def test_refuses_what_does_not_fit_vmem():
    tiles = LossTiles(4096, 256, 512, 32)
    # By hand: scalars 2, hidden 8, sums 16, their bfloat16 8, head 2, its gradient 8, logits 1, gradient 1/4 MiB.
    assert vmem_bytes(tiles, 4096, 1024, 2, 1) == (2 + 8 + 16 + 8 + 2 + 8 + 1) * 2**20 + 2**18
    assert vmem_bytes(tiles, 4096, 1024, 2, 5) < check_vmem(tiles, 4096, 1024, 2, 5, "TPU v6 lite")
    assert check_vmem(tiles, 4096, 1024, 2, 5, "TPU v6 lite") < VMEM_BYTES["TPU v6 lite"]
    with pytest.raises(TomatError, match=r"MiB of VMEM at a width of 8192 .*resident_rows 4096.*or loss.kernel: xla"):
        check_vmem(tiles, 4096, 8192, 2, 5, "TPU v6 lite")
    assert vmem_bytes(tiles, 4096, 1024, 2, 5) > VMEM_SHARE * VMEM_BYTES["TPU v4"]


def test_refuses_a_table_that_is_none(tmp_path):
    (tmp_path / "tiles.json").write_text('{"entries": []}')
    with pytest.raises(TomatError, match=r"tiles.json .*tomat bench loss-tiles"):
        load_table(TunedTiles, tmp_path / "tiles.json")
