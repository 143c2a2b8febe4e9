"""Files that a half-done re-tokenizing left, damaged: one line that names the file and says what to do."""

import json
import shutil
from pathlib import Path

import pytest
from retokenized import StoppingRunner, files

from tomat.app.cli import main
from tomat.base.checked_json import CHECKSUM_KEY
from tomat.base.errors import TomatError
from tomat.data.tokens.pipeline.driver import retokenize
from tomat.data.tokens.pipeline.pool import PoolRunner


@pytest.fixture
def half_done(tmp_path, retokenize_config):
    """A set that was stopped after so many units: 5 of the survey, then 13 of a chunk each."""

    def stop(units):
        config = retokenize_config(tmp_path / "set")
        with pytest.raises(KeyboardInterrupt):
            retokenize(config, StoppingRunner(units))
        return config

    return stop


def flipped(content, place):
    return bytes([*content[:place], content[place] ^ 1, *content[place + 1 :]])


DAMAGE = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeroed": lambda content: content[:20] + bytes(12) + content[32:],
    "flipped": lambda content: flipped(content, len(content) // 2),
    "no text": lambda content: b"\xff\xfe" + content,
    "another type": lambda content: b"[1, 2]",
    "not a number": lambda content: b'{"materials": NaN, "skipped": 1e400, "identity": null}',
}


# Every damage of every file: tests/fuzz/test_shard_files.py.
@pytest.mark.parametrize(
    ("name", "units", "remedy", "damage"),
    [
        ("survey/000002.json", 3, "Remove this file and run the same command again", "not a number"),
        ("survey/000002.npz", 3, "Remove .*/survey/000002.json and run the same command again", "cut"),
        ("request.json", 3, "Remove .*/set/ and start again", "another type"),
        ("progress/00000004", 12, "Remove this file and run the same command again", "zeroed"),
        ("codec.json", 12, "copy it again from where it came from", "cut"),
        ("manifest.json", 12, "Copy or tokenize the set again", "no text"),
    ],
)
def test_damaged_file_is_named_with_its_remedy(tmp_path, half_done, whole, name, units, remedy, damage):
    config = half_done(units)
    path = tmp_path / "set" / name
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(TomatError, match=f"{name}.* .*{remedy}") as caught:
        retokenize(config, PoolRunner(1))
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("Remove ") <= 1  # one remedy, not two
    # As it says: the survey, the record or, for the rest, the set goes, and the same command ends with the same bytes.
    if "this file" in remedy:
        path.unlink()
    elif "survey/" in remedy:
        (tmp_path / "set" / "survey" / "000002.json").unlink()
    else:
        shutil.rmtree(tmp_path / "set")
    retokenize(config, PoolRunner(1))
    assert files(tmp_path / "set") == whole


def without_checksum(path: Path, *keys: str) -> None:
    """The file as it was written before there were checksums, and without keys of that time."""
    content = json.loads(path.read_text())
    for key in (CHECKSUM_KEY, *keys):
        content.pop(key, None)
    path.write_text(json.dumps(content))


def test_set_of_before_there_were_checksums_goes_on_and_is_said_to_be_one(tmp_path, half_done, whole, capsys):
    config = half_done(12)
    place = tmp_path / "set"
    without_checksum(place / "manifest.json", "clipped", "max_clipped_share")
    without_checksum(place / "codec.json", "fitted_min")
    request = json.loads((place / "request.json").read_text())
    del request[CHECKSUM_KEY], request["identity"]["max_clipped_share"]
    (place / "request.json").write_text(json.dumps(request))
    for record in (place / "progress").iterdir():
        record.write_bytes(record.read_bytes()[:64])
    retokenize(config, PoolRunner(1))
    tokens = {name: content for name, content in whole.items() if name.startswith("tokens.zarr")}
    assert {name: content for name, content in files(place).items() if name.startswith("tokens.zarr")} == tokens
    # Finished by this version it has a checksum, but nobody has counted what lies outside its codec.
    assert main(["shards", "verify", str(place)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "voxels outside the codec: not counted" in printed and "no checksum" not in printed
    without_checksum(place / "manifest.json")
    capsys.readouterr()
    for verb in ("info", "verify"):
        assert main(["shards", verb, str(place), "--json", str(tmp_path / "figures.json")]) == 0
        assert "no checksum of its own" in " ".join(capsys.readouterr().out.split())
        assert json.loads((tmp_path / "figures.json").read_text())["manifest_has_checksum"] is False


def test_verify_with_a_damaged_request_is_one_line(tmp_path, tree, whole, capsys):
    for content in (b"", b"[]", b'{"source": {"colour": "red"}}', b'{"source": {"input": 3}}', b"\xff"):
        (tmp_path / "whole" / "request.json").write_bytes(content)
        assert main(["shards", "verify", str(tmp_path / "whole")]) == 2
        error = capsys.readouterr().err
        assert "request.json" in error and "--input and --source" in error and "Traceback" not in error
    # With both given, there is nothing to read in it.
    words = ["--input", str(tree), "--source", "rho_gga"]
    assert main(["shards", "verify", str(tmp_path / "whole"), *words]) == 0


def test_damaged_survey_of_a_finished_set_is_one_line(tmp_path, tree, capsys):
    words = ["retokenize", "--input", tree, "--output", tmp_path / "set", "--layout", "v3-p7", "--bins", "200"]
    words += ["--patches_per_material", "4", "--workers", "1"]
    assert main([*map(str, words)]) == 0
    survey = tmp_path / "set" / "survey.json"
    for content in (b"", b'{"materials": []}', b'{"materials": [{"n_atoms": "two"}]}', b"\xff"):
        survey.write_bytes(content)
        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert "survey.json is" in error and "remove this file" in error
    survey.unlink()
    assert main([*map(str, words)]) == 0
    assert "padding not known" in " ".join(capsys.readouterr().out.split())
