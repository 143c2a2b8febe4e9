"""Re-tokenising many materials: the three stages, and the function that does one unit of each.

*Survey* reads every density once: grid, structure, electron count, whether it can be written, and, where a codec is to
be fitted, the histogram of its voxels and the sums that a promolecule is fitted from. *Fit* adds histograms and sums in
the order of the units and fits codec and promolecule. *Write* turns chunks into tokens. A unit's function needs nothing
but its arguments and the storage, so a process pool runs it on a laptop and Zephyr on a cluster. A unit that is
finished has left an object that says so; whatever is killed and started again goes on with the units that have not, and
ends with the same bytes.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from io import BytesIO
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from tomat.base.checked_json import parse_checked, refuse_unknown_keys, with_checksum
from tomat.base.errors import RetryableError, TomatError
from tomat.base.records import Count, Positive, typed
from tomat.base.storage import ARRAY_NAME, PROGRESS_PREFIX, Store
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.files import codec_from_text
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import fit_lloyd_max
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.density.crystal import Crystal
from tomat.data.density.electron_count import ELECTRON_TOLERANCE, check_electron_count
from tomat.data.density.elements import symbol_of
from tomat.data.density.grid import DensityGrid
from tomat.data.density.kinds import is_partial
from tomat.data.density.promolecule import Promolecule, PromoleculeFit
from tomat.data.tokens.clipping import ClippedMaterial, clipped_of
from tomat.data.tokens.manifest import ShardManifest
from tomat.data.tokens.patch import check_grid_encodable
from tomat.data.tokens.pipeline.config import RetokenizeConfig
from tomat.data.tokens.pipeline.sources import Material, read_text
from tomat.data.tokens.structures import Structures
from tomat.data.tokens.writer import ChunkWriter, chunk_tokens, planned, read_plan, record_name, stored_codec

SURVEY_PREFIX = "survey/"
"""An object for each surveyed unit; gone once the set is complete."""

LARGEST_UNIT = 256
"""Materials of a unit at most: some ten seconds of work, which is what a kill loses."""
UNITS_AIMED_AT = 128
"""Units of a small set: a few for each core of one machine, each with a histogram of some megabytes to write."""


@dataclass(frozen=True)
class SurveyUnit:
    """Materials that are surveyed together."""

    index: int
    materials: tuple[Material, ...]

    @property
    def record(self) -> str:
        """Name of the object that says what was found."""
        return f"{SURVEY_PREFIX}{self.index:06d}.json"

    @property
    def structures(self) -> str:
        """Name of the object with the structures of the materials that were found good."""
        return f"{SURVEY_PREFIX}{self.index:06d}.structures.npz"

    @property
    def histogram(self) -> str:
        """Name of the object with the voxels counted."""
        return f"{SURVEY_PREFIX}{self.index:06d}.npz"

    @property
    def promolecule(self) -> str:
        """Name of the object with the sums that a promolecule is fitted from."""
        return f"{SURVEY_PREFIX}{self.index:06d}.promolecule.npz"

    def parts(self, config: RetokenizeConfig) -> list[str]:
        """Names of all that a survey leaves."""
        fitted = [self.histogram] if config.fits_codec else []
        fitted += [self.promolecule] if config.fits_promolecule else []
        return [self.record, self.structures, *fitted]


@dataclass(frozen=True)
class WriteUnit:
    """Chunks that are written together."""

    chunks: tuple[int, ...]
    materials: tuple[Material, ...]
    """Those whose rows are in the chunks, in the order of their rows."""


@dataclass(frozen=True)
class Surveyed:
    """A material that can be tokenised."""

    material_id: str
    grid_shape: tuple[Positive, Positive, Positive]
    n_atoms: Count
    n_electrons: float
    """Integral of the density, to four decimals."""
    clipped_voxels: Count
    """Negative values that were set to zero on reading."""
    outside_codec: ClippedMaterial | None = None
    """Voxels outside the codec; None while there is no codec, and in older surveys, which did not count them."""


@dataclass(frozen=True)
class SetSurvey:
    """The survey of a whole set, as far as it is read again."""

    materials: Annotated[tuple[Surveyed, ...], Meta(min_length=1)]


@dataclass(frozen=True)
class UnitSurvey:
    """What the survey of a unit found."""

    materials: tuple[Surveyed, ...]
    skipped: tuple[tuple[str, str], ...]
    """Material and reason."""

    def to_bytes(self) -> bytes:
        """JSON with its checksum, the same for the same findings."""
        return json.dumps(with_checksum(asdict(self)), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, content: bytes, unit: SurveyUnit, source: str) -> "UnitSurvey":
        """What `to_bytes` wrote.

        Raises:
            TomatError: if it is damaged, or of other materials than the unit's.
        """
        again = "Remove this file and run the same command again; it surveys its materials again."
        values, checked = parse_checked(content, source, "the survey of some materials", again)
        if not checked:
            refuse_unknown_keys(values, frozenset({"materials", "skipped"}), source, again)
        found = typed(values, cls, source, again)
        names = [each.material_id for each in found.materials] + [name for name, _ in found.skipped]
        if sorted(names) != sorted(each.material_id for each in unit.materials):
            raise TomatError(f"{source} is damaged: it is not of the materials it should be of. {again}")
        return found


def unit_size(n_materials: int) -> int:
    """Materials of a unit. It follows from their number alone: histograms are added unit by unit, and sums of floats
    depend on the grouping, which must not depend on the number of workers."""
    return min(max(-(-n_materials // UNITS_AIMED_AT), 1), LARGEST_UNIT)


def survey_units(materials: Sequence[Material]) -> list[SurveyUnit]:
    """The units of the survey, in order."""
    size = unit_size(len(materials))
    return [
        SurveyUnit(index, tuple(materials[start : start + size]))
        for index, start in enumerate(range(0, len(materials), size))
    ]


def expected_electrons(material: Material, grid: DensityGrid, valences: dict[str, float]) -> float | None:
    """The electron count a density should have: what its source states, else the sum of the valences; None where
    neither says."""
    if material.n_electrons is not None:
        return material.n_electrons
    symbols = [symbol_of(int(number)) for number in grid.atomic_numbers]
    if symbols and all(symbol in valences for symbol in symbols):
        return sum(valences[symbol] for symbol in symbols)
    return None


def survey_material(
    config: RetokenizeConfig, material: Material, grid: DensityGrid, codec: DensityCodec | None
) -> Surveyed:
    """Check that a density can be tokenised.

    Args:
        codec: the codec, if it is there before the survey.

    Raises:
        TomatError: the reason why it cannot.
    """
    found = grid.electron_count
    # A part of the electrons has no count to compare with; the reader lets one in only by its name and `accept`.
    if not is_partial(material.location):
        # What was clipped is no error of the file's.
        read = found - grid.clipped_electrons
        tolerance = min(config.electron_tolerance * read, ELECTRON_TOLERANCE)
        expected = expected_electrons(material, grid, config.valences)
        if expected is None:
            check_electron_count(
                grid.rho * (grid.volume_a3 * read / found),
                grid.lattice,
                grid.atomic_numbers,
                material.location,
                accept=config.accept,
                tolerance=tolerance,
            )
        elif abs(read - expected) > tolerance:
            raise TomatError(
                f"the density integrates to {read:.4f} electrons, expected {expected:g}: off by "
                f"{100 * abs(read - expected) / expected:.2f} %, more than {tolerance:.2g} electrons."
            )
    check_grid_encodable(grid, config.sequence_layout)
    # A codec that is fitted to these very densities has none of their voxels outside.
    outside = None if codec is None else clipped_of(grid, codec, material.material_id, config.max_clipped_share)
    return Surveyed(
        material.material_id, grid.grid_shape, len(grid.atomic_numbers), round(found, 4), grid.clipped_voxels, outside
    )


def survey_unit(config: RetokenizeConfig, unit: SurveyUnit) -> int:
    """Survey the materials of a unit, and leave the findings in the output.

    Returns:
        Number of materials.

    Raises:
        TomatError: if input or output cannot be reached.
    """
    store = Store(config.output, config.storage_tries)
    histogram = DensityHistogram() if config.fits_codec else None
    promolecule = PromoleculeFit() if config.fits_promolecule else None
    codec = None if config.fits_codec else codec_before_survey(config)
    crystals: list[Crystal] = []
    found: list[Surveyed] = []
    skipped: list[tuple[str, str]] = []
    with reading(unit.materials, config.storage_tries) as read:
        for material in unit.materials:
            try:
                grid = read(material.material_id)
                surveyed = survey_material(config, material, grid, codec)
                crystal = Crystal.of(grid)
                if promolecule is not None:
                    promolecule.add(grid)
                if histogram is not None:
                    histogram.add(grid.rho)
            except RetryableError:
                raise
            except MemoryError as error:
                raise TomatError(
                    f"Memory ran out while {material.material_id} ({material.location}) was surveyed: {error}. Use "
                    "fewer --workers, or leave this material out; the same command goes on where it stopped."
                ) from error
            except TomatError as error:
                skipped.append((material.material_id, str(error)))
            # What a reader let pass can surface in any step; it is this material's fault, and not the run's end.
            except Exception as error:
                skipped.append((material.material_id, f"{material.location}: {type(error).__name__}: {error}"))
            else:
                found.append(surveyed)
                crystals.append(crystal)
    store.write(unit.structures, Structures.of(crystals).to_bytes())
    if promolecule is not None:
        store.write(unit.promolecule, promolecule.to_bytes())
    if histogram is not None:
        store.write(unit.histogram, histogram.to_bytes())
    # Last: the record says that the others are there.
    store.write(unit.record, UnitSurvey(tuple(found), tuple(skipped)).to_bytes())
    return len(unit.materials)


def codec_before_survey(config: RetokenizeConfig) -> DensityCodec:
    """The codec of a set that fits none: the one that is given, or the two-token codec.

    Raises:
        TomatError: if it cannot be read.
    """
    if config.codec is not None:
        return codec_from_text(read_text(config.codec, config.storage_tries), config.codec)
    return TwoTokenCodec()


def fit_codec(config: RetokenizeConfig, store: Store, units: Iterable[SurveyUnit]) -> DensityCodec:
    """The codec of the set: the one that is given, or one fitted to the histograms of all units.

    Raises:
        TomatError: if the codec cannot be read, a histogram is damaged, or there are too few densities to fit one.
    """
    if not config.fits_codec:
        return codec_before_survey(config)
    total = DensityHistogram()
    for unit in units:
        content, source, again = _part(store, unit, unit.histogram)
        total.merge(DensityHistogram.load(BytesIO(content), source, again))
    return fit_lloyd_max(total, config.bins, config.objective)


def fit_promolecule(config: RetokenizeConfig, store: Store, units: Iterable[SurveyUnit]) -> Promolecule | None:
    """The promolecule of the set: the one that is given, one fitted to the sums of all units, or None.

    Raises:
        TomatError: if it cannot be read, or a unit's sums are damaged.
    """
    if not config.fits_promolecule:
        return promolecule_before_survey(config)
    total = PromoleculeFit()
    for unit in units:
        total.merge(PromoleculeFit.from_bytes(*_part(store, unit, unit.promolecule)))
    return total.solve()


def promolecule_before_survey(config: RetokenizeConfig) -> Promolecule | None:
    """The promolecule that is given; None if none is.

    Raises:
        TomatError: if it cannot be read.
    """
    if config.promolecule is None:
        return None
    return Promolecule.from_text(read_text(config.promolecule, config.storage_tries), config.promolecule)


def gather_structures(store: Store, units: Iterable[SurveyUnit], findings: Mapping[int, UnitSurvey]) -> Structures:
    """The structures of all materials that were found good, in the order of their rows.

    Raises:
        TomatError: if those of a unit are damaged.
    """
    parts = []
    for unit in units:
        content, source, again = _part(store, unit, unit.structures)
        names = [material.material_id for material in findings[unit.index].materials]
        parts.append(Structures.from_bytes(content, source, names, again))
    return Structures.joined(parts)


def _part(store: Store, unit: SurveyUnit, name: str) -> tuple[bytes, str, str]:
    """An object that a unit's survey left, what to call it, and what to do about a damaged one."""
    content, source = store.read(name), store.url + name
    again = f"Remove {store.url}{unit.record} and run the same command again; it surveys these materials again."
    if content is None:
        raise TomatError(f"{source} is gone. {again}")
    return content, source, again


def write_units(plan: ShardManifest, materials: Sequence[Material], missing: Sequence[int]) -> list[WriteUnit]:
    """The chunks that are missing, in units whose materials lie together, so that few are read twice."""
    by_id = {material.material_id: material for material in materials}
    per_chunk = max(plan.block_rows / plan.patches_per_material, 1)
    size = max(int(unit_size(len(plan.materials)) / per_chunk), 1)
    units = []
    for start in range(0, len(missing), size):
        chunks = tuple(missing[start : start + size])
        names: dict[str, None] = {}
        for chunk in chunks:
            first_row, stop_row = plan.chunk_rows(chunk)
            first, last = plan.material_indices(np.array([first_row, stop_row - 1])).tolist()
            names |= dict.fromkeys(entry.material_id for entry in plan.materials[first : last + 1])
        units.append(WriteUnit(chunks, tuple(by_id[name] for name in names)))
    return units


def missing_chunks(store: Store, plan: ShardManifest) -> list[int]:
    """The chunks without a record, or whose object is gone. Two listings; `tomat shards verify` reads the content."""
    if plan.complete:
        return []
    records = set(store.names(PROGRESS_PREFIX))
    objects = set(store.names(f"{ARRAY_NAME}/c/"))
    return [chunk for chunk in range(plan.n_chunks) if record_name(chunk) not in records or f"{chunk}/0" not in objects]


@lru_cache(maxsize=2)
def _open_set(output: str, tries: int, codec_sha256: str) -> tuple[Store, ShardManifest, DensityCodec, Any]:
    """Store, plan, codec and array, read once by a process; the hash keeps it from taking an older set's."""
    store = Store(output, tries)
    plan = read_plan(store)
    if plan is None or plan.codec_sha256 != codec_sha256:
        raise TomatError(f"The plan in {store.url} has gone or changed while it was carried out. Start again.")
    return store, plan, stored_codec(store), store.open_array()


def write_unit(config: RetokenizeConfig, codec_sha256: str, unit: WriteUnit) -> int:
    """Write the chunks of a unit, each with its record; finished ones are written again with the same bytes.

    Returns:
        Number of rows.

    Raises:
        TomatError: if a density or the output fails.
    """
    store, plan, codec, array = _open_set(config.output, config.storage_tries, codec_sha256)
    rows = 0
    with reading(unit.materials, config.storage_tries) as read, ChunkWriter(store, plan, array) as writer:
        for chunk in unit.chunks:
            writer.write(chunk, chunk_tokens(plan, chunk, planned(read), codec))
            start, stop = plan.chunk_rows(chunk)
            rows += stop - start
    return rows


@contextmanager
def reading(materials: Sequence[Material], tries: int) -> Iterator[Callable[[str], DensityGrid]]:
    """A function that reads materials by name, best in the order given.

    The last two stay in memory, since a chunk may end inside a material. From a bucket the next one is fetched while
    the present one is encoded; only one ahead, so that three grids of 448 x 448 x 110 stay far below a gigabyte.
    """
    order = {material.material_id: index for index, material in enumerate(materials)}
    ahead: dict[int, Future[DensityGrid]] = {}
    with ThreadPoolExecutor(1) as executor:

        @lru_cache(maxsize=2)
        def read(material_id: str) -> DensityGrid:
            index = order[material_id]
            future = ahead.pop(index, None)
            following = index + 1
            if following < len(materials) and materials[following].is_remote and following not in ahead:
                ahead.clear()
                ahead[following] = executor.submit(materials[following].read, tries)
            return materials[index].read(tries) if future is None else future.result()

        yield read


def request_identity(
    config: RetokenizeConfig,
    materials: Sequence[Material],
    codec_sha256: str | None,
    promolecule_sha256: str | None = None,
) -> dict[str, Any]:
    """All that decides the bytes of the set; where the densities lie does not."""
    names = "\n".join(material.material_id for material in materials)
    return {
        "layout": config.sequence_layout.to_dict(),
        "codec": codec_sha256 or {"fit": "lloyd_max", "bins": config.bins, "objective": config.objective},
        "promolecule": promolecule_sha256 or ("fit" if config.fits_promolecule else None),
        "patches_per_material": config.patches_per_material,
        "seed": config.seed,
        "split": config.split,
        "block_rows": config.block_rows,
        "electron_tolerance": config.electron_tolerance,
        "max_clipped_share": config.max_clipped_share,
        "valences": dict(sorted(config.valences.items())),
        # Only where given: sets from before these settings stay the same request.
        **({"species": list(config.species)} if config.species else {}),
        **({"accept": sorted(config.accept)} if config.accept else {}),
        "materials": len(materials),
        "materials_sha256": hashlib.sha256(names.encode()).hexdigest(),
    }
