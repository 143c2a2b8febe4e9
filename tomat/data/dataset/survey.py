"""Survey of the densities below a path: which can be read, which are duplicates, which are left out and why. Each
answer is stored at once, under the hash of the file's bytes, so that a stopped survey can go on."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from tomat.base.errors import RetryableError, TomatError
from tomat.base.progress import progress
from tomat.base.records import Positive, Sha256, typed_text
from tomat.base.reporting import counted, first_line, writing
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import SYMBOLS, atomic_number, symbol_of
from tomat.data.density.grid import DensityGrid
from tomat.data.density.io import DensityFile, ignored_words
from tomat.data.density.poscar import NEIGHBOURS, OF_A_CALCULATION
from tomat.data.density.rules import ReadRules

SAMPLES = 65
"""Voxels by which densities are compared: two with the same cell, atoms and values there are the same density. Older
answers have 64 other voxels; their files are read again."""
GOLDEN = 0.6180339887498949
"""(sqrt(5) - 1) / 2. Its multiples, modulo 1, fill a line evenly, and in step with no grid."""
SAME_DENSITY = 1e-5
"""Largest difference of two samples, as a share of the largest value: formats keep seven digits and more."""
SAME_PLACE = 1e-4
"""Largest difference of lattice vectors in A, and of fractional coordinates: files round to six decimals."""


@dataclass(frozen=True)
class Material:
    name: str
    file_sha256: Sha256
    """Hash of the bytes of its file, and of the files beside it that name its elements."""
    content_sha256: Sha256
    """Hash of grid shape, values, cell and atoms."""
    formula: str
    """Reduced formula, by which densities are split."""
    atoms: dict[str, Positive]
    electrons: float
    grid_shape: tuple[Positive, Positive, Positive]
    sites: tuple[float, ...]
    """Lattice in A, fractional coordinates, and atomic numbers, one after another."""
    samples: tuple[float, ...]
    """Density at `SAMPLES` voxels, as shares of the largest value."""

    @classmethod
    def of(cls, grid: DensityGrid, name: str, file_sha256: str) -> "Material":
        numbers, counts = np.unique(grid.atomic_numbers, return_counts=True)
        flat = grid.rho.ravel()
        # Even steps would lie on the diagonal of 64 x 64 x 64 voxels, where a wave along x equals one along y.
        places = (np.arange(SAMPLES) * GOLDEN % 1.0 * flat.size).astype(np.int64)
        samples = flat[places] / max(float(flat.max()), 1e-30)
        sites = np.concatenate([grid.lattice.ravel(), grid.frac_coords.ravel(), grid.atomic_numbers])
        digest = hashlib.sha256(repr(grid.grid_shape).encode())
        for array in (grid.rho, grid.lattice, grid.frac_coords, grid.atomic_numbers):
            digest.update(np.ascontiguousarray(array).tobytes())
        return cls(
            name=name,
            file_sha256=file_sha256,
            content_sha256=digest.hexdigest(),
            formula=grid.formula,
            atoms={symbol_of(z): n for z, n in zip(numbers.tolist(), counts.tolist(), strict=True)},
            electrons=grid.electron_count,
            grid_shape=grid.grid_shape,
            sites=tuple(sites.tolist()),
            samples=tuple(float(f"{value:.9g}") for value in samples.tolist()),
        )

    @property
    def crystal(self) -> Crystal:
        n, sites = sum(self.atoms.values()), np.array(self.sites)
        return Crystal(sites[:9].reshape(3, 3), sites[9 + 3 * n :], sites[9 : 9 + 3 * n], self.name)

    def is_same(self, other: "Material") -> bool:
        """Whether two densities are the same, whatever their file formats."""
        if self.content_sha256 == other.content_sha256:
            return True
        if (self.atoms, self.grid_shape) != (other.atoms, other.grid_shape):
            return False
        n = sum(self.atoms.values())
        mine, theirs = (np.array(each.sites) for each in (self, other))
        moved = mine[9 : 9 + 3 * n] - theirs[9 : 9 + 3 * n]
        return bool(
            np.abs(mine[:9] - theirs[:9]).max() < SAME_PLACE
            and np.abs(moved - np.round(moved)).max() < SAME_PLACE
            and np.array_equal(mine[9 + 3 * n :], theirs[9 + 3 * n :])
            and np.abs(np.array(self.samples) - np.array(other.samples)).max() < SAME_DENSITY
        )


def file_sha256(path: str) -> str:
    """Hash of all that decides how a density is read: its bytes, and the files that may name its elements."""
    digest = hashlib.sha256()
    first = Path(path)
    try:
        if first.is_dir():
            places = sorted(each for each in first.rglob("*") if each.is_file())
        else:
            places = [first]
            if first.name.split(".")[0] in OF_A_CALCULATION:
                beside = [first.with_name(f"{name}{end}") for name in NEIGHBOURS for end in ("", ".gz")]
                places += [each for each in beside if each.is_file()]
        for place in places:
            digest.update(place.name.encode() + b"\0")
            with place.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
    except OSError as error:
        raise TomatError(f"cannot read {path}: {error.strerror or error}.") from error
    return digest.hexdigest()


SURVEY_FILE = "survey.jsonl"
Reader = Callable[[DensityFile], DensityGrid]


@dataclass(frozen=True)
class Survey:
    materials: tuple[Material, ...]
    """Materials that can be read, each density once, in the order of their files."""
    duplicates: Mapping[str, str]
    """From the name of each further file of a density to the name that the density is kept under."""
    ignored: Mapping[str, str]
    """By path, why every other file is left out."""

    def words(self) -> str:
        """`10 read, 8 ignored: ..., 2 duplicates: b (of a)`."""
        twice = counted(len(self.duplicates), "duplicate")
        if self.duplicates:
            shown = [f"{name} (of {kept})" for name, kept in list(self.duplicates.items())[:5]]
            twice += ": " + ", ".join([*shown, *(["..."] if len(self.duplicates) > 5 else [])])
        return f"{len(self.materials):,} read, {ignored_words(self.ignored)}, {twice}"


def hash_files(files: Sequence[DensityFile]) -> dict[str, str]:
    with progress() as bar:
        return {file.path: file_sha256(file.path) for file in bar.track(files, description="Comparing files")}


def survey(
    files: Sequence[DensityFile],
    hashes: Mapping[str, str],
    ignored: Mapping[str, str],
    read: Reader,
    check: Callable[[Material], object],
    kept: Path,
    rules: ReadRules,
) -> Survey:
    rule_words = {"species": list(rules.species), "accept": sorted(rules.accept)}
    known = _answers(kept, rule_words)
    found: list[Material] = []
    left_out = dict(ignored)
    with writing(kept):
        answers = kept.open("a", encoding="utf-8")
    with answers, progress() as bar:
        for file in bar.track(files, description="Reading densities"):
            key = hashes[file.path]
            answer = known.get(key)
            if answer is None:
                answer = _look(file, key, read)
                words = answer if isinstance(answer, str) else asdict(answer)
                with writing(kept):
                    line = {"file_sha256": key, "read_rules": rule_words, "found": words}
                    answers.write(json.dumps(line) + "\n")
                    answers.flush()
            if isinstance(answer, Material):
                answer = replace(answer, name=file.name)
                try:
                    check(answer)
                except TomatError as error:
                    answer = first_line(error)
            if isinstance(answer, str):
                left_out[file.path] = answer
            else:
                found.append(answer)
    # Keeps the first of each density. Only densities with the same formula and grid are compared.
    groups: dict[tuple[object, ...], list[Material]] = {}
    duplicates: dict[str, str] = {}
    for material in found:
        group = groups.setdefault((material.formula, material.grid_shape), [])
        same = next((each for each in group if each.is_same(material)), None)
        if same is None:
            group.append(material)
        else:
            duplicates[material.name] = same.name
    return Survey(tuple(each for each in found if each.name not in duplicates), duplicates, left_out)


def files_of_contents(
    wanted: Mapping[str, str], files: Sequence[DensityFile], hashes: Mapping[str, str], read: Reader, kept: Path
) -> dict[str, str]:
    """Paths, by material, of the files that hold the wanted densities, whatever their names. Writes nothing."""
    known = _answers(kept)
    found: dict[str, str] = {}
    for file in files:
        if len(found) == len(wanted):
            break
        answer = known.get(hashes[file.path]) or _look(file, hashes[file.path], read)
        if isinstance(answer, Material) and answer.content_sha256 in wanted:
            found.setdefault(wanted[answer.content_sha256], file.path)
    return found


def _look(file: DensityFile, key: str, read: Reader) -> Material | str:
    try:
        return Material.of(read(file), file.name, key)
    except RetryableError:
        raise
    except MemoryError as error:
        raise TomatError(f"Memory ran out while {file.path} was read: {error}. Take it out of the folder.") from error
    except TomatError as error:
        return first_line(error).removeprefix(file.path).lstrip(" :")


@dataclass(frozen=True)
class _Answer:
    file_sha256: Sha256
    found: Material | str
    read_rules: dict[str, list[str]] = field(default_factory=lambda: {"species": [], "accept": []})
    """Older answers have no rules, and were found under none."""

    def __post_init__(self) -> None:
        if isinstance(self.found, str):
            return
        atoms, sites, samples = self.found.atoms, self.found.sites, self.found.samples
        n = sum(atoms.values())
        whole = len(sites) == 9 + 4 * n and len(samples) == SAMPLES and atoms.keys() <= set(SYMBOLS)
        # A damaged count may be of any size, so it is expanded last.
        numbers = [atomic_number(symbol) for symbol, count in atoms.items() for _ in range(count)] if whole else []
        if not whole or sorted(numbers) != sorted(sites[9 + 3 * n :]):
            raise ValueError("expected sites and samples of every atom and voxel")


def _answers(kept: Path, rules: Mapping[str, list[str]] | None = None) -> dict[str, Material | str]:
    """Answers found before under these rules (None: any), by the hash of the file. Damaged lines are skipped."""
    answers: dict[str, Material | str] = {}
    if not kept.exists():
        return answers
    for number, line in enumerate(kept.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        with contextlib.suppress(TomatError):
            answer = typed_text(line, _Answer, f"{kept}, line {number},", "")
            if rules is None or answer.read_rules == rules:
                answers[answer.file_sha256] = answer.found
    return answers
