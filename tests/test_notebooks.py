"""The notebooks of the site run, as they are in git; and what is in git has no outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_not_in_git(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)
    assert not any(cell.metadata for cell in notebook.cells)
    # What Jupyter adds of the machine that saved it.
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    # What a notebook writes goes into temporary folders, which are to be below that of the test.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    # As users compile: a whole cell that is predicted takes 55 s of processor time as `conftest.py` has it, 5 s so.
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    notebook = nbformat.read(path, as_version=4)
    before = set(path.parent.iterdir())
    beside = {"metadata": {"path": str(path.parent)}}  # as Jupyter does it
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=beside).execute()
    assert any("image/png" in each.get("data", {}) for cell in notebook.cells for each in cell.get("outputs", ()))
    assert set(path.parent.iterdir()) == before
    said = "".join(each.get("text", "") for cell in notebook.cells for each in cell.get("outputs", ()))
    # Nothing but what tomat says.
    assert not any(each.get("name") == "stderr" for cell in notebook.cells for each in cell.get("outputs", ())), said
    for words in {
        "density": ("8.0000 valence electrons", "spread evenly: NMAE 106.3 %"),
        "plan": ("200m-v6e16-fast-plan on v6e-16", "MFU 50.9 %, expected in 42.6 to 60.8"),
        "predict": ("step 8/8", "sum of atoms   NMAE   3.00 %", "After eight steps the model is"),
    }[path.stem]:
        assert words in said, said
