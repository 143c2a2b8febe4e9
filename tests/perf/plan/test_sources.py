"""The files and packages that an answer depends on are found."""

import re
from pathlib import Path

import pytest

from tomat.perf.plan.plan_cache import PACKAGE, installed_packages, module_files, sources_digest


@pytest.fixture
def package(tmp_path) -> Path:
    """A package in which `top` imports in every way there is."""
    root = tmp_path / "thing"
    files = {
        "__init__.py": "",
        "top.py": "import thing.plain\ndef f():\n    from thing.room import lazy\n    from thing import other\n",
        "plain.py": "TABLE = Path(__file__).with_name('table.json')\n",
        "other.py": "from thing.room.deep import x\n",
        "table.json": "{}",
        "other.json": "{}",
        "unused.py": "",
        "room/__init__.py": "",
        "room/lazy.py": "import os, numpy\n",
        "room/deep.py": "from thing.plain import TABLE as x\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_every_kind_of_import_and_named_data_is_followed(package):
    found = {path.relative_to(package).as_posix() for path in module_files("thing.top", package=package)}
    assert found == {
        "__init__.py", "top.py", "other.py", "plain.py", "table.json", "room/__init__.py", "room/lazy.py",
        "room/deep.py",
    }  # fmt: skip


def test_the_digest_changes_with_what_counts_alone(package):
    before = sources_digest("thing.top", package=package)
    (package / "unused.py").write_text("x = 1")
    (package / "other.json").write_text("[]")
    assert sources_digest("thing.top", package=package) == before
    (package / "table.json").write_text("[]")
    changed = sources_digest("thing.top", package=package)
    (package / "room" / "deep.py").write_text("y = 1")
    assert len({before, changed, sources_digest("thing.top", package=package)}) == 3


def test_what_the_step_compiles_is_among_the_sources():
    found = {path.relative_to(PACKAGE).as_posix() for path in module_files("tomat.perf.plan.compile.child")}
    assert {"train/guards/loss.py", "train/settings/schema.py", "model/loss/loss_tiles.json"} <= found
    # every module of tomat that a module of them names, by another way of reading: the text of its import lines
    for name in found:
        if name.endswith(".py"):
            text = (PACKAGE / name).read_text(encoding="utf-8")
            for module in re.findall(r"^\s*(?:from|import)\s+(tomat(?:\.\w+)+)", text, re.MULTILINE):
                path = module.removeprefix("tomat.").replace(".", "/")
                assert f"{path}.py" in found or f"{path}/__init__.py" in found, (name, module)


def test_packages_have_their_versions():
    found = installed_packages()
    assert any(name.startswith("jax-0") for name in found) and any(name.startswith("equinox-0") for name in found)
    assert found == sorted(found)
