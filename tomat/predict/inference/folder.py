"""Predicts many structures into a folder: an output and a line for each. A call that was stopped can be resumed."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import numpy as np
from msgspec import Meta

from tomat.base.documents import append_whole_line, mapping, parse_json
from tomat.base.errors import TomatError
from tomat.base.records import Amount, Count, Positive, Sha256, typed
from tomat.base.reporting import dump_json, first_line, to_jsonable, write_text
from tomat.data.density.crystal import Crystal
from tomat.data.density.outputs import (
    CHARGE_DENSITY,
    FORMATS,
    OutputError,
    check_augmentation,
    check_replaceable,
    content_sha256,
    remove_leftovers,
    size_bytes,
    write_density,
    write_spread,
)
from tomat.data.density.rules import DEFAULT_RULES, ReadRules
from tomat.predict.inference.interface import (
    DISTANCE_TOLERANCE_A,
    GridChoice,
    OnPatches,
    Predictor,
    electron_count,
    spacing_a,
)
from tomat.predict.inference.structures import NoStructureError, StructureFile, formula, read_structure

if TYPE_CHECKING:
    from tomat.data.density.chgcar import Augmentation
    from tomat.data.density.espresso import ReciprocalList

LINES_FILE = "predictions.jsonl"
AGAIN = "Run `tomat predict` into the folder again."
SPREAD_SUFFIX = ".spread.cube"
"""End of the name of the file with the standard deviation over samples, if there are several."""

FileName = Annotated[str, Meta(pattern=r"^[^/\\\x00]+$")]


class _Flag(TypedDict):
    text: str


@dataclass(frozen=True)
class _Failed:
    """The line in `predictions.jsonl` of a structure that could not be predicted."""

    name: str
    structure: str
    error: str


@dataclass(frozen=True)
class _Predicted:
    """The line of a structure that was predicted: the keys that are read again."""

    name: str
    structure: str
    output: FileName
    formula: str = ""
    atoms: Positive | None = None
    grid: tuple[Positive, Positive, Positive] | None = None
    seconds: Amount | None = None
    electrons_before: float | None = None
    electrons: float | None = None
    electrons_from: str = ""
    flags: Sequence[_Flag] = ()
    output_bytes: Count | None = None
    format: str = ""
    made_by: Mapping[str, Any] = field(default_factory=dict)
    inputs_sha256: Sha256 | None = None
    output_sha256: Sha256 | None = None
    spread_share: Amount | None = None
    spread_output: FileName | None = None
    spread_sha256: Sha256 | None = None


NEEDED = {"formula", "grid", "seconds", "electrons_before", "electrons", "electrons_from", "flags", "output_bytes"}
"""Keys that the line of a predicted structure must have for the structure to be skipped."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    output: Path
    grid: GridChoice
    form: str = "chgcar"
    valences: Mapping[int, float] | None = None
    """Valence electrons by atomic number. They take precedence over those that the predictor learnt."""
    augmentation_from: str | None = None
    """A CHGCAR of the same atoms, whose augmentation occupancies are copied."""
    vectors_from: str | None = None
    """For the format `qe`: a `charge-density.dat` of the same cell, or a folder that holds
    `NAME.save/charge-density.dat` for each structure."""
    rules: ReadRules = DEFAULT_RULES
    accept: tuple[str, ...] = ()
    """Refusals to lift, from `interface.ACCEPTABLE`. How a file is read is in `rules`."""
    recorded: Mapping[str, Any] = field(default_factory=dict)
    """Further settings that each line records: decoder, samples, seed."""


@dataclass(frozen=True)
class Outcome:
    lines: list[Line]
    """The line of every structure; that of a failed one has the key `error`."""
    skipped: list[str]
    ignored: dict[str, str]
    """Files in folders that turned out to hold no structure, each with the reason."""

    @property
    def failed(self) -> list[Line]:
        return [line for line in self.lines if "error" in line]


def predict_structures(
    predictor: Predictor,
    files: Sequence[StructureFile],
    settings: Settings,
    *,
    on_start: Callable[[StructureFile], None] = lambda file: None,
    on_line: Callable[[Line, bool], None] = lambda line, skipped: None,
    on_patches: OnPatches | None = None,
) -> Outcome:
    """Predict each structure, write its density and its line.

    Before the first prediction, all structures are read and checked, and those that are done with the same structure
    and settings are skipped. A structure that cannot be predicted gets a line with `error`; the next call tries it
    again. However the process ends, each output is whole or absent. If the folder cannot be written (OutputError), the
    outputs so far stay. `on_start` is called with each structure before it is read, and again before it is predicted;
    `on_line` with each line, and whether it was there before.
    """
    augmentation = None
    if settings.augmentation_from is not None:
        from tomat.data.density.chgcar import read_augmentation

        augmentation = read_augmentation(settings.augmentation_from, settings.rules)
    spreads = {f"{file.name}{SPREAD_SUFFIX}": file for file in files}
    for file in files:
        if (other := spreads.get(f"{file.name}{FORMATS[settings.form]}")) is not None:
            both = f"{file.path} would be written where the standard deviation over samples of {other.path} belongs"
            raise TomatError(f"{both}; rename one, or give each its own --output.")
    lines: dict[int, Line] = {}
    skipped: list[str] = []
    ignored: dict[str, str] = {}
    with _locked(settings.output):
        path = settings.output / LINES_FILE
        done = _read_lines(path)

        def keep(index: int, line: Line, there_before: bool = False) -> None:
            if there_before:
                skipped.append(line["name"])
            else:
                try:
                    with path.open("a+b") as opened:
                        append_whole_line(opened, _as_text(line))
                except OSError as error:
                    raise OutputError(f"cannot write {path}: {error.strerror}.") from error
            lines[index] = line
            on_line(line, there_before)

        def failing_alone[T](index: int, file: StructureFile, step: Callable[[], T]) -> T | None:
            """Run one step of one structure; None if it fails. A line then records the failure."""
            on_start(file)
            try:
                return step()
            except OutputError:
                raise
            except TomatError as error:
                if isinstance(error, NoStructureError) and file.in_folder:
                    ignored[file.path] = str(error)
                    return None
                words = str(error)
            except MemoryError:
                words = f"{file.path}: not enough memory. Ask for a coarser grid."
            keep(index, {"name": file.name, "structure": file.path, "error": words})
            return None

        missing: dict[int, _Todo] = {}
        for index, file in enumerate(files):
            before = done.get(file.name)
            found = failing_alone(index, file, partial(_looked_at, predictor, file, settings, augmentation, before))
            if isinstance(found, _Todo):
                missing[index] = found
            elif found is not None:
                keep(index, found, there_before=True)
        if missing:
            predictor.load()  # outside of `failing_alone`: no structure is to blame for a refused model or decoder
        for index, todo in missing.items():
            step = partial(_predict, predictor, todo, settings, augmentation, on_patches)
            line = failing_alone(index, files[index], step)
            if line is not None:
                keep(index, line)
    return Outcome([lines[index] for index in sorted(lines)], skipped, ignored)


@dataclass(frozen=True, eq=False)
class _Todo:
    """A structure that was read and passed all checks."""

    crystal: Crystal
    notes: list[str]
    """The messages of its reader."""
    vectors: "ReciprocalList | None"
    line: Line
    """The part of its line that is known before the prediction."""


def _looked_at(
    predictor: Predictor,
    file: StructureFile,
    settings: Settings,
    augmentation: "Augmentation | None",
    before: Line | None,
) -> _Todo | Line:
    """Read and check a structure before it is predicted. Returns the line `before` if the structure is done."""
    target = settings.output / f"{file.name}{FORMATS[settings.form]}"
    for given in (file.path, settings.augmentation_from, settings.grid.like):
        if given is not None and target.exists() and os.path.samefile(target, given):
            raise TomatError(f"the output {target} is {given}, which is also an input; expected another --output.")
    check_replaceable(target, settings.form)
    crystal, notes = read_structure(file.path, file.name, settings.rules)
    predictor.check(crystal, settings.accept)
    shape = settings.grid.shape(crystal)
    electrons, electrons_from = electron_count(crystal, settings.valences, predictor.valences)
    if augmentation is not None:
        check_augmentation(augmentation, crystal.atomic_numbers, crystal.name)
    vectors = None
    if settings.vectors_from is not None:
        from tomat.data.density.espresso import read_coefficients

        place = Path(settings.vectors_from)
        vectors, _ = read_coefficients(place / f"{file.name}.save" / CHARGE_DENSITY if place.is_dir() else place)
    inputs = {
        "lattice": crystal.lattice,
        "atomic_numbers": crystal.atomic_numbers,
        "frac_coords": crystal.frac_coords,
        "grid": shape,
        "electrons": electrons,
        "format": settings.form,
        "predictor": predictor.identity,
        "augmentation": None if augmentation is None else augmentation.lines,
        "vectors": None if vectors is None else hashlib.sha256(vectors.miller.tobytes()).hexdigest(),
        "recorded": settings.recorded,
    }
    inputs_sha256 = hashlib.sha256(dump_json(inputs).encode()).hexdigest()
    if before is not None and before.get("inputs_sha256") == inputs_sha256 and _is_whole(settings.output, before):
        return before
    line = {
        "name": file.name,
        "structure": file.path,
        "formula": formula(crystal),
        "atoms": len(crystal.atomic_numbers),
        "grid": list(shape),
        "grid_from": settings.grid.why,
        "spacing_a": spacing_a(crystal, shape),
        "electrons": electrons,
        "electrons_from": electrons_from,
        "output": f"{file.name}{FORMATS[settings.form]}",
        "format": settings.form,
        "augmentation_from": settings.augmentation_from,
        "predictor": predictor.identity,
        "inputs_sha256": inputs_sha256,
        **settings.recorded,
    }
    return _Todo(crystal, notes, vectors, line)


def _predict(
    predictor: Predictor,
    todo: _Todo,
    settings: Settings,
    augmentation: "Augmentation | None",
    on_patches: OnPatches | None,
) -> Line:
    crystal, asked = todo.crystal, todo.line
    how = {"electrons": asked["electrons"], "accept": settings.accept, "on_patches": on_patches}
    prediction = predictor.predict(crystal, tuple(asked["grid"]), **how)
    started = time.monotonic()
    asked_for = {"grid": str(asked["grid_from"]), "electrons": str(asked["electrons_from"])}
    metadata = {**predictor.made_by, **asked_for, "predictor": predictor.identity, **settings.recorded}
    # The spread is written before the density, because the density marks a structure as done.
    target = settings.output / asked["output"]
    spread = settings.output / f"{asked['name']}{SPREAD_SUFFIX}"
    if prediction.spread is not None:
        write_spread(dataclasses.replace(prediction, rho=prediction.spread), spread)
    else:
        spread.unlink(missing_ok=True)
    write_density(prediction, target, settings.form, augmentation=augmentation, vectors=todo.vectors, metadata=metadata)
    flags = [*prediction.flags, *({"kind": "file", "text": f"{asked['structure']}: {note}"} for note in todo.notes)]
    if augmentation is not None:
        apart_a = augmentation.apart_a(crystal.lattice, crystal.frac_coords)
        if apart_a > DISTANCE_TOLERANCE_A:
            text = f"the augmentation occupancies belong to atoms or axes up to {apart_a:.3f} A from these"
            flags.append({"kind": "augmentation", "distance_a": apart_a, "text": text})
    line = asked | {
        "seconds": prediction.seconds,
        "write_seconds": time.monotonic() - started,
        "made_by": metadata,
        "electrons_before": prediction.electrons_before,
        "electrons": prediction.electron_count,
        "flags": flags,
        "output_bytes": size_bytes(target),
        "output_sha256": content_sha256(target),
    }
    if prediction.spread is not None:
        # Integral of the standard deviation over samples, divided by that of the density.
        line["spread_share"] = float(prediction.spread.sum(dtype=np.float64) / prediction.rho.sum(dtype=np.float64))
        line["spread_output"] = spread.name
        line["spread_sha256"] = content_sha256(spread)
    return line


def _is_whole(output: Path, line: Line) -> bool:
    """Whether the outputs that a line names still have the size and hash it records; older lines have only a size."""
    target = output / line["output"]
    if line["output_bytes"] != size_bytes(target):
        return False
    kept = ((target, line.get("output_sha256")), (output / str(line.get("spread_output")), line.get("spread_sha256")))
    return all(expected is None or content_sha256(path) == expected for path, expected in kept)


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Make the output folder if it is missing, and lock it for this process. Unfinished outputs are removed twice: at
    the start those of a killed process, and at the end one that Ctrl-C left before its own clean-up began."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OutputError(f"cannot write to {output}: {error.strerror}; expected a folder.") from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            said = f"another process writes predictions to {output}"
            raise TomatError(f"{said}; wait for it, or name another.") from error
        remove_leftovers(output)
        try:
            yield
        finally:
            remove_leftovers(output)
    finally:
        os.close(folder)


def read_line(text: str, origin: str) -> Line:
    line = parse_json(text, origin, AGAIN)
    typed(line, _Failed if "error" in mapping(line) else _Predicted, origin, AGAIN)
    return line


def _read_lines(path: Path) -> dict[str, Line]:
    """The last line of each structure. Everything else, such as a line that was cut off, is removed from the file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as error:
        raise OutputError(f"cannot read {path}: {first_line(error)}") from error
    lines: dict[str, Line] = {}
    for each in text.splitlines():
        # A structure with a damaged line is predicted again.
        with contextlib.suppress(TomatError):
            line = read_line(each, str(path))
            if "error" in line or line.keys() >= NEEDED and None not in (line[key] for key in NEEDED):
                lines.pop(line["name"], None)
                lines[line["name"]] = line
    whole = "".join(_as_text(line) for line in lines.values())
    if whole != text:
        write_text(path, whole)
    return lines


def _as_text(line: Line) -> str:
    return json.dumps(to_jsonable(line), sort_keys=True) + "\n"
