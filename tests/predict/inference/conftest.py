"""The small promolecule in a file, and its cell."""

from pathlib import Path

import pytest
from pymatgen.core import Structure
from small_promolecule import promolecule, skewed


@pytest.fixture
def promolecule_file(tmp_path: Path) -> Path:
    path = tmp_path / "promolecule.json"
    path.write_text(promolecule().to_text(), encoding="utf-8")
    return path


@pytest.fixture
def structure() -> Structure:
    return skewed()
