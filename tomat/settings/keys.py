"""Misspelt keys of a configuration, found without importing what it configures.

The keys are the fields of dataclasses, of tomat and of Levanter, whose import takes 17 seconds of CPU time. Here they
are read from the source of those classes, which is what will be imported: there is no list that could go stale. Only a
key that is surely none is refused; where a class is chosen by a key of its own (`model`, `optimizer`) or its source
says too little, everything passes, and `config.load_config` decides.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.overrides import parse_overrides, read_yaml

Place = tuple[str, str]
"""Dotted name of a module, and of a class in it."""
TRAINING: Place = ("tomat.settings.config", "TrainConfig")
RETOKENIZING: Place = ("tomat.tokens.pipeline.config", "RetokenizeConfig")
_WITHOUT_FIELDS = {"ABC", "Generic", "Protocol", "object"}
"""Bases that add no field."""


@dataclass(frozen=True)
class _Source:
    """What a module's source defines, and what it has from elsewhere."""

    classes: Mapping[str, ast.ClassDef]
    imported: Mapping[str, Place]
    """Name here -> where it is from."""


def check_words(
    config_path: str | Path | None,
    overrides: Sequence[str],
    place: Place = TRAINING,
    kind: str = "train",
) -> None:
    """Read a configuration's file and overrides, and refuse keys that are none.

    Args:
        config_path: the file; None: there is none.
        overrides: `--a.b VALUE`, word by word.
        place: of the class that the configuration is read into.
        kind: of the configurations that ship with tomat, as for `read_yaml`.

    Raises:
        TomatError: As for `read_yaml` and `parse_overrides`, or a key that no class has.
    """
    if config_path is not None:
        check_keys(read_yaml(config_path, kind), str(config_path), place)
    check_keys(parse_overrides(overrides), "the command line", place)


def check_keys(values: Mapping[str, Any], source: str, place: Place = TRAINING) -> None:
    """Refuse a key of `values` that the class at `place` has no field for.

    Args:
        values: nested keys and values, as YAML has them.
        source: where they are from, in words.
        place: of the class.

    Raises:
        TomatError: A key that is none, with the one that is spelt like it or all that there are.
    """
    for path, key, fields in _unknown_keys(values, place, ()):
        close = difflib.get_close_matches(str(key), list(fields), n=1)
        close = close or [name for name in fields if name.startswith(str(key))]
        hint = (
            f"; did you mean {'.'.join((*path, close[0]))}?" if close else f"; there are {', '.join(sorted(fields))}."
        )
        raise TomatError(f"{source} sets {'.'.join((*path, str(key)))}, which is no setting{hint}")


def known_fields(place: Place) -> dict[str, Place | None] | None:
    """The fields of a dataclass, read from its source.

    Returns:
        Field -> place of the class that it holds; None for any other value. None instead of a mapping where the source
        does not settle which fields there are.
    """
    found = _definition(place)
    if found is None or not any(_called(mark) == "dataclass" for mark in found[1].decorator_list):
        return None
    module, definition = found
    fields: dict[str, Place | None] = {}
    for base in definition.bases:
        base_name = _called(base)
        if base_name in _WITHOUT_FIELDS:
            continue
        inherited = known_fields((module, base_name)) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        fields |= inherited
    for line in definition.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            if _called(line.annotation) != "ClassVar":
                fields[line.target.id] = _class_of(line.annotation, module)
    return fields


def _unknown_keys(
    values: Mapping[str, Any], place: Place, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any, Mapping[str, Any]]]:
    """Path, key, and the fields that are there instead."""
    fields = known_fields(place)
    if fields is None:
        return
    for key, value in values.items():
        if key not in fields:
            yield path, key, fields
        elif isinstance(value, Mapping) and (below := fields[key]) is not None:
            yield from _unknown_keys(value, below, (*path, key))


def _class_of(annotation: ast.expr, module: str) -> Place | None:
    """The one class that `X`, `X | None` or `Optional[X]` names; None for anything else."""
    if isinstance(annotation, ast.Subscript) and _called(annotation) == "Optional":
        return _class_of(annotation.slice, module)
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.right, ast.Constant):
        return _class_of(annotation.left, module)
    if not isinstance(annotation, ast.Name):
        return None
    found = _definition((module, annotation.id))
    return None if found is None else (found[0], found[1].name)


def _called(node: ast.expr) -> str:
    """The last name of `a.b`, `a.b(...)` and `a.b[...]`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _definition(place: Place) -> tuple[str, ast.ClassDef] | None:
    """The module that defines the class found at `place`, which may only import it, and the definition."""
    module, name = place
    for _ in range(8):  # re-exports of re-exports
        source = _source(module)
        if source is None:
            return None
        if name in source.classes:
            return module, source.classes[name]
        if name not in source.imported:
            return None
        module, name = source.imported[name]
    return None


@cache
def _source(module: str) -> _Source | None:
    """The classes and imports of a module, which is not imported."""
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)  # of a package without its parents, so nothing is run
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        path = Path(folder).joinpath(*below)
        for file in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if file.is_file():
                return _read(file, module if file.name == "__init__.py" else module.rpartition(".")[0])
    return None


def _read(file: Path, package: str) -> _Source:
    classes, imported = {}, {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*parents, *([node.module] if node.module else [])])
            imported |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
    return _Source(classes, imported)
