"""No name in a list, a manifest or a Parquet file leads a writer outside its folder."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from import_first_generation import build_parser

from tomat.app.cli import main
from tomat.base.checked_json import with_checksum
from tomat.data.tokens.pipeline.driver import retokenize
from tomat.data.tokens.pipeline.pool import PoolRunner
from tomat.data.tokens.shards import open_shards

NAMES = ["../evil", "/tmp/tomat-evil", "..", "a/b", "gs://bucket/evil", "file:///tmp/tomat-evil", "a\\b", "", "a\x00b"]


def everything(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_manifest_with_a_path_for_a_name_repairs_nothing(tmp_path, whole, capsys):
    place = tmp_path / "whole"
    content = json.loads((place / "manifest.json").read_text())
    (place / "tokens.zarr" / "c" / "0" / "0").unlink()
    for name in NAMES:
        content["materials"][0]["material_id"] = name
        (place / "manifest.json").write_text(json.dumps(with_checksum(content)))
        before = everything(tmp_path)
        assert main(["shards", "verify", str(place), "--repair"]) == 2
        error = capsys.readouterr().err
        assert "expected a name of printable characters" in error and "Traceback" not in error
        assert everything(tmp_path) == before


def test_parquet_with_a_path_for_a_name_is_refused(tmp_path, retokenize_config, capsys):
    """A first-generation set, made of a shard set whose first rows are then given the name."""
    place = tmp_path / "new"
    retokenize(retokenize_config(tmp_path / "set", layout="v2-p14", patches_per_material=2), PoolRunner(1))
    shards = open_shards(tmp_path / "set")
    (tmp_path / "old").mkdir()
    rows = [row.tolist() for row in shards.read_rows(0, 4)]
    names = ["../evil", "../evil", "mp-0", "mp-0"]
    table = pa.table({"task_id": names, "input_ids": pa.array(rows, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "old" / "shard-00000.parquet")
    meta = {
        "split": "train",
        "patch_size": 14,
        "patches_per_material": 2,
        "seed": 0,
        "density_codec_name": "two_token_9_12",
        "vocab": {"total_size": 2186 + 4608, "density_codec": {"log_min": -4.13, "log_max": 4.97}},
    }
    (tmp_path / "old" / "meta.json").write_text(json.dumps(meta))
    before = everything(tmp_path)
    words = [str(tmp_path / "old"), "--output", str(place), "--layout", "v2-p14"]
    assert main(words, build_parser()) == 2
    assert "expected a name of printable characters" in capsys.readouterr().err
    assert everything(tmp_path) == before
    # With plain names it is imported, and the names are those it has.
    pq.write_table(
        table.set_column(0, "task_id", pa.array(["mp-4", "mp-4", "mp-0", "mp-0"])), tmp_path / "old" / "a.parquet"
    )
    (tmp_path / "old" / "shard-00000.parquet").unlink()
    assert main(words, build_parser()) == 0
    assert [each.material_id for each in open_shards(place).manifest.materials] == ["mp-4", "mp-0"]
