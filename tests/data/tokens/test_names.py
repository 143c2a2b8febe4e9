"""No name in a manifest leads a writer outside its folder."""

import json

from tomat.app.cli import main
from tomat.base.checked_json import with_checksum

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
