import json
from pathlib import Path

import pytest

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.measure.bench.tiles import parse_tiles
from tomat.model.tiles import HEAD_NAMES, TunedSizes, load_table, tuned_sizes
from tomat.model.whole_head import WholeHeadConfig
from tomat.perf.tuning.tile_tuning import AttentionShape, table_entry, write_entry

SHAPE = AttentionShape(positions=1024, hidden_dim=512, num_heads=2, num_kv_heads=2)


def candidate(attention_seconds: float, *sizes: int, kernel: str = "whole_head") -> dict:
    return {
        "kernel": kernel,
        "tiles": dict(zip(HEAD_NAMES, sizes, strict=False)),
        "seconds": attention_seconds + 7.0,
        "categories": {"matmul": 7.0, "attention forward": attention_seconds},
        "device_kind": "TPU v6 lite",
        "compiler": "libtpu 0",
    }


def test_the_shortest_attention_is_written_in_the_place_of_an_older_one(tmp_path):
    splash = candidate(0.5, kernel="splash")
    refused = {"kernel": "whole_head", "tiles": {}, "refused": "too large"}
    table = tmp_path / "tiles.json"
    rows = [splash, candidate(3.0, 256, 128, 256, 128), candidate(2.0, 512, 256, 512, 256), refused]
    write_entry(SHAPE, table_entry(SHAPE, rows), table)
    write_entry(SHAPE, table_entry(AttentionShape(positions=128), [candidate(1.0, 128, 128, 128, 128)]), table)
    assert list(tuned_sizes(1024, 256, load_table(TunedSizes, table)).values()) == [512, 256, 512, 256]
    assert list(tuned_sizes(100, 256, load_table(TunedSizes, table)).values()) == [128] * 4
    write_entry(SHAPE, table_entry(SHAPE, [candidate(1.5, 512, 128, 512, 128)]), table)
    load_table.cache_clear()
    assert len(load_table(TunedSizes, table)) == 2
    assert list(tuned_sizes(2048, 256, load_table(TunedSizes, table)).values()) == [512, 128, 512, 128]
    kept = json.loads(table.read_text())["entries"][1]
    assert kept["planned_seconds"] == 1.5 and kept["provenance"]["shape"]["num_heads"] == 2


def test_sizes_that_are_not_set_are_the_tables():
    tuned = tuned_sizes(8192, 256)
    tiles = WholeHeadConfig(rows=128).tiles(8192, 256, 2)
    assert (tiles.block, tiles.rows, tiles.block_bwd) == (tuned["block"], 128, tuned["block_bwd"])
    for entry in json.loads(TunedSizes.FILE.read_text())["entries"]:  # what ships is what was tuned
        candidates = [row for row in entry["provenance"]["candidates"] if row["kernel"] == "whole_head"]
        best = min((row for row in candidates if "seconds" in row), key=lambda row: row["seconds"])
        assert best["tiles"] == entry["tiles"] and best["seconds"] == entry["planned_seconds"]


def test_refuses_candidates(tmp_path):
    with pytest.raises(TomatError, match="compiles for positions 1024, head_size 256, dtype bfloat16: too large"):
        table_entry(SHAPE, [{"kernel": "whole_head", "tiles": {}, "refused": "too large"}])
    with pytest.raises(TomatError, match="--tiles 512,256: expected 4 positive numbers, block,rows,block_bwd,keys_bwd"):
        parse_tiles("512,256", HEAD_NAMES)
    with pytest.raises(TomatError, match="none.json.*cannot be read"):
        load_table(TunedSizes, tmp_path / "none.json")


def test_the_verb_plans_a_layer(tmp_path: Path, capsys):
    pytest.importorskip("libtpu")
    report_file = tmp_path / "report.json"
    sizes = "--batch 1 --positions 256 --hidden_dim 128 --num_heads 1 --num_kv_heads 1"
    words = f"bench attention-tiles {sizes} --tiles 128,128,128,128 --splash_blocks --cache_dir {tmp_path / 'cache'}"
    assert main([*words.split(), "--json", str(report_file)]) == 0
    [row] = json.loads(report_file.read_text())["candidates"]
    assert row["seconds"] == pytest.approx(sum(row["categories"].values()))
    assert row["categories"]["attention forward"] > 0 and row["categories"]["attention backward"] > 0
    kernels = {kernel["name"].split(".")[0]: kernel for kernel in row["kernels"]}
    passes = (kernels[f"whole_head_flash_attention_{name}"] for name in ("fwd", "bwd"))
    assert 0 < next(passes)["mxu_seconds"] < next(passes)["mxu_seconds"]
    assert main(words.replace("--tiles 128,128", "--tiles 128,100").split()) == 2
    assert "model.whole_head.rows is 100; expected a positive multiple of 128" in capsys.readouterr().err
    assert main(words.replace("--num_heads 1", "--num_heads 3").split()) == 2
    assert "expected the width to be a multiple of the heads" in " ".join(capsys.readouterr().err.split())
