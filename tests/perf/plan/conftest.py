import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module that takes the place of the compiling process, where a new process finds it; gives its name."""

    def write(text: str) -> str:
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules" / "child_of_a_test.py").write_text(text)
        paths = [str(tmp_path / "modules"), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        return "child_of_a_test"

    return write
