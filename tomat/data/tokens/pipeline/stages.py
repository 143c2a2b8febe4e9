"""From densities to a shard set: the three stages, and the function that does one unit of each.

*Survey* reads every density once. If a codec is to be fitted, it makes the histogram of the voxels and the sums for a
promolecule. *Fit* adds these in the order of the units; for a relative codec it reads the densities once more, to count
their ratios to the promolecule. *Write* turns chunks into tokens. A unit's function needs only its arguments and the
storage, so any process can run it. A finished unit has left an object that says so. A run that is killed and started
again goes on with the other units, and ends with the same bytes.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from tomat.base.documents import parse_checked, with_checksum
from tomat.base.errors import RetryableError, TomatError
from tomat.base.records import Count, Positive, typed
from tomat.base.storage import ARRAY_NAME, MANIFEST_NAME, PROGRESS_PREFIX, Store
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.ratios import RatioHistogram, fit_codec
from tomat.data.codec.relative import OFFSET_E_PER_A3
from tomat.data.density.checks import ELECTRON_TOLERANCE, check_electron_count
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import symbol_of
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule, PromoleculeFit
from tomat.data.tokens.clipping import ClippedMaterial, clipped_of
from tomat.data.tokens.manifest import ShardManifest, SkippedMaterial, parse_manifest
from tomat.data.tokens.patch import check_cell_encodable
from tomat.data.tokens.pipeline.config import ShardJob
from tomat.data.tokens.pipeline.sources import Material
from tomat.data.tokens.structures import Structures
from tomat.data.tokens.writer import ChunkWriter, chunk_is_written, chunk_tokens, planned, record_name, stored_codec

SURVEY_PREFIX = "survey/"
"""Prefix of the objects of surveyed units, which are removed once the set is complete."""

LARGEST_UNIT = 256
"""Most materials of a unit: some ten seconds of work, which a kill loses."""
UNITS_AIMED_AT = 128
"""Units of a small set: a few for each core of one machine, each with a histogram of some megabytes to write."""

RECORD, STRUCTURES, HISTOGRAM, SUMS, RATIOS = "json", "structures.npz", "npz", "promolecule.npz", "ratios.npz"
"""Endings of the objects of a unit, each a part of what was found."""


@dataclass(frozen=True)
class SurveyUnit:
    index: int
    materials: tuple[Material, ...]

    def part(self, ending: str) -> str:
        """Name of the object that keeps a part of what was found."""
        return f"{SURVEY_PREFIX}{self.index:06d}.{ending}"

    def parts(self, job: ShardJob) -> list[str]:
        fitted = [HISTOGRAM] if job.counts_densities else []
        fitted += [SUMS] if job.fits_promolecule else []
        return [self.part(each) for each in (RECORD, STRUCTURES, *fitted)]


@dataclass(frozen=True)
class WriteUnit:
    chunks: tuple[int, ...]
    materials: tuple[Material, ...]
    """The materials whose rows are in the chunks, in the order of their rows."""


@dataclass(frozen=True)
class Surveyed:
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
    """The record of a unit: its materials, and why others were skipped."""

    materials: tuple[Surveyed, ...]
    skipped: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Findings:
    survey: UnitSurvey
    structures: Structures
    histogram: DensityHistogram | None = None
    promolecule: PromoleculeFit | None = None


def unit_size(n_materials: int) -> int:
    """Materials of a unit. This follows from the number of all materials alone: histograms are added unit by unit, and
    sums of floats depend on the grouping, which must not depend on the number of workers."""
    return min(max(-(-n_materials // UNITS_AIMED_AT), 1), LARGEST_UNIT)


def survey_units(materials: Sequence[Material]) -> list[SurveyUnit]:
    parts = itertools.batched(materials, unit_size(len(materials)))
    return [SurveyUnit(index, part) for index, part in enumerate(parts)]


def check_electrons(job: ShardJob, tolerance: float, material: Material, grid: DensityGrid) -> None:
    """Compare the electron count with what source or valences state, else with what pseudopotentials leave."""
    # A part of the electrons has no count to compare with.
    if grid.partial:
        return
    # Clipped electrons are not an error of the file.
    read = grid.electron_count - grid.clipped_electrons
    allowed = min(tolerance * read, ELECTRON_TOLERANCE)
    expected = material.n_electrons
    symbols = [symbol_of(int(number)) for number in grid.atomic_numbers]
    if expected is None and symbols and all(symbol in job.valences for symbol in symbols):
        expected = sum(job.valences[symbol] for symbol in symbols)
    if expected is None:
        check_electron_count(
            grid.rho * (grid.volume_a3 * read / grid.electron_count),
            Crystal(grid.lattice, grid.atomic_numbers, grid.frac_coords, material.location),
            accept=job.accept,
            tolerance=allowed,
        )
    elif abs(read - expected) > allowed:
        raise TomatError(
            f"the density integrates to {read:.4f} electrons, expected {expected:g}: off by "
            f"{100 * abs(read - expected) / expected:.2f} %, more than {allowed:.2g} electrons."
        )


def look_at(job: ShardJob, unit: SurveyUnit) -> Findings:
    """Read the densities of a unit, and find out whether each can be tokenized."""
    histogram = DensityHistogram() if job.counts_densities else None
    promolecule = PromoleculeFit() if job.fits_promolecule else None
    crystals: list[Crystal] = []
    found: list[Surveyed] = []
    skipped: list[tuple[str, str]] = []
    with reading(unit.materials, job.storage_tries) as read:
        for material in unit.materials:
            name = material.material_id
            outside = None
            try:
                grid = read(name)
                if job.electron_tolerance is not None:
                    check_electrons(job, job.electron_tolerance, material, grid)
                check_cell_encodable(name, grid.grid_shape, grid.lattice, grid.atomic_numbers, job.layout)
                # A codec that is fitted to these very densities has none of their voxels outside.
                if job.codec is not None:
                    outside = clipped_of(grid, job.codec, name, job.max_clipped_share)
                n_atoms, n_electrons = len(grid.atomic_numbers), round(grid.electron_count, 4)
                surveyed = Surveyed(name, grid.grid_shape, n_atoms, n_electrons, grid.clipped_voxels, outside)
                crystal = Crystal.of(grid)
                if job.relative and job.promolecule is not None:
                    job.promolecule.checked_elements(crystal)
                if promolecule is not None:
                    promolecule.add(grid)
                if histogram is not None:
                    histogram.add(grid.rho)
                found.append(surveyed)
                crystals.append(crystal)
            except RetryableError:
                raise
            except MemoryError as error:
                raise TomatError(
                    f"Memory ran out while {name} ({material.location}) was surveyed: {error}. Use fewer --workers, or "
                    "leave this material out; the same command goes on where it stopped."
                ) from error
            except TomatError as error:
                skipped.append((name, str(error)))
            # Damage that a reader let pass can surface in any step. It skips this material and does not end the run.
            except Exception as error:
                skipped.append((name, f"{material.location}: {type(error).__name__}: {error}"))
    return Findings(UnitSurvey(tuple(found), tuple(skipped)), Structures.of(crystals), histogram, promolecule)


def survey_unit(job: ShardJob, unit: SurveyUnit) -> int:
    """Survey the materials of a unit, and leave the findings in the output. Returns the number of materials."""
    found = look_at(job, unit)
    store = Store(job.output, job.storage_tries)
    store.write(unit.part(STRUCTURES), found.structures.to_bytes())
    if found.promolecule is not None:
        store.write(unit.part(SUMS), found.promolecule.to_bytes())
    if found.histogram is not None:
        store.write(unit.part(HISTOGRAM), found.histogram.to_bytes())
    # Written last: the record says that the other objects are there.
    store.write(unit.part(RECORD), json.dumps(with_checksum(asdict(found.survey)), sort_keys=True).encode())
    return len(unit.materials)


def unit_survey(store: Store, unit: SurveyUnit) -> UnitSurvey:
    content = store.read(unit.part(RECORD))
    source = store.url + unit.part(RECORD)
    if content is None:
        raise TomatError(f"{source} is gone although its unit was surveyed. Run the command again.")
    again = "Remove this file and run the same command again; it surveys its materials again."
    values, checked = parse_checked(content, source, "the survey of some materials", again)
    if not checked:
        raise TomatError(f"{source} is damaged: it has no checksum. {again}")
    found = typed(values, UnitSurvey, source, again)
    names = [each.material_id for each in found.materials] + [name for name, _ in found.skipped]
    if sorted(names) != sorted(each.material_id for each in unit.materials):
        raise TomatError(f"{source} is damaged: its materials are not those of its unit. {again}")
    return found


def stored_findings(job: ShardJob, store: Store, unit: SurveyUnit, survey: UnitSurvey) -> Findings:
    """What `survey_unit` found in a unit, whose record is read already."""
    again = f"Remove {store.url}{unit.part(RECORD)} and run the same command again; it surveys these materials again."

    def part(name: str) -> tuple[bytes, str]:
        if (content := store.read(name)) is None:
            raise TomatError(f"{store.url}{name} is gone. {again}")
        return content, store.url + name

    names = [material.material_id for material in survey.materials]
    structures = Structures.from_bytes(*part(unit.part(STRUCTURES)), names, again)
    histogram = promolecule = None
    if job.counts_densities:
        histogram = DensityHistogram.from_bytes(*part(unit.part(HISTOGRAM)), again)
    if job.fits_promolecule:
        promolecule = PromoleculeFit.from_bytes(*part(unit.part(SUMS)), again)
    return Findings(survey, structures, histogram, promolecule)


def count_ratios(job: ShardJob, unit: SurveyUnit) -> int:
    """Count the ratios of a unit's materials to the promolecule of the job, and leave them in the output. Returns the
    number of materials."""
    assert job.promolecule is not None  # the driver gives the job one
    histogram = RatioHistogram(job.promolecule)
    with reading(unit.materials, job.storage_tries) as read:
        for material in unit.materials:
            histogram.add_grid(planned(read)(material.material_id), material.material_id)
    Store(job.output, job.storage_tries).write(unit.part(RATIOS), histogram.to_bytes())
    return len(unit.materials)


def counted_ratios(job: ShardJob, store: Store, unit: SurveyUnit) -> RatioHistogram | None:
    """The ratios that `count_ratios` left; None: none, or of other materials, or to another promolecule."""
    assert job.promolecule is not None
    if (content := store.read(unit.part(RATIOS))) is None:
        return None
    try:
        found = RatioHistogram.from_bytes(content, store.url + unit.part(RATIOS), job.promolecule, OFFSET_E_PER_A3, "")
    except TomatError:  # of a survey that has changed since, or damaged: counted again
        return None
    return found if found.material_ids == {each.material_id for each in unit.materials} else None


def plan_set(
    job: ShardJob, findings: Iterable[Findings]
) -> tuple[ShardManifest, DensityCodec, Structures, Promolecule | None]:
    """Fit codec and promolecule, unless given, to the findings of all units in their order; lay out the rows. Returns
    what `start_shards` takes."""
    histogram, sums = DensityHistogram(), PromoleculeFit()
    found: list[Surveyed] = []
    skipped: list[SkippedMaterial] = []
    crystals: list[Crystal] = []
    for each in findings:
        found += each.survey.materials
        skipped += [SkippedMaterial(*item) for item in each.survey.skipped]
        crystals += each.structures
        if each.histogram is not None:
            histogram.merge(each.histogram)
        if each.promolecule is not None:
            sums.merge(each.promolecule)
    codec = job.codec if job.codec is not None else fit_codec(histogram, job.bins, job.objective)
    promolecule = sums.solve() if job.fits_promolecule else job.promolecule
    structures = Structures.of(crystals)
    plan = job.plan(
        [(each.material_id, each.grid_shape) for each in found],
        codec,
        skipped=skipped,
        clipped=[each.outside_codec for each in found if each.outside_codec is not None and each.outside_codec.voxels],
        structures_sha256=structures.sha256,
        promolecule_sha256=promolecule and promolecule.sha256,
    )
    return plan, codec, structures, promolecule


def write_units(plan: ShardManifest, materials: Sequence[Material], missing: Sequence[int]) -> list[WriteUnit]:
    """The chunks that are missing, in units whose materials lie together, so that few are read twice."""
    by_id = {material.material_id: material for material in materials}
    per_chunk = max(plan.block_rows / plan.patches_per_material, 1)
    size = max(int(unit_size(len(plan.materials)) / per_chunk), 1)
    units = []
    for chunks in itertools.batched(missing, size):
        names: dict[str, None] = {}
        for chunk in chunks:
            first_row, stop_row = plan.chunk_rows(chunk)
            first, last = plan.material_indices(np.array([first_row, stop_row - 1])).tolist()
            names |= dict.fromkeys(entry.material_id for entry in plan.materials[first : last + 1])
        units.append(WriteUnit(chunks, tuple(by_id[name] for name in names)))
    return units


def missing_chunks(store: Store, plan: ShardManifest, *, read: bool = False) -> list[int]:
    """The chunks without a record or object: two listings. With `read` also those that are damaged."""
    if plan.complete:
        return []
    records = set(store.names(PROGRESS_PREFIX))
    objects = set(store.names(f"{ARRAY_NAME}/c/"))
    return [
        chunk
        for chunk in range(plan.n_chunks)
        if record_name(chunk) not in records
        or f"{chunk}/0" not in objects
        or (read and not chunk_is_written(store, plan, chunk))
    ]


@lru_cache(maxsize=2)
def _open_set(output: str, tries: int, plan_sha256: str) -> tuple[Store, ShardManifest, DensityCodec, Any]:
    """Store, plan, codec and array, read once per process. The hash keeps it from using those of an older set."""
    store = Store(output, tries)
    content = store.read(MANIFEST_NAME)
    if content is None or hashlib.sha256(content).hexdigest() != plan_sha256:
        raise TomatError(f"The plan in {store.url} has gone or changed while it was carried out. Start again.")
    plan = parse_manifest(content, store.url + MANIFEST_NAME)
    return store, plan, stored_codec(store, plan), store.open_array()


def write_unit(output: str, tries: int, plan_sha256: str, unit: WriteUnit) -> int:
    """Write a unit's chunks, each with its record; finished ones again with the same bytes. Returns how many rows."""
    store, plan, codec, array = _open_set(output, tries, plan_sha256)
    written = 0
    with reading(unit.materials, tries) as read, ChunkWriter(store, plan, array) as writer:
        for chunk in unit.chunks:
            rows = chunk_tokens(plan, chunk, planned(read), codec)
            writer.write(chunk, rows)
            written += len(rows)
    return written


def unit_writer(store: Store, tries: int) -> Callable[[WriteUnit], int]:
    """`write_unit` for the set whose plan is in place; picklable."""
    plan_sha256 = hashlib.sha256(store.read(MANIFEST_NAME) or b"").hexdigest()
    return partial(write_unit, store.url, tries, plan_sha256)


@contextmanager
def reading(materials: Sequence[Material], tries: int) -> Iterator[Callable[[str], DensityGrid]]:
    """A function that reads materials by name, best in the order given. The last two stay in memory, since a chunk may
    end inside a material; from a bucket the next one is fetched meanwhile, so that three grids of 448 x 448 x 110 stay
    far below a gigabyte."""
    order = {material.material_id: index for index, material in enumerate(materials)}
    ahead: dict[int, Future[DensityGrid]] = {}
    with ThreadPoolExecutor(1) as executor:

        @lru_cache(maxsize=2)
        def read(material_id: str) -> DensityGrid:
            index = order[material_id]
            future = ahead.pop(index, None)
            following = index + 1
            if following < len(materials) and "://" in materials[following].location and following not in ahead:
                ahead.clear()
                ahead[following] = executor.submit(materials[following].read, tries)
            return materials[index].read(tries) if future is None else future.result()

        yield read
