"""Misspelt keys of a configuration, and values that no such key takes, found without importing what it configures.

The keys are the fields of dataclasses, of tomat and of Levanter, whose import takes 17 seconds of CPU time. Here they
are read from the source of those classes, which is what will be imported: there is no list that could go stale. Only a
key that is surely none, or a value that is surely wrong, is refused; where a class is chosen by a key of its own
(`model`, `optimizer`) or its source says too little, everything passes, and `config.load_config` decides.
"""

import ast
import difflib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.overrides import parse_overrides, read_yaml
from tomat.hardware.chips import slice_named

Place = tuple[str, str]
"""Dotted name of a module, and of a class in it."""
TRAINING: Place = ("tomat.train.settings.config", "TrainConfig")
RETOKENIZING: Place = ("tomat.data.tokens.pipeline.config", "RetokenizeConfig")
_WITHOUT_FIELDS = {"ABC", "Generic", "Protocol", "object"}
"""Bases that add no field."""


@dataclass(frozen=True)
class _Source:
    """What a module's source defines, and what it has from elsewhere."""

    classes: Mapping[str, ast.ClassDef]
    assigned: Mapping[str, ast.expr]
    """Name here -> what it stands for, such as `Literal["bin", "rho"]`."""
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
    """Refuse a key of `values` that the class at `place` has no field for, and a value that its field cannot take.

    Args:
        values: nested keys and values, as YAML has them.
        source: where they are from, in words.
        place: of the class.

    Raises:
        TomatError: A key that is none, with the one that is spelt like it or all that there are; a value of another
            type than the key's, or none of its choices, with these; a slice that is not known.
    """
    for path, key, fields in _unknown_keys(values, place, ()):
        close = difflib.get_close_matches(str(key), list(fields), n=1)
        close = close or [name for name in fields if name.startswith(str(key))]
        hint = (
            f"; did you mean {'.'.join((*path, close[0]))}?" if close else f"; there are {', '.join(sorted(fields))}."
        )
        raise TomatError(f"{source} sets {'.'.join((*path, str(key)))}, which is no setting{hint}")
    for path, value, expected in _wrong_values(values, place, ()):
        raise TomatError(f"{source} sets {'.'.join(path)} to {value!r}; expected {expected}.")
    if place == TRAINING and isinstance(name := values.get("slice"), str):
        slice_named(name)


def known_fields(place: Place) -> dict[str, Place | None] | None:
    """The fields of a dataclass, read from its source.

    Returns:
        Field -> place of the class that it holds; None for any other value. None instead of a mapping where the source
        does not settle which fields there are.
    """
    types = _field_types(place)
    return (
        None if types is None else {name: _class_of(annotation, module) for name, (module, annotation) in types.items()}
    )


def _field_types(place: Place) -> dict[str, tuple[str, ast.expr]] | None:
    """Field -> the module that declares it, and its type there; None as for `known_fields`."""
    found = _definition(place)
    if found is None or not any(_called(mark) == "dataclass" for mark in found[1].decorator_list):
        return None
    module, definition = found
    fields: dict[str, tuple[str, ast.expr]] = {}
    for base in definition.bases:
        base_name = _called(base)
        if base_name in _WITHOUT_FIELDS:
            continue
        inherited = _field_types((module, base_name)) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        fields |= inherited
    for line in definition.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            if _called(line.annotation) != "ClassVar":
                fields[line.target.id] = module, line.annotation
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


def _wrong_values(
    values: Mapping[str, Any], place: Place, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Path, value, and what was expected instead."""
    for key, (module, annotation) in (_field_types(place) or {}).items():
        if key not in values:
            continue
        value, here = values[key], (*path, key)
        below = _class_of(annotation, module)
        if below is None:
            if (expected := _expected(value, annotation, module)) is not None:
                yield here, value, expected
        elif isinstance(value, Mapping):
            chosen = value.get("type")
            if isinstance(chosen, str) and (choices := _choices(below)) and chosen not in choices:
                yield (*here, "type"), chosen, f"one of {', '.join(choices)}"
            yield from _wrong_values(value, below, here)


_SCALARS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "None": "null"}


def _expected(value: Any, annotation: ast.expr, module: str) -> str | None:
    """What a key of this type takes, in words, if that is surely not `value`; draccus reads texts as numbers."""
    kinds: list[str] = []
    choices: list[Any] = []
    for part in _alternatives(annotation, module):
        if isinstance(part, ast.Subscript) and _called(part) == "Literal":
            elements = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
            choices += [element.value for element in elements if isinstance(element, ast.Constant)]
        elif isinstance(part, ast.Constant) and part.value is None:
            kinds.append("None")
        elif isinstance(part, ast.Name) and part.id in _SCALARS:
            kinds.append(part.id)
        else:
            return None
    fits = value in choices or (value is None and "None" in kinds)
    if isinstance(value, str):
        fits = fits or "str" in kinds or ("None" in kinds and value.lower() in ("null", "none"))
        fits = fits or (
            not {"int", "float"}.isdisjoint(kinds) and re.fullmatch(r"[+-]?[\d._]*(e[+-]?\d+|inf|nan)?", value.lower())
        )
        fits = fits or ("bool" in kinds and value.lower() in ("true", "false"))
    elif isinstance(value, bool | int | float):
        fits = fits or bool(set(kinds) - {"None"})
    if fits:
        return None
    named = [f"one of {', '.join(map(str, choices))}"] if choices else []
    return " or ".join([*named, *(_SCALARS[kind] for kind in kinds)])


def _alternatives(annotation: ast.expr, module: str) -> Iterator[ast.expr]:
    """The types of a union, names of such types replaced by what they stand for."""
    if isinstance(annotation, ast.BinOp):
        yield from _alternatives(annotation.left, module)
        yield from _alternatives(annotation.right, module)
    elif isinstance(annotation, ast.Subscript) and _called(annotation) == "Optional":
        yield from _alternatives(annotation.slice, module)
        yield ast.Constant(None)
    elif isinstance(annotation, ast.Name) and (found := _assigned((module, annotation.id))) is not None:
        yield from _alternatives(found[1], found[0])
    else:
        yield annotation


def _choices(place: Place) -> list[str]:
    """The names that classes register themselves by with the class at `place`: beside it, and in tomat."""
    module, name = place
    folder = module.rpartition(".")[0]
    files = [file for package in (folder, "tomat") for root in _folders(package) for file in root.rglob("*.py")]
    pattern = re.compile(rf"@{name}\.register_subclass\(\s*[\"']([^\"']+)")
    return sorted({found for file in files for found in pattern.findall(file.read_text(encoding="utf-8"))})


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
    return _origin(place, lambda source: source.classes)


def _assigned(place: Place) -> tuple[str, ast.expr] | None:
    """The module that gives the name at `place` its meaning, and what it stands for there."""
    return _origin(place, lambda source: source.assigned)


def _origin[Node](place: Place, names: Callable[[_Source], Mapping[str, Node]]) -> tuple[str, Node] | None:
    module, name = place
    for _ in range(8):  # re-exports of re-exports
        source = _source(module)
        if source is None:
            return None
        if name in names(source):
            return module, names(source)[name]
        if name not in source.imported:
            return None
        module, name = source.imported[name]
    return None


@cache
def _source(module: str) -> _Source | None:
    """The classes and imports of a module, which is not imported."""
    for path in _folders(module):
        for file in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if file.is_file():
                return _read(file, module if file.name == "__init__.py" else module.rpartition(".")[0])
    return None


def _folders(module: str) -> list[Path]:
    """Where a package's files are, of a module the same without its ending, whether it is there or not."""
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)  # of a package without its parents, so nothing is run
    return [Path(folder).joinpath(*below) for folder in (spec and spec.submodule_search_locations) or ()]


def _read(file: Path, package: str) -> _Source:
    classes, assigned, imported = {}, {}, {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = node.value
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*parents, *([node.module] if node.module else [])])
            imported |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
    return _Source(classes, assigned, imported)
