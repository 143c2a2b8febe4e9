import importlib.metadata

import gpu_wheels
import pytest


def test_what_a_step_needs_is_printed_without_jax_and_what_is_there(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_wheels, "IMPORTED", ("tomat.model.decoder",))
    there = tmp_path / "there.txt"
    there.write_text("Equinox==0.1\nnumpy\n")
    monkeypatch.setattr("sys.argv", ["gpu_wheels.py", "--there", str(there)])
    assert gpu_wheels.main() == 0
    printed = dict(line.split("==") for line in capsys.readouterr().out.split())
    assert printed["marin-levanter"] == importlib.metadata.version("marin-levanter") and "zarr" in printed
    assert not printed.keys() & {"jax", "jaxlib", "equinox", "numpy", "tomat"}


def test_a_list_that_is_not_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_wheels.py", "--there", "/nowhere/there.txt"])
    with pytest.raises(SystemExit, match="2"):
        gpu_wheels.main()
    assert capsys.readouterr().err.endswith("--there: /nowhere/there.txt does not exist\n")
