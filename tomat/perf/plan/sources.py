"""What decides an answer that is kept: the files of tomat behind a module, and the packages that are installed.

Both are found, not listed. A list of files goes stale with the next import, and a stale list answers for a program that
changed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2]


def module_files(*modules: str, package: Path = PACKAGE) -> list[Path]:
    """The files of `package` that `modules` import, in functions too, and those that these import; sorted.

    A file of data counts where a module names it in a string and it lies beside the module. What is imported for types
    alone counts as well: it costs a needless lowering now and then, never a wrong answer.

    Args:
        modules: Dotted names, such as `tomat.perf.plan.compile.child`.
        package: Folder of the package that they are in.
    """
    waiting = [path for name in modules for path in _files_of(name, package)]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        if path.suffix == ".py":
            tree = ast.parse(path.read_bytes(), str(path))
            waiting += [file for name in _imported(tree) for file in _files_of(name, package)]
            waiting += _data_files(tree, path)
    return sorted(found)


def _imported(tree: ast.Module) -> set[str]:
    """Dotted names that a module imports; of `from a import b` both `a` and `a.b`, since `b` may be a module.

    No module of tomat imports by a relative name: `tests/test_architecture.py` holds it.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _files_of(name: str, package: Path) -> list[Path]:
    """The file of a module of the package, with the `__init__.py` that Python runs before it; none for other names."""
    parts = name.split(".")
    if parts[0] != package.name:
        return []
    folders = [package.joinpath(*parts[1:end]) for end in range(1, len(parts) + 1)]
    files = [folder / "__init__.py" for folder in folders] + [folders[-1].with_suffix(".py")]
    return [path for path in files if path.is_file()]


def _data_files(tree: ast.Module, path: Path) -> list[Path]:
    names = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    plain = {name for name in names if "." in name and len(name) < 100 and "/" not in name and name.isprintable()}
    return [path.parent / name for name in sorted(plain) if (path.parent / name).is_file()]


def sources_digest(*modules: str, package: Path = PACKAGE) -> str:
    """SHA-256 over `module_files`, their names and their bytes; read anew each time, since files change."""
    return _digest(module_files(*modules, package=package), package)


def _digest(paths: Iterable[Path], package: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def question_key(question: Mapping[str, Any]) -> str:
    """Names a question to all of tomat by its text: no import is needed to look for its answer.

    Args:
        question: Everything that the answer depends on, but for tomat's own files and the installed packages.
    """
    files = sorted(path for kind in ("*.py", "*.json", "*.yaml") for path in PACKAGE.rglob(kind))
    whole = {**question, "sources": _digest(files, PACKAGE), "packages": installed_packages()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:24]


def installed_packages() -> list[str]:
    """Every installed distribution with its version, as `name-version`, sorted.

    All of them, since which of them take part in tracing a step is nothing that a list could keep up with. Read from
    the names of their folders: to parse their metadata takes a second.
    """
    folders = {Path(entry or ".") for entry in sys.path}
    found = {path.stem for folder in folders for kind in ("dist-info", "egg-info") for path in folder.glob(f"*.{kind}")}
    return sorted(found)
