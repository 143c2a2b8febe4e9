"""Files that a half-done re-tokenizing left, damaged: one line that names the file and says what to do."""

import json

import pytest
from retokenized import StoppingRunner, files, rewrite

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.tokens.pipeline.driver import retokenize
from tomat.data.tokens.pipeline.runners import PoolRunner


@pytest.fixture
def half_done(tmp_path, retokenize_config):
    """A set that was stopped after so many units: 5 of the survey, then 13 of a chunk each."""

    def stop(units):
        config = retokenize_config(tmp_path / "set")
        with pytest.raises(KeyboardInterrupt):
            retokenize(config, StoppingRunner(units))
        return config

    return stop


# Every damage of every file: tests/fuzz/test_shard_files.py.
@pytest.mark.parametrize(
    ("units", "names", "gone"),
    [
        (3, ("request.json", "survey/000002.json", "survey/000002.npz"), "survey/000002.json"),
        (12, ("codec.json", "manifest.json", "progress/00000004"), "progress/00000004"),
    ],
)
def test_damaged_files_are_named_with_their_remedy(tmp_path, half_done, whole, units, names, gone):
    """`gone`: what the last one's remedy says is to be removed."""
    config, place = half_done(units), tmp_path / "set"
    for name in names:
        content = (place / name).read_bytes()
        (place / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(TomatError, match=f"{name} is .*(Remove|Copy|copy)") as caught:
            retokenize(config, PoolRunner(1))
        message = str(caught.value)
        assert "\n" not in message and message.count("Remove ") <= 1  # one remedy, not two
        if name != names[-1]:
            (place / name).write_bytes(content)
    assert f"Remove {'this file' if gone == names[-1] else f'file://{place}/{gone}'} and run the same" in message
    (place / gone).unlink()
    retokenize(config, PoolRunner(1))
    assert files(place) == whole


def test_set_of_before_there_were_checksums_goes_on_and_is_said_to_be_one(tmp_path, half_done, whole, capsys):
    config = half_done(12)
    place = tmp_path / "set"
    rewrite(place / "manifest.json", "clipped", "max_clipped_share", checksum=False)
    rewrite(place / "codec.json", "fitted_min", checksum=False)
    identity = json.loads((place / "request.json").read_text())["identity"]
    del identity["max_clipped_share"]
    rewrite(place / "request.json", checksum=False, identity=identity)
    for record in (place / "progress").iterdir():
        record.write_bytes(record.read_bytes()[:64])
    retokenize(config, PoolRunner(1))
    tokens = {name: content for name, content in whole.items() if name.startswith("tokens.zarr")}
    assert {name: content for name, content in files(place).items() if name.startswith("tokens.zarr")} == tokens
    # Finished by this version it has a checksum, but nobody has counted what lies outside its codec.
    assert main(["shards", "verify", str(place)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "voxels outside the codec: not counted" in printed and "no checksum" not in printed
    rewrite(place / "manifest.json", checksum=False)
    capsys.readouterr()
    assert main(["shards", "info", str(place), "--json", str(tmp_path / "figures.json")]) == 0
    assert "no checksum of its own" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "figures.json").read_text())["manifest_has_checksum"] is False


def test_damaged_survey_of_a_finished_set_is_one_line(tmp_path, tree, capsys):
    words = ["retokenize", "--input", tree, "--output", tmp_path / "set", "--layout", "v3-p7", "--bins", "200"]
    words += ["--patches_per_material", "4", "--workers", "1"]
    assert main([*map(str, words)]) == 0
    survey = tmp_path / "set" / "survey.json"
    for content in (b"", b'{"materials": []}'):
        survey.write_bytes(content)
        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert "survey.json is" in error and "remove this file" in error
    survey.unlink()
    assert main([*map(str, words)]) == 0
    assert "padding not known" in " ".join(capsys.readouterr().out.split())
