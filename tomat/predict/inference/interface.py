"""The interface of predictors, from a structure to its density. A request is checked, and what it leaves open is chosen
as in the training. The answer is scaled and flagged. The command and the Python API refuse and flag the same things."""

import math
import operator
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import tell
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import plausible_electron_counts, symbol_of
from tomat.data.density.geometry import check_cell, nearest_atom_a, shortest_distances_a, void_radius_a
from tomat.data.density.grid import DensityGrid, fast_shape
from tomat.data.density.limits import MOST_VOXELS
from tomat.data.density.outputs import form_of, write_density
from tomat.data.density.promolecule import Promolecule
from tomat.data.density.rules import ReadRules
from tomat.predict.inference.structures import crystal_of, read_structure

if TYPE_CHECKING:
    from ase import Atoms
    from pymatgen.core import Structure

SPACING_A = 0.065
"""Voxel spacing where no grid is asked for and the spacing of the training is not known: that of the embedded
densities, about the median of the Materials Project (0.064 A)."""

ACCEPTABLE = {
    "distances": "atoms however near or far",
    "normalisation": "densities scaled by more than 10 % to the electron count",
}
"""Refusals that a caller can lift, each with what is then accepted."""

MODEL_DEVIATION = 0.01
"""A prediction is flagged if a model's electrons differ by more than this share from those of the structure. The demo's
ten held-out cells deviate by up to 0.3 %, but AlN, its worst compound, by up to 0.8 % (three seeds)."""

PROMOLECULE_DEVIATION = 0.05
"""The same for a sum of atoms, whose functions do not hold whole numbers of electrons: in 103 embedded cells, to most
of which it was fitted, it is up to 4.6 % off."""

LARGEST_DEVIATION = 0.1
"""A prediction whose electrons deviate by more is refused. Scaling removes the excess everywhere in the cell alike, so
every atom is wrong by as much: N2 in a box of 8 A gets 13.4 electrons for 10, Na in one of 20 A 43.9 for 1."""

VOID_TOLERANCE = 1.05
"""A void up to this times the largest of the training is not flagged: a slightly expanded crystal has it."""

LARGEST_SPACING_RATIO = 1.5
"""A prediction is flagged if its voxel spacing and that of the training differ by more than this factor, either way."""

DISTANCE_TOLERANCE_A = 0.001
"""A distance this far below the shortest trained one, or an atom moved by this, is not flagged: a file's last digit."""

Flag = dict[str, Any]
"""Says where structure, grid or density lie outside the training data, or what a file's reader said: `kind`, `text`
and the figures behind it."""


@dataclass(frozen=True)
class GridChoice:
    """How the grid of each structure is chosen: by sides, or by a spacing."""

    sides: tuple[int, int, int] | None = None
    """Voxels along a, b, c of every structure."""
    spacing_a: float | None = None
    """Largest distance of neighbouring voxels, A; sides then have no prime factors other than 2, 3 and 5."""
    why: str = ""
    like: str | None = None
    """The density from which `sides` are taken."""

    def shape(self, crystal: Crystal) -> tuple[int, int, int]:
        sides = self.sides or fast_shape(crystal.lattice, self.spacing_a or SPACING_A)
        if math.prod(sides) > MOST_VOXELS:
            said = f"{crystal.name}: a grid of {' x '.join(f'{side:,}' for side in sides)} voxels ({self.why})"
            raise TomatError(f"{said}; expected at most {MOST_VOXELS:,}. Ask for a coarser one.")
        return sides


OnPatches = Callable[[int, int], None]
"""Called with the number of patches of a structure that are done, and the number of all its patches."""


DecoderName = Literal["parallel", "autoregressive", "speculative"]
ChoiceKind = Literal["greedy", "median", "sampled"]
KvCacheDtype = Literal["compute", "int8"]
"""Type of the keys and values in the cache (`model/kv_cache.py`): the type that the model computes in, or 8 bits."""


@dataclass(frozen=True)
class Choice:
    kind: ChoiceKind = "median"
    """greedy: the most probable bin. median: the smallest bin with a cumulative probability of at least half, which has
    the least expected error. sampled: a bin drawn at random."""
    samples: int = 1
    """Samples of each structure, drawn independently."""
    temperature: float = 1.0
    """Logits are divided by it before a bin is drawn."""
    seed: int = 0
    """Seed of the draws. The numbers of patch, sample and voxel are mixed into it."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ChoiceKind):
            raise TomatError(f"choice is {self.kind!r}; expected one of {', '.join(get_args(ChoiceKind))}.")
        said = f"choice is {self.kind}, samples {self.samples}, temperature {self.temperature} and seed {self.seed}"
        if self.samples < 1 or not self.temperature > 0 or self.seed < 0:
            raise TomatError(f"{said}; expected at least one sample, a temperature above 0 and a seed from 0 on.")
        if self.kind != "sampled" and (self.samples, self.temperature) != (1, 1.0):
            raise TomatError(f"{said}: only choice 'sampled' has several answers. Set it, or leave the others out.")

    def __str__(self) -> str:
        if self.kind != "sampled":
            return self.kind
        return f"sampled, {self.samples} samples, temperature {self.temperature:g}, seed {self.seed}"


def check_decoding(decoder: str, rounds: int, kv_cache_dtype: str) -> None:
    if decoder not in get_args(DecoderName):
        raise TomatError(f"decoder is {decoder!r}; expected one of {', '.join(get_args(DecoderName))}.")
    if rounds < 1 or (rounds > 1 and decoder != "parallel"):
        raise TomatError(f"rounds is {rounds}; expected at least 1, and 1 for the {decoder} decoder.")
    if kv_cache_dtype not in get_args(KvCacheDtype):
        raise TomatError(f"kv_cache_dtype is {kv_cache_dtype!r}; expected one of {', '.join(get_args(KvCacheDtype))}.")
    if kv_cache_dtype != "compute" and decoder != "autoregressive":
        said = f"kv_cache_dtype is {kv_cache_dtype}, but the {decoder} decoder keeps no keys and values"
        raise TomatError(f"{said}; choose decoder autoregressive, or leave it out.")


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(DensityGrid):
    """A density that was predicted from a structure alone. Its integral is the electron count asked for, if any was."""

    electrons_are_flagged: ClassVar[bool] = True
    electrons_before: float = field(kw_only=True)
    """Integral of the density as the predictor gave it, before it was scaled."""
    seconds: float = field(kw_only=True)
    """Time of the prediction, without loading the model."""
    spread: np.ndarray | None = field(default=None, kw_only=True)
    """float32 `[nx, ny, nz]`, standard deviation over samples, e/Å³; None for a single sample."""
    flags: tuple[Flag, ...] = field(default=(), kw_only=True)
    """Empty: nothing lies outside the training data."""
    made_by: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """What its files record of its origin, by name: model, hash of its weights, decoder, error on held-out cells, grid,
    source of the electron count."""

    def __repr__(self) -> str:
        flags = ", ".join(flag["kind"] for flag in self.flags) or "none"
        model = self.made_by.get("model", "a model that is not known").partition(", weights")[0]
        return f"{super().__repr__()[:-1]}, flags: {flags}, by {model})"

    def refined(self, grid_shape: Sequence[int], *, clip_negative: bool = False) -> Self:
        """As for any density; without the spread, which is not interpolated."""
        return replace(super().refined(grid_shape, clip_negative=clip_negative), spread=None)

    def _repr_html_(self) -> str:
        """The view in a notebook: the plane across c whose density varies most, its origin and its flags."""
        from tomat.predict.inference.slices import slice_html

        return slice_html(self, [repr(self), *(flag["text"] for flag in self.flags)])

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the density with `made_by`, in the format that the name gives (`CHGCAR*`, `*.vasp`, `*.cube`, `*.zarr`,
        `*.json`; texts also with `.gz`). An existing file is replaced once the new one is whole. Returns the path.

        >>> import tomat
        >>> sphalerite = {"lattice": {"matrix": [[0, 2.72, 2.72], [2.72, 0, 2.72], [2.72, 2.72, 0]]}, "sites": [
        ...     {"species": [{"element": "Ga", "occu": 1}], "abc": [0, 0, 0]},
        ...     {"species": [{"element": "P", "occu": 1}], "abc": [0.25, 0.25, 0.25]}]}
        >>> predictor = tomat.load()  # doctest: +ELLIPSIS
        loading the model of...
        >>> density = predictor.predict(sphalerite, (12, 12, 12))
        >>> density.formula, density.grid_shape, round(density.electron_count, 3)
        ('GaP', (12, 12, 12), 8.0)
        >>> density.write("GaP.cube").name
        'GaP.cube'
        """
        write_density(self, path, form_of(path), metadata=self.made_by)
        return Path(path)


def choose_grid(
    sides: tuple[int, int, int] | None, spacing_a: float | None, like: str | None, trained_a: float | None
) -> GridChoice:
    """The grid from at most one of `--grid`, `--spacing` and `--like` (a density; the values of a CHGCAR are not read).
    Without any of them it has the median spacing of the training, or `SPACING_A`."""
    if sides is not None:
        return GridChoice(sides=sides, why="--grid")
    if spacing_a is not None:
        return GridChoice(spacing_a=spacing_a, why=f"--spacing {spacing_a:g}")
    if like is not None:
        from tomat.data.density.chgcar import read_grid_shape
        from tomat.data.density.io import is_chgcar, open_density

        shape = read_grid_shape(like) if is_chgcar(like) else open_density(like).grid_shape
        return GridChoice(sides=shape, why=f"--like {os.fspath(like)}", like=os.fspath(like))
    if trained_a is not None:
        return GridChoice(spacing_a=trained_a, why=f"{trained_a:.4g} A, the median of the training")
    return GridChoice(spacing_a=SPACING_A, why=f"{SPACING_A} A, the default")


def electron_count(
    crystal: Crystal, given: Mapping[int, float] | None, learnt: Mapping[int, float] | None
) -> tuple[float | None, str]:
    """The electrons of a structure, and the source of the count. None where no valences are given (`--valences`, which
    take precedence) or learnt. Refuses a count that no pseudopotentials give these atoms."""
    if not given and not learnt:
        return None, "not known: the density is as the predictor gives it"
    table = {**(learnt or {}), **(given or {})}
    numbers = crystal.atomic_numbers.tolist()
    if missing := sorted(set(numbers) - set(table)):
        names = [symbol_of(z) for z in missing]
        said = f"{crystal.name}: no valence electrons of {', '.join(names)} are known; name those of every element"
        raise TomatError(f"{said}, such as --valences {','.join(f'{name}=N' for name in names)}.")
    total = float(sum(table[z] for z in numbers))
    least, most = plausible_electron_counts(np.asarray(numbers))
    if not least <= total <= most:
        said = f"{crystal.name}: the valences give its {len(numbers)} atoms {total:g} electrons"
        raise TomatError(f"{said}; expected {least:.4g} to {most:.4g}. Correct --valences.")
    sources = {"--valences" if given and z in given else "learnt from the training set" for z in numbers}
    return total, " and ".join(sorted(sources))


class Predictor(ABC):
    """Predicts the density of a crystal. It reads no density; its promolecule is a fit to its training densities."""

    promolecule: Promolecule
    usual_deviation: float
    """Share by which the electrons of its densities, before scaling, may differ from a crystal's without a flag."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.made_by['model']})"

    @property
    def elements(self) -> tuple[int, ...]:
        return self.promolecule.elements

    @property
    def spacing_a(self) -> float | None:
        """Median voxel spacing of the training, A. None: any spacing is as good."""
        return self.promolecule.spacing_a or None

    @property
    def valences(self) -> Mapping[int, float] | None:
        """Electrons that an atom contributes, by atomic number, learnt from the training set. None: not known."""
        return self.promolecule.valences or None

    @property
    @abstractmethod
    def identity(self) -> str:
        """A hash, or words, that identify all that its densities depend on: weights, decoder, samples, seed."""

    @property
    def made_by(self) -> dict[str, str]:
        """What outputs record of the predictor, by name (`Prediction.made_by`, without grid and electrons)."""
        return {"model": self.identity}

    def load(self) -> None:  # noqa: B027  (a sum of atoms has nothing to load)
        """Load the model into memory. This time is not part of a prediction's seconds."""

    @abstractmethod
    def density(
        self, crystal: Crystal, grid_shape: tuple[int, int, int], on_patches: OnPatches | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The density before scaling, float `[nx, ny, nz]`, e/Å³; and its standard deviation over samples, or None."""

    def predict(
        self,
        structure: "Crystal | DensityGrid | Structure | Atoms | Mapping[str, Any] | str | os.PathLike[str]",
        grid_shape: tuple[int, int, int] | None = None,
        *,
        electrons: float | Literal["learnt"] | None = "learnt",
        accept: Collection[str] = (),
        on_patches: OnPatches | None = None,
    ) -> Prediction:
        """Predict the density on a grid of the cell. `structure` is pymatgen's structure, ASE's atoms, a dict or a file
        of a structure, a crystal, or a density, whose values are not read. Messages of a file's reader, and parts of a
        structure that are not used (oxidation states, magnetic moments), become a warning and a flag, as do valences
        that are not known.

        `grid_shape` holds the voxels along a, b, c (None: as fine as the training was, 0.065 A where any is as good).
        `electrons` is the integral that the density is scaled to, if it holds that within 10 %; None does not scale,
        nor does `learnt` where no valences were learnt. `accept` names the refusals to lift: `distances`,
        `normalisation` (`ACCEPTABLE`).
        """
        flags: list[Flag] = []
        if isinstance(structure, (str, os.PathLike)):
            crystal, notes = read_structure(structure, rules=ReadRules(accept=tuple({"distances"} & set(accept))))
            kind, source = "file", os.fspath(structure)
        else:
            crystal, notes = crystal_of(structure)
            kind, source = "structure", crystal.name
        for note in notes:
            flags.append({"kind": kind, "text": f"{source}: {note}"})
            warnings.warn(flags[-1]["text"], stacklevel=2)
        self.check(crystal, accept)
        grid_from, electrons_from = "as asked for", "as asked for"
        if grid_shape is None:
            choice = choose_grid(None, None, None, self.spacing_a)
            grid_shape, grid_from = choice.shape(crystal), choice.why
        else:
            grid_shape = GridChoice(sides=_whole_sides(grid_shape), why=grid_from).shape(crystal)
        if electrons == "learnt":
            electrons, electrons_from = electron_count(crystal, None, self.valences)
            if electrons is None:
                warnings.warn(f"{crystal.name}: electrons {electrons_from}.", stacklevel=2)
        elif electrons is not None and not (isinstance(electrons, Real) and 0 < electrons < math.inf):
            raise TomatError(f"electrons is {electrons!r}; expected a number above 0, 'learnt', or None: not scaled.")
        flags += self._extrapolations(crystal, grid_shape)
        self.load()
        started = time.monotonic()
        rho, deviations = self.density(crystal, grid_shape, on_patches)
        scaled, before = normalised(rho, crystal, electrons)
        vacuums = self._vacuum(crystal, scaled)
        scale = self._normalisation(crystal, grid_shape, before, electrons, vacuums, accept)
        spread = None
        if deviations is not None:
            spread = (deviations * np.float32(1.0 if electrons is None else electrons / before)).astype(np.float32)
        return Prediction(
            scaled, crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name,
            electrons_before=before, seconds=time.monotonic() - started, spread=spread,
            flags=(*flags, *vacuums, *scale),
            made_by=self.made_by | {"grid": grid_from, "electrons": electrons_from},
        )  # fmt: skip

    def check(self, crystal: Crystal, accept: Collection[str]) -> None:
        if unknown := sorted(set(accept) - set(ACCEPTABLE)):
            raise TomatError(f"accept names {unknown[0]!r}; expected some of {', '.join(ACCEPTABLE)}.")
        if other := sorted(set(crystal.atomic_numbers.tolist()) - set(self.elements)):
            found, known = ", ".join(map(symbol_of, other)), " ".join(map(symbol_of, self.elements))
            said = f"{crystal.name or 'the structure'} has {found}, which no training density had"
            raise TomatError(f"{said}; the model knows {known}. Train it on densities with that element.")
        if "distances" not in accept:
            source = crystal.name or "the structure"
            check_cell(crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, source)

    def _extrapolations(self, crystal: Crystal, grid_shape: Sequence[int]) -> list[Flag]:
        """Flags for atoms or a grid that lie outside the predictor's training data."""
        found: list[Flag] = []
        if trained := self.promolecule.shortest_distance_a:
            ours = shortest_distances_a(crystal.lattice, crystal.atomic_numbers, crystal.frac_coords)
            for pair, distance_a in ours.items():
                names = "-".join(symbol_of(z) for z in pair)
                if pair not in trained:
                    text = f"no training structure has {names} neighbours; here they are {distance_a:.3f} A apart"
                    found.append({"kind": "pair", "pair": names, "distance_a": distance_a, "text": text})
                elif distance_a < trained[pair] - DISTANCE_TOLERANCE_A:
                    text = f"{names} are {distance_a:.3f} A apart, the shortest in training was {trained[pair]:.3f} A"
                    figures = {"distance_a": distance_a, "trained_a": trained[pair]}
                    found.append({"kind": "distance", "pair": names, **figures, "text": text})
        if (trained_a := self.spacing_a) is not None:
            ratio, asked_a = max((max(a / trained_a, trained_a / a), a) for a in spacing_a(crystal, grid_shape))
            if ratio > LARGEST_SPACING_RATIO:
                text = f"the voxel spacing is {asked_a:.3f} A, in training it was {trained_a:.3f} A"
                found.append({"kind": "spacing", "spacing_a": asked_a, "trained_a": trained_a, "text": text})
        return found

    def _vacuum(self, crystal: Crystal, rho: np.ndarray) -> list[Flag]:
        """A flag if voxels are farther from every atom than any in the training, with the electrons of `rho` there."""
        trained_a = self.promolecule.void_radius_a
        if trained_a is None:
            return []
        radius_a = void_radius_a(crystal.lattice, crystal.frac_coords)
        if radius_a <= VOID_TOLERANCE * trained_a:
            return []
        nx, ny, nz = rho.shape
        beyond = nearest_atom_a(crystal.lattice, crystal.frac_coords, (nx, ny, nz)) > trained_a
        share = float(beyond.mean())
        electrons = float(rho[beyond].sum(dtype=np.float64)) * crystal.volume_a3 / rho.size
        text = (
            f"{share:.0%} of the cell is farther than {trained_a:.2f} A from every atom (up to {radius_a:.2f} A), "
            f"where no training structure has a point; the prediction puts {electrons:.3g} electrons there"
        )
        figures = {"void_radius_a": radius_a, "trained_a": trained_a, "share": share, "electrons": electrons}
        return [{"kind": "vacuum", **figures, "text": text}]

    def _normalisation(
        self,
        crystal: Crystal,
        grid_shape: tuple[int, int, int],
        before: float,
        electrons: float | None,
        vacuums: Sequence[Flag],
        accept: Collection[str],
    ) -> list[Flag]:
        """A flag if the density was scaled by more than is usual for the predictor. Beyond `LARGEST_DEVIATION` it is
        refused, in words that name the `vacuums`, unless `accept` lifts that. `electrons` is None if not known."""
        if electrons is None:
            text = "the valence electrons are not known, so the density is not scaled to them"
            return [{"kind": "electrons", "text": f"{text}; give them with --valences"}]
        deviation = before / electrons - 1
        if abs(deviation) <= self.usual_deviation:
            return []
        words = f"{before:.4g} electrons were predicted for {electrons:g}, {abs(deviation):.1%} too "
        words += "many" if deviation > 0 else "few"
        if abs(deviation) > LARGEST_DEVIATION and "normalisation" not in accept:
            grid = " x ".join(map(str, grid_shape))
            raise TomatError(
                f"{crystal.name or 'the structure'}: {words}; expected within {LARGEST_DEVIATION:.0%}"
                + "".join(f" ({flag['text']})" for flag in vacuums)
                + ". Scaling would make every atom wrong by as much: the structure is too unlike those of the "
                f"training, its grid of {grid} voxels is too coarse, or the valences are wrong. "
                "`--accept normalisation` (accept in Python) scales it nevertheless."
            )
        text = f"{words}; the density was scaled to them"
        return [{"kind": "normalisation", "factor": electrons / before, "deviation": deviation, "text": text}]


def _whole_sides(grid_shape: Sequence[int]) -> tuple[int, int, int]:
    try:
        nx, ny, nz = map(operator.index, grid_shape)
    except (TypeError, ValueError):
        nx = ny = nz = 0
    if min(nx, ny, nz) < 1:
        raise TomatError(f"grid_shape is {grid_shape!r}; expected three whole numbers from 1 on, along a, b, c.")
    return nx, ny, nz


def say_if_voids_unknown(promolecule: Promolecule, place: str) -> None:
    """Print that vacuum is not checked, where the training's voids are not known."""
    if promolecule.void_radius_a is None:
        tell(
            f"note: the promolecule of {place} was fitted by an earlier tomat, which did not record how far points of "
            "its cells were from atoms: vacuum is not flagged, only too many or too few electrons."
        )


def spacing_a(crystal: Crystal, grid_shape: Sequence[int]) -> list[float]:
    """Distance of neighbouring voxels along a, b, c, in A."""
    return (np.linalg.norm(crystal.lattice, axis=1) / np.array(grid_shape)).tolist()


def normalised(rho: np.ndarray, crystal: Crystal, electrons: float | None) -> tuple[np.ndarray, float]:
    """`rho` scaled to integrate to `electrons` (None: not scaled), float32, and its integral before."""
    before = float(rho.mean(dtype=np.float64)) * crystal.volume_a3
    if electrons is None:
        return rho.astype(np.float32), before
    if not before > 0:
        raise TomatError(f"{crystal.name}: the predicted density holds {before:.3g} electrons; it cannot be scaled.")
    return (rho * np.float64(electrons / before)).astype(np.float32), before
