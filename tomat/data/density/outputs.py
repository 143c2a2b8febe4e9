"""Writing of densities as files that other codes read. Each file appears whole under its name, or not at all. A
format's module is imported where it is written; pymatgen writes CHGCARs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import first_line
from tomat.data.density.elements import symbol_of
from tomat.data.density.grid import DensityGrid, check_electrons
from tomat.data.density.rules import OWN_TITLE

if TYPE_CHECKING:
    from tomat.data.density.chgcar import Augmentation
    from tomat.data.density.espresso import ReciprocalList

FORMATS: Mapping[str, str] = {"chgcar": ".CHGCAR", "cube": ".cube", "zarr": ".zarr", "json": ".json.gz", "qe": ".save"}
"""From format to the ending of the file's name; `.zarr` and `.save` are folders."""
CHARGE_DENSITY = "charge-density.dat"

WRITING = ".writing-"
"""Prefix of the folder in which an output lies until it is whole."""
_EXCHANGES = 100
"""How often another process may be faster with the same folder."""


def form_of(path: str | os.PathLike[str]) -> str:
    """The format that the name of a file to be written asks for."""
    from tomat.data.density.cube import SUFFIXES
    from tomat.data.density.io import is_chgcar

    name = Path(path).name
    plain = name.removesuffix(".gz")
    if name.endswith(".zarr"):
        return "zarr"
    if plain.endswith(".json"):
        return "json"
    if plain.endswith(SUFFIXES):
        return "cube"
    if (plain.endswith(".vasp") or "CHGCAR" in plain.upper()) and is_chgcar(name):  # as it will be read
        return "chgcar"
    raise TomatError(
        f"the name {name} says no format; expected CHGCAR*[.gz], *.vasp[.gz], *.cube[.gz], *.zarr, *.json.gz or *.json."
    )


ZARR_MARKS = frozenset(("zarr.json", ".zgroup"))
"""What a folder has that is a Zarr group, of format 3 and 2."""


class OutputError(TomatError):
    """The place cannot be written, whatever the structure, so the next structure would fail too."""


def write_density(
    grid: DensityGrid,
    path: str | os.PathLike[str],
    form: str,
    *,
    augmentation: Augmentation | None = None,
    vectors: ReciprocalList | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a density; what lies at `path` is replaced once the new one is whole.

    Args:
        form: `chgcar` (rho x V in electrons, x fastest), `cube` (e/bohr^3, z fastest, lengths in bohr), `zarr` (the
            `rho_gga` layout), `json` (a charge density of the Materials Project; compressed where the name ends in
            `.gz`), `qe` (a folder with Quantum ESPRESSO's `charge-density.dat`).
        metadata: what made it, by name: the first line of a CHGCAR or cube, `metadata` of Zarr and JSON.
    """
    if form not in FORMATS:
        raise TomatError(f"there is no format {form!r}; expected one of {', '.join(FORMATS)}.")
    if (form == "qe") != (vectors is not None) or (augmentation is not None and form != "chgcar"):
        raise TomatError(f"found {form}: only qe needs and takes reciprocal vectors, augmentation is for chgcar.")
    check_electrons(grid, grid.material_id)
    if augmentation is not None:
        check_augmentation(augmentation, grid.atomic_numbers, grid.material_id)
    check_replaceable(Path(path), form)
    with _replacing(Path(path)) as place:
        if form == "chgcar":
            chgcar = grid.to_pymatgen()
            if augmentation is not None:
                # pymatgen takes lines too, and writes them as they are.
                lines: Any = {"total": list(augmentation.lines)}
                chgcar.data_aug = lines
            if metadata:
                chgcar.name = _one_line(grid, metadata)
            chgcar.write_file(str(place))
        elif form == "cube":
            _write_cube(grid, place, _one_line(grid, metadata) if metadata else "")
        elif form == "json":
            from tomat.data.density.materials_project import write_materials_project

            with _binary(place) as file:
                write_materials_project(grid, file, metadata)
        elif form == "zarr":
            from tomat.data.density.zarr_store import write_zarr

            write_zarr(grid, place, metadata=metadata)
        elif vectors is not None:
            from tomat.data.density.espresso import write_charge_density

            place.mkdir()
            write_charge_density(grid, place / CHARGE_DENSITY, vectors)


def check_replaceable(target: Path, form: str) -> None:
    """Refuse to replace a folder that holds anything but such an output."""
    if not target.is_dir():
        return
    held = {each.name for each in target.iterdir()}
    if form == "zarr" and (not held or held & ZARR_MARKS):
        return
    others = sorted(held - ({CHARGE_DENSITY} if form == "qe" else set()))
    if others or form != "qe":
        with_others = f" with {', '.join(others[:3])}" if others else ""
        raise TomatError(f"{target} is a folder{with_others}, which {form} would replace; expected another place.")


def write_spread(grid: DensityGrid, path: Path) -> None:
    """Write the standard deviation over samples, `grid.rho`, as a cube in e/bohr^3."""
    with _replacing(path) as place:
        _write_cube(grid, place)


def _write_cube(grid: DensityGrid, place: Path, title: str = "") -> None:
    from tomat.data.density.cube import write_cube

    with _binary(place) as file:
        write_cube(grid, file, title)


def _one_line(grid: DensityGrid, metadata: Mapping[str, Any]) -> str:
    """What made a density, as the title of a file. It is ASCII, since readers of titles may expect that."""
    said = "; ".join(f"{name} {value}" for name, value in metadata.items())
    return " ".join(f"{grid.formula}{OWN_TITLE}{said}".split()).encode("ascii", "replace").decode()


def remove_leftovers(folder: Path) -> None:
    """Remove half-written outputs of killed processes from a folder. Outputs that are being written now stay."""
    for left in folder.glob(f"{WRITING}*"):
        with contextlib.suppress(OSError):
            lock = _lock(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A place to write to. If the block ends without an error, what lies there replaces `target`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        with _writing_folder(target.parent) as folder:
            yield folder / target.name
            _exchange(folder / target.name, target)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or first_line(error)}.") from error


@contextlib.contextmanager
def _writing_folder(parent: Path) -> Iterator[Path]:
    """A folder with a unique name to write into, locked as long as the block lasts."""
    lock = None
    while lock is None:
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=WRITING))
        # Another process may take it for a leftover before it is locked; some network file systems have no locks.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = _lock(folder, needed=False)
            if not folder.exists():
                os.close(lock)
                lock = None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path, *, needed: bool = True) -> int:
    """An open file that holds the lock of a folder. The system releases it when the process ends, however it ends."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if needed or isinstance(error, BlockingIOError):
            os.close(opened)
            raise
    return opened


def _exchange(temporary: Path, target: Path) -> None:
    """Rename a whole output to the target. Another process may put a folder of that name there meanwhile."""
    for attempt in itertools.count():
        if target.is_dir():
            with contextlib.suppress(FileNotFoundError):
                target.rename(temporary.with_name(f"replaced-{attempt}"))
        try:
            os.replace(temporary, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR) or attempt >= _EXCHANGES:
                raise


def content_sha256(path: Path) -> str | None:
    """Hash of a file, or of all files of a folder with their names; None if it is missing or cannot be read."""
    digest = hashlib.sha256()
    try:
        for file in _files(path):
            digest.update(f"{file.relative_to(path)}\0".encode())
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    except OSError:
        return None
    return digest.hexdigest()


def size_bytes(path: Path) -> int | None:
    """Size of a file, or of all files in a folder; None if there is neither."""
    return sum(each.stat().st_size for each in _files(path)) if path.exists() else None


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


@contextlib.contextmanager
def _binary(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, compressed where its name ends in `.gz`; the same bytes for the same content."""
    with path.open("wb") as raw:
        if path.suffix != ".gz":
            yield raw
            return
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as file:
            yield file  # type: ignore[misc]  # GzipFile is no IO[bytes] by name, and has its `write`


def check_augmentation(augmentation: Augmentation, atomic_numbers: np.ndarray, name: str) -> None:
    """Refuse augmentation occupancies of other atoms, or of the same in another order."""
    theirs, ours = augmentation.crystal.atomic_numbers, atomic_numbers
    if not np.array_equal(theirs, ours):
        words = [f"{len(each)} atoms ({' '.join(map(symbol_of, each.tolist()[:12]))})" for each in (theirs, ours)]
        raise TomatError(
            f"{augmentation.crystal.name} has augmentation occupancies of {words[0]}, {name or 'the structure'} has "
            f"{words[1]}; expected the same atoms in the same order."
        )
