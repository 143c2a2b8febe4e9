"""One bad material is one skipped material with its reason, whatever its reader raises."""

import errno
import shutil
from pathlib import Path

import pytest
import zarr
from retokenized import files

from tomat.app.cli import main
from tomat.base import retries
from tomat.base.errors import TomatError
from tomat.data.codec.files import write_codec
from tomat.data.density import io
from tomat.data.tokens.pipeline.driver import retokenize
from tomat.data.tokens.pipeline.runners import PoolRunner
from tomat.data.tokens.shards import open_shards

ALLOWED = {"max_skipped": 0.4}


class Reader:
    """The reader of every kind, but that it raises for one material, so often."""

    def __init__(self, error, times=1 << 30, name="mp-1"):
        self.error, self.times, self.name = error, times, name
        self.original = io._reader

    def __call__(self, text):
        def read(location, material_id, rules):
            if material_id == self.name and self.times > 0:
                self.times -= 1
                raise self.error
            return self.original(text)(location, material_id, rules)

        return read


@pytest.fixture
def no_waits(monkeypatch):
    waits = []
    monkeypatch.setattr(retries.time, "sleep", waits.append)
    return waits


@pytest.mark.parametrize("error", [KeyError("Xx"), OSError(errno.EIO, "Input/output error")], ids=repr)
def test_whatever_a_reader_raises_is_a_skip(tmp_path, retokenize_config, monkeypatch, no_waits, error):
    monkeypatch.setattr(io, "_reader", Reader(error))
    manifest = retokenize(retokenize_config(tmp_path / "set", **ALLOWED), PoolRunner(1)).manifest
    ((name, reason),) = [(each.material_id, each.reason) for each in manifest.skipped]
    assert name == "mp-1" and "mp-1.zarr cannot be read" in reason and type(error).__name__ in reason


def test_memory_that_runs_out_in_a_zarr_group_is_no_fault_of_it(tmp_path, retokenize_config, monkeypatch, capsys):
    def open_group(*_, **__):
        raise MemoryError("Unable to allocate 343 MiB")

    config = retokenize_config(tmp_path / "set", **ALLOWED)
    codec = tmp_path / "codec.json"
    folder = str(Path(config.input) / "label")
    assert main(["codec", "fit", "--input", folder, "--bins", "20", "--output", str(codec)]) == 0
    monkeypatch.setattr(zarr, "open_group", open_group)
    with pytest.raises(TomatError, match=r"Memory ran out while mp-4 .* was surveyed.*fewer --workers"):
        retokenize(config, PoolRunner(1))
    again = ["codec", "fit", "--input", folder, "--bins", "20", "--output", str(tmp_path / "other.json")]
    assert main(again) == 2
    assert "Memory ran out at mp-0: " in capsys.readouterr().err
    words = ["tokenize", "--input", folder, "--layout", "v3-p7", "--codec", str(codec)]
    assert main([*words, "--output", str(tmp_path / "tokens")]) == 2
    assert "Memory ran out while mp-0 (material mp-0) was surveyed" in capsys.readouterr().err
    assert not (tmp_path / "other.json").exists() and not (tmp_path / "tokens").exists()


def test_an_outage_ends_tokenize_and_codec_fit(tmp_path, tree, codec, monkeypatch, no_waits, capsys):
    """The material is not at fault, so that neither a codec nor a set may be finished without it."""
    write_codec(codec, tmp_path / "codec.json")
    folder = str(tree / "label")
    monkeypatch.setattr(io, "_reader", Reader(OSError(errno.ESTALE, "Stale file handle")))
    assert main(["codec", "fit", "--input", folder, "--bins", "20", "--output", str(tmp_path / "other.json")]) == 75
    words = ["tokenize", "--input", folder, "--layout", "v3-p7", "--codec", str(tmp_path / "codec.json")]
    assert main([*words, "--output", str(tmp_path / "set")]) == 75
    assert capsys.readouterr().err.count("mp-1.zarr cannot be reached after 7 tries") == 2
    assert not (tmp_path / "other.json").exists() and not (tmp_path / "set").exists()
    # One that passes is waited out, wrapped too: readers raise a TomatError from what they met.
    wrapped = TomatError("cannot read")
    wrapped.__cause__ = OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.undo()
    monkeypatch.setattr(retries.time, "sleep", no_waits.append)
    monkeypatch.setattr(io, "_reader", Reader(wrapped, times=3))
    assert main([*words, "--output", str(tmp_path / "set")]) == 0
    assert not open_shards(tmp_path / "set").manifest.skipped


def test_material_that_breaks_after_the_survey_is_named(tmp_path, tree, kept_tree, kept_set, retokenize_config):
    """Its rows are laid out by then, so it can no longer be skipped."""

    class BreakAfterSurvey(PoolRunner):
        def run(self, function, units, on_done):
            super().run(function, units, on_done)
            (tree / "label" / "mp-2.zarr" / "zarr.json").write_bytes(b"")

    config = retokenize_config(tmp_path / "set")
    words = "Material mp-2 could be read when the rows were laid out, .*mp-2.zarr.*Restore"
    with pytest.raises(TomatError, match=words):
        retokenize(config, BreakAfterSurvey(1))
    shutil.copytree(kept_tree, tree, dirs_exist_ok=True)
    retokenize(config, PoolRunner(1))
    assert files(tmp_path / "set") == files(kept_set)
