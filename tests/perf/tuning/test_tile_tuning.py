"""Tiles of the loss and of attention: tuned by the compiler, written into tables, and read from them."""

import json
from pathlib import Path

import pytest
from forked import instead_of_compiling
from json_keys import assert_keys_of_before
from reported import reported

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.measure.bench.tiles import parse_tiles
from tomat.model.tiles import (
    HEAD_NAMES,
    LOSS_NAMES,
    TunedSizes,
    TunedTiles,
    WholeHeadConfig,
    load_table,
    tuned_sizes,
    tuned_tiles,
)
from tomat.model.vmem import head_tiles
from tomat.perf.tuning import tile_tuning
from tomat.perf.tuning.tile_tuning import AttentionShape, LossShape, table_entry, write_entry

LOSS = LossShape(width=512, density_tokens=1024)
ATTENTION = AttentionShape(positions=1024, hidden_dim=512, num_heads=2, num_kv_heads=2)
REFUSED = {"tiles": {}, "refused": "too large"}


def candidate(shape: LossShape | AttentionShape, seconds: float, *sizes: int, **changes: object) -> dict:
    """A candidate as it is answered: of attention beside products, which are no part of what is tuned."""
    matmul = 7.0 if isinstance(shape, AttentionShape) else 0.0
    names = LOSS_NAMES if isinstance(shape, LossShape) else HEAD_NAMES
    return {
        "kernel": shape.KERNEL,
        "tiles": dict(zip(names, sizes, strict=False)),
        "seconds": seconds + matmul,
        "categories": {"matmul": matmul},
        "device_kind": "TPU v6 lite",
        "compiler": "libtpu 0",
        **changes,
    }


@pytest.mark.parametrize("shape", [LOSS, ATTENTION], ids=["loss", "attention"])
def test_the_shortest_is_written_in_the_place_of_an_older_one(tmp_path, shape):
    def tuned() -> list[int]:
        load_table.cache_clear()
        assert len(json.loads(table.read_text())["entries"]) == 2
        if shape is LOSS:
            tiles = tuned_tiles("TPU v6 lite", 512, LOSS.ids, "bfloat16", load_table(TunedTiles, table))
            return [getattr(tiles, name) for name in LOSS_NAMES]
        entries = load_table(TunedSizes, table)
        # Of the nearest length.
        assert list(tuned_sizes(100, 256, entries).values()) == [128] * 4
        return list(tuned_sizes(2048, 256, entries).values())

    other, table = LossShape(width=64) if shape is LOSS else AttentionShape(positions=128), tmp_path / "tiles.json"
    rows = [candidate(shape, 0.5, kernel="another"), candidate(shape, 3.0, 512, 256, 256, 128)]
    rows += [candidate(shape, 2.0, 512, 256, 512, 256), {"kernel": shape.KERNEL, **REFUSED}]
    write_entry(shape, table_entry(shape, rows), table)
    write_entry(shape, table_entry(other, [candidate(other, 1.0, 128, 128, 128, 128)]), table)
    assert tuned() == [512, 256, 512, 256]
    write_entry(shape, table_entry(shape, [candidate(shape, 1.5, 512, 128, 512, 128)]), table)
    assert tuned() == [512, 128, 512, 128]
    kept = json.loads(table.read_text())["entries"][1]
    assert kept["planned_seconds"] == 1.5 and kept["provenance"]["shape"] == vars(shape)


def test_sizes_that_are_not_set_are_the_tables():
    tuned = tuned_sizes(8192, 256)
    tiles = head_tiles(WholeHeadConfig(rows=128), 8192, 256, 2)
    assert (tiles.block, tiles.rows, tiles.block_bwd) == (tuned["block"], 128, tuned["block_bwd"])


def test_what_cannot_be_tuned_is_refused(tmp_path):
    for shape in (LOSS, ATTENTION):
        with pytest.raises(TomatError, match="none of 1 candidates .* too large"):
            table_entry(shape, [{"kernel": shape.KERNEL, **REFUSED}])
    for sizes in ("512,256", "512,256,x,512,256", "512,,256,512,256", "512,256,512,²"):
        with pytest.raises(TomatError, match=f"--tiles {sizes}: expected 4 positive numbers"):
            parse_tiles(sizes, HEAD_NAMES)
    with pytest.raises(TomatError, match="none.json.*cannot be read"):
        load_table(TunedSizes, tmp_path / "none.json")


def test_the_verb_plans_both_losses_and_finds_them_again(tmp_path: Path, monkeypatch):
    pytest.importorskip("libtpu")
    instead_of_compiling(monkeypatch)
    sizes = "--batch 1 --positions 256 --hidden_dim 128 --density_tokens 256 --vocabulary density"
    words = f"bench loss-tiles {sizes} --tiles 256,128,128,32 --block_positions 128 --cache_dir {tmp_path / 'cache'}"
    report = reported(tmp_path, *words.split())
    assert_keys_of_before("bench loss-tiles", report)
    xla, pallas = report["candidates"]
    # Four products against three, of the same arrays, none of them padded; the rest are elementwise operations.
    products = 2 * 256 * 128 * 256
    assert 4 * products <= pallas["loss_flops"] and 3 * products <= xla["loss_flops"]
    for answer in (xla, pallas):
        assert answer["seconds"] == pytest.approx(sum(answer["categories"].values()))
        assert answer["categories"]["loss"] > 0
    kernels = {k["name"].split(".")[0]: k for k in pallas["kernels"]}
    assert kernels["loss_gradients"]["grid"] == [2]
    busy = [k["mxu_seconds"] for k in (kernels["loss_gradients"], kernels["loss_statistics"])]
    assert busy[0] == pytest.approx(3 * busy[1], rel=0.01)

    monkeypatch.setattr(tile_tuning, "ask", None)  # nothing may be compiled again
    assert reported(tmp_path, *words.split()) == report


def test_the_verb_plans_a_layer(tmp_path: Path, monkeypatch, capsys):
    pytest.importorskip("libtpu")
    instead_of_compiling(monkeypatch)
    sizes = "--batch 1 --positions 256 --hidden_dim 128 --num_heads 1 --num_kv_heads 1"
    words = f"bench attention-tiles {sizes} --tiles 128,128,128,128 --splash_blocks --cache_dir {tmp_path / 'cache'}"
    report = reported(tmp_path, *words.split())
    assert_keys_of_before("bench attention-tiles", report)
    [row] = report["candidates"]
    assert row["seconds"] == pytest.approx(sum(row["categories"].values()))
    assert row["categories"]["attention forward"] > 0 and row["categories"]["attention backward"] > 0
    kernels = {kernel["name"].split(".")[0]: kernel for kernel in row["kernels"]}
    passes = (kernels[f"whole_head_flash_attention_{name}"] for name in ("fwd", "bwd"))
    assert 0 < next(passes)["mxu_seconds"] < next(passes)["mxu_seconds"]
    assert main(words.replace("--tiles 128,128", "--tiles 128,100").split()) == 2
    assert "model.whole_head.rows is 100; expected a positive multiple of 128" in capsys.readouterr().err
    assert main(words.replace("--num_heads 1", "--num_heads 3").split()) == 2
    assert "--num_heads 3" in capsys.readouterr().err
