"""Reads the YAML file of a sweep as a list of rows. Each row is a training configuration, a slice and a question.

```yaml
name: mfu-200m                      # names the page and the record
title: The 200M step, setting by setting
config_path: ../train/200m-v6e16.yaml   # relative to the sweep's file; each row may name another
overrides: {data.n_density_tokens: 16384}   # for every row
base: as configured                 # the row that others are compared with; default: the first
rows:
  - name: as configured
  - {name: replicated, question: "Need it be split?", overrides: {sharding: replicated}}
grid:                               # every combination is one more row
  sharding: [replicated, zero1]
  heads:                            # several settings under one name
    - {name: 16x64, overrides: {model.num_heads: 16, model.num_kv_heads: 16}}
exclude: [{sharding: zero1, heads: 16x64}]
```

`line` makes a row a point of one line of the scaling figure (`report/sweep.py`), or of several, given as a list. It is
a key of a row, or of a grid value of the form `{name, overrides, line}`. The lines of a combination join those of its
values: `zero1` of one axis and `[8 a chip, 256 in all]` of another make `zero1, 8 a chip` and `zero1, 256 in all`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.base.layout import RUN_NAME
from tomat.base.overrides import read_yaml
from tomat.perf.tuning.changes import checked_keys, override_words

if TYPE_CHECKING:
    from tomat.hardware.chips import Slice
    from tomat.train.settings.config import TrainConfig


@dataclass(frozen=True)
class SweepRow:
    name: str
    config_path: Path
    overrides: Mapping[str, Any]
    """Dotted keys and values that override the configuration."""
    slice: str | None
    """None: the configuration's own."""
    base: str | None
    """Name of the row that this one is compared with; None: it is compared with none."""
    question: str = ""
    """The question that the row answers. Rows with the same text answer it together."""
    explain: str = ""
    """A question about the row's own step, answered by how its time is spent."""
    lines: tuple[str, ...] = ()
    """The lines of the scaling figure that the row is a point of."""
    exact: bool | None = None
    """Whether it must compute its base's numbers, up to rounding; None: neither is required."""
    file: Path | None = None
    """The sweep's file; None: the sweep has none."""

    @property
    def slice_set(self) -> str | None:
        """The slice that the sweep's file sets, with `slice` or an override; None: the configuration's own."""
        return self.slice or self.overrides.get("slice")

    @property
    def words_of(self) -> str:
        """Names the row in messages about its overrides."""
        return f"row {self.name!r}" + (f" of {self.file}" if self.file else "")

    def load(self) -> tuple[TrainConfig, Slice]:
        from tomat.perf.plan.compile.topology import planned_slice
        from tomat.train.settings.config import load_config

        config = load_config(self.config_path, override_words(self.overrides), self.words_of)
        return config, planned_slice(config, self.slice)


@dataclass(frozen=True)
class SweepConfig:
    """A sweep. Its rows are in the order of the file; those of the grid come last."""

    name: str
    rows: tuple[SweepRow, ...]
    title: str = ""
    introduction: str = ""
    window_steps: int = 20
    """Steps over which losses are averaged before they are compared, in a study of quality with `exact` rows."""
    first_step_tolerance: float = 1e-5
    """Largest relative difference between the first step's losses of an exact row and its base, by rounding alone. The
    loss of one step rounds to 6e-8 in float32; computing in bfloat16 needs more."""

    def __post_init__(self) -> None:
        if not isinstance(self.window_steps, int) or self.window_steps < 1:
            raise TomatError(f"window_steps is {self.window_steps!r}; expected a whole number from 1.")
        if not isinstance(self.first_step_tolerance, int | float) or not 0 < self.first_step_tolerance < 1:
            raise TomatError(f"first_step_tolerance is {self.first_step_tolerance!r}; expected between 0 and 1.")

    def check_rows(self, only: Iterable[str]) -> None:
        names = [row.name for row in self.rows]
        if unknown := sorted(set(only) - set(names)):
            raise TomatError(f"sweep {self.name} has no row {unknown[0]!r}; rows: {', '.join(names)}.")

    def with_rows(self, only: Collection[str]) -> SweepConfig:
        """This sweep with only the rows of these names and their bases; the whole sweep if no name is given."""
        self.check_rows(only)
        by_name = {row.name: row for row in self.rows}
        kept: set[str] = set()
        for name in only:
            next_name: str | None = name
            while next_name is not None and next_name not in kept:
                kept.add(next_name)
                next_name = by_name[next_name].base
        return replace(self, rows=tuple(row for row in self.rows if row.name in kept)) if only else self


MAX_ROWS = 1000
"""Most rows of a sweep. Each compiles for minutes: a thousand take days, and a grid of 40^5 is a mistake."""

EXACT_KEYS = ("window_steps", "first_step_tolerance")
SWEEP_KEYS = (
    "name", "config_path", "title", "introduction", "slice", "base", "overrides", "rows", "grid", "exclude", *EXACT_KEYS
)  # fmt: skip
ROW_KEYS = ("name", "config_path", "overrides", "slice", "base", "question", "explain", "line", "exact")


def load_sweep(path: str | Path) -> SweepConfig:
    return sweep_of(read_yaml(path, "sweeps"), Path(path))


def sweep_of(values: Mapping[str, Any], path: Path) -> SweepConfig:
    check_keys(values, set(SWEEP_KEYS), {"name", "config_path"}, str(path))
    keys = {"rows": [], "grid": {}, "exclude": []} | {key: one for key, one in values.items() if one is not None}
    name = keys["name"]
    if not RUN_NAME.match(str(name)):
        raise TomatError(f"{path}: name is {name!r}; expected letters, digits, '.', '_' and '-': it names files.")
    for key, kind, expected in (
        ("rows", list, "a list"),
        ("exclude", list, "a list"),
        ("grid", Mapping, "axes, each with a list of values"),
    ):
        if not isinstance(keys[key], kind):
            raise TomatError(f"{path}: {key} is {keys[key]!r}; expected {expected}.")
    rows = []
    for number, row in enumerate(keys["rows"], 1):
        where = f"{path}: row {number}"
        if not isinstance(row, Mapping):
            raise TomatError(f"{where} is {row!r}; expected a mapping with a name and overrides.")
        check_keys(row, set(ROW_KEYS), {"name"}, where)
        rows.append(_row(row, keys, path, where))
    rows += [_row(row, keys, path, f"{path}: grid") for row in _grid_rows(keys, path)]
    if not rows:
        raise TomatError(f"{path} has no rows; give rows, a grid, or both.")
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TomatError(f"{path}: more than one row is called {twice[0]!r}; names tell rows apart.")
    _check_lines(rows, path)
    bases = {row.name: row.base or keys.get("base") or names[0] for row in rows}
    for name_of_row, base in bases.items():
        if base not in names:
            listed = ", ".join(names)
            raise TomatError(f"{path}: row {name_of_row!r} has the base {base!r}, which is no row; rows: {listed}.")
    based = tuple(replace(row, base=None if bases[row.name] == row.name else bases[row.name]) for row in rows)
    introduction = str(keys.get("introduction", "")).strip()
    own = {key: keys[key] for key in EXACT_KEYS if key in keys}
    try:
        return SweepConfig(name, based, keys.get("title") or name, introduction, **own)
    except TomatError as error:
        raise TomatError(f"{path}: {error}") from None


def _check_lines(rows: Sequence[SweepRow], path: Path) -> None:
    """Refuse two rows that are points of one line at the same number of chips, where a line has one step time."""
    from tomat.hardware.chips import slice_named

    taken: dict[tuple[str, int], str] = {}
    for row in rows:
        if not row.lines:
            continue
        try:  # without reading the whole configuration
            slice_name = row.slice_set or read_yaml(row.config_path).get("slice")
            n_chips = slice_named(str(slice_name)).n_chips
        except TomatError:  # the row reports it when it is loaded
            continue
        for line in row.lines:
            other = taken.setdefault((line, n_chips), row.name)
            if other != row.name:
                raise TomatError(
                    f"{path}: rows {other!r} and {row.name!r} are both the point of line {line!r} at {n_chips} chips; "
                    "expected one row for a number of chips. Give one of them another line."
                )


def check_keys(values: Mapping[str, Any], known: set[str], needed: set[str], where: str) -> None:
    """Refuse unknown keys and missing ones."""
    unknown = sorted(set(values) - known)
    if unknown:
        raise TomatError(f"{where} has the unknown key {unknown[0]!r}; expected some of {', '.join(sorted(known))}.")
    missing = sorted(key for key in needed if not values.get(key))
    if missing:
        raise TomatError(f"{where} has no {missing[0]}; it needs {' and '.join(sorted(needed))}.")


def _row(row: Mapping[str, Any], keys: Mapping[str, Any], path: Path, where: str) -> SweepRow:
    name = str(row["name"])
    if "\n" in name or "|" in name:
        raise TomatError(f"{where} is called {name!r}; expected one line without '|', since it stands in a table.")
    if not isinstance(exact := row.get("exact"), bool | None):
        raise TomatError(f"{where} {name!r} has exact: {exact!r}; expected true or false.")
    overrides = checked_keys(row.get("overrides"), where)
    # The slice of the whole sweep is not that of a row, or a value of the grid, with one of its own.
    slice_name, own_slice = row.get("slice"), overrides.get("slice")
    if slice_name and own_slice not in (None, slice_name):
        said = f"{where} {name!r} has slice: {slice_name}, and {own_slice} in its overrides"
        raise TomatError(f"{said}; expected one slice. Take the other one out.")
    return SweepRow(
        name=name,
        # Relative to the file, so that a sweep means the same wherever it is started.
        config_path=path.parent / str(row.get("config_path") or keys["config_path"]),
        overrides=checked_keys(keys.get("overrides"), str(path)) | overrides,
        slice=slice_name or (None if own_slice else keys.get("slice")),
        base=row.get("base"),
        question=" ".join(str(row.get("question") or "").split()),
        explain=" ".join(str(row.get("explain") or "").split()),
        lines=_lines(row.get("line"), f"{where} {name!r}"),
        exact=exact,
        file=path,
    )


def _lines(value: Any, where: str) -> tuple[str, ...]:
    """The value of `line` as names of lines. It holds none, one, or a list of them."""
    if value is None:
        return ()
    lines = value if isinstance(value, list) else [value]
    bad = [line for line in lines if not isinstance(line, str) or not line.strip() or set(line) & set("\n|`")]
    if bad or not lines or len(set(lines)) < len(lines):
        raise TomatError(
            f"{where}: line is {value!r}; expected the name of a line of the scaling figure, or a list of different "
            "names, each one line of text without '|' and '`', since it stands in a table."
        )
    return tuple(lines)


def _grid_rows(keys: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """The combinations of the grid that no entry of `exclude` names."""
    axes: dict[str, list[tuple[str, dict[str, Any], tuple[str, ...]]]] = {}  # of (label, overrides, lines)
    for axis, values in keys["grid"].items():
        where = f"{path}: grid.{axis}"
        if not isinstance(values, list) or not values:
            raise TomatError(f"{where} is {values!r}; expected a list of values.")
        axes[axis] = []
        for value in values:
            if not isinstance(value, Mapping):
                axes[axis].append((_label(axis, value), {axis: value}, ()))
            elif set(value) - {"line"} == {"name", "overrides"}:
                label = str(value["name"])
                lines = _lines(value.get("line"), f"{where} {label!r}")
                axes[axis].append((label, checked_keys(value["overrides"], where), lines))
            else:
                several = "{name: ..., overrides: {...}} for several settings, with line: ... if it has one"
                raise TomatError(f"{where} holds {dict(value)!r}; expected a plain value of {axis}, or {several}.")
    n_rows = len(keys["rows"]) + (math.prod(map(len, axes.values())) if axes else 0)
    if n_rows > MAX_ROWS:
        sizes = " x ".join(str(len(values)) for values in axes.values())
        raise TomatError(
            f"{path} has {n_rows:,} rows (a grid of {sizes} and {len(keys['rows'])} of their own); at most "
            f"{MAX_ROWS:,} can be planned, and each takes minutes. Take values out of the grid, or make several sweeps."
        )
    for entry in keys["exclude"]:
        if not isinstance(entry, Mapping) or not entry or set(entry) - set(axes):
            raise TomatError(f"{path}: exclude has {entry!r}; expected axes of the grid, each with one of its values.")
        for axis, value in entry.items():
            labels = sorted({label for label, *_ in axes[axis]})
            if _label(axis, value) not in labels:
                raise TomatError(f"{path}: exclude has {axis}: {value!r}; the grid has {', '.join(labels)}.")
    rows = []
    for combination in itertools.product(*axes.values()) if axes else ():
        labels = {axis: label for axis, (label, *_) in zip(axes, combination, strict=True)}
        if any(all(labels[axis] == _label(axis, value) for axis, value in entry.items()) for entry in keys["exclude"]):
            continue
        overrides = {key: value for _, part, _ in combination for key, value in part.items()}
        # One line for every choice of one part from each axis that names lines.
        parts = [lines for *_, lines in combination if lines]
        line = [", ".join(chosen) for chosen in itertools.product(*parts)] if parts else None
        rows.append({"name": ", ".join(labels.values()), "overrides": overrides, "line": line})
    return rows


def _label(axis: str, value: Any) -> str:
    """A grid value in a row's name: text stands alone, other values stand after their key."""
    return value if isinstance(value, str) else f"{axis.rpartition('.')[2]}={json.dumps(value)}"
