"""The driver that makes every shard set from densities. It takes the stages in order, hands units to a runner, and
decides whether to go on. `retokenize` takes a configuration and any number of workers. `write_shards` takes a function
that reads densities, and works in this process. A restarted driver finds all that is finished in the output."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tomat.base.documents import parse_checked, refuse_unknown_keys, with_checksum
from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.regions import check_regions, known_places
from tomat.base.reporting import console, counted, tell
from tomat.base.storage import ARRAY_NAME, MANIFEST_NAME, Store
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.ratios import RatioHistogram, fit_codec
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import PromoleculeFit
from tomat.data.tokens.manifest import ShardManifest, lined_json
from tomat.data.tokens.patch import check_codec
from tomat.data.tokens.pipeline import stages
from tomat.data.tokens.pipeline.config import RetokenizeConfig, ShardJob
from tomat.data.tokens.pipeline.runners import PoolRunner, ZephyrRunner
from tomat.data.tokens.pipeline.sources import Material, find_materials
from tomat.data.tokens.writer import check_same, finalise, read_plan, refuse_differing, start_shards, stored_codec

REQUEST_NAME = "request.json"
"""The request that the set fulfils. It is the first object that is written, and is kept."""
SURVEY_NAME = "survey.json"
"""Grid, atoms and electron count of every material, and why others were skipped; kept."""
REASONS_SHOWN = 5

Runner = PoolRunner | ZephyrRunner


@dataclass(frozen=True)
class WrittenSet:
    """A complete shard set, and what this process did for it."""

    manifest: ShardManifest
    surveyed: int
    """Materials surveyed by this run; those surveyed before it do not count."""
    rows_written: int
    survey_seconds: float
    write_seconds: float


def retokenize(config: RetokenizeConfig, runner: Runner, *, allow_cross_region: bool = False) -> WrittenSet:
    """Write the shard set that a configuration names, or finish it."""
    store = Store(config.output, config.storage_tries)
    # Also finds out whether the output can be reached, before anything is listed or read.
    started = store.read(REQUEST_NAME)
    places = {"input": config.input, "output": config.output}
    if message := check_regions(known_places(places, "worker"), allow_cross_region):
        console.print(message)
    materials = find_materials(config)
    job = ShardJob.of(config)
    if config.codec is not None and job.codec is not None:
        check_codec(job.layout, job.codec)
    check_request(config, job, store, started, materials)
    plan = read_plan(store)
    surveyed = 0
    began = time.monotonic()
    if plan is None:
        plan, surveyed = _survey_in_store(config, job, store, materials, runner)
    else:
        _go_on(job, store, plan)
    begun = time.monotonic()
    rows = _write_rows(job, store, plan, materials, runner, read_again=False)
    written = WrittenSet(finalise(store), surveyed, rows, begun - began, time.monotonic() - begun)
    store.delete(stages.SURVEY_PREFIX)
    return written


def write_shards(
    place: str | Path,
    material_ids: Iterable[str],
    get_grid: Callable[[str], DensityGrid],
    *,
    codec: DensityCodec,
    surveyed: stages.Findings | None = None,
    **settings: Any,
) -> ShardManifest:
    """Tokenize materials into a data set, in this process; goes on where it was stopped. Returns its manifest.

    Every density is read once before the first token is written, unless it is `surveyed` already. So a density that
    cannot be tokenized is skipped, with the reason in the manifest. `settings`: fields of `ShardJob`.
    """
    store, runner = Store(place), PoolRunner(1)
    job = ShardJob(output=store.url, codec=codec, **settings)
    check_codec(job.layout, codec)
    # A chunk boundary inside a material must not read it twice.
    read = lru_cache(maxsize=2)(get_grid)
    materials = [Material(name, f"material {name}", get_grid=read) for name in material_ids]
    plan = read_plan(store)
    found = [] if surveyed is None else [surveyed]

    def look(unit: stages.SurveyUnit) -> int:
        found.append(stages.look_at(job, unit))
        return len(unit.materials)

    if plan is None:
        if surveyed is None:
            _run_with_bar(runner, look, stages.survey_units(materials), "Surveying materials", len(materials))
        plan = start_shards(store, *stages.plan_set(job, found))
    else:
        # The grids are not read yet, and are not part of a set's identity.
        rows = [(material.material_id, (1, 1, 1)) for material in materials]
        wanted = job.plan(rows, codec, promolecule_sha256=job.promolecule and job.promolecule.sha256)
        check_same(store, plan, wanted.identity())
        _go_on(job, store, plan)
    _write_rows(job, store, plan, materials, runner, read_again=True)
    return finalise(store)


def _go_on(job: ShardJob, store: Store, plan: ShardManifest) -> None:
    """Continue a set whose plan is in place."""
    if job.promolecule is not None and plan.promolecule_sha256 is None:
        begun = f"{store.url} was begun without a promolecule"
        raise TomatError(f"{begun}. Leave --promolecule out, or choose another place.")
    if not plan.complete:
        start_shards(store, plan, stored_codec(store, plan) if job.codec is None else job.codec)


def _write_rows(
    job: ShardJob, store: Store, plan: ShardManifest, materials: Sequence[Material], runner: Runner, *, read_again: bool
) -> int:
    """Write missing rows, and with `read_again` damaged rows. Returns how many were written."""
    units = stages.write_units(plan, materials, stages.missing_chunks(store, plan, read=read_again))
    spans = [plan.chunk_rows(chunk) for unit in units for chunk in unit.chunks]
    rows = sum(stop - start for start, stop in spans)
    write = stages.unit_writer(store, job.storage_tries)
    _run_with_bar(runner, write, units, "Writing rows", plan.rows, done=plan.rows - rows)
    return rows


def check_request(
    config: RetokenizeConfig, job: ShardJob, store: Store, started: bytes | None, materials: Sequence[Material]
) -> None:
    """Check that the output is empty or holds the set of this request; write the request into an empty one."""
    # By way of JSON, so that tuples and lists compare equal.
    wanted = json.loads(json.dumps(request_identity(config, job, materials)))
    if started is not None:
        again = f"Remove {store.url} and start again."
        try:
            found = request_content(started, store.url + REQUEST_NAME, again)["identity"]
            # A set that was begun before voxels outside the codec were counted, or there were promolecules, goes on.
            found = {key: wanted[key] for key in ("max_clipped_share", "promolecule")} | found
            found = {key: value for key, value in found.items() if key not in rules_without_use(config.source)}
            differing = sorted(key for key in wanted | found if wanted.get(key) != found.get(key))
        except (KeyError, TypeError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise TomatError(f"{store.url}{REQUEST_NAME} is damaged ({what}). {again}") from error
        refuse_differing(store, differing)
        return
    if store.read(MANIFEST_NAME) is not None or store.names(f"{ARRAY_NAME}/"):
        raise TomatError(
            f"{store.url} holds a data set that `tomat retokenize` did not write. Remove it, or choose another place."
        )
    # The place of the set and the number of tries are not part of the request.
    source = {key: getattr(config, key) for key in ("source", "input", "filelist", "split_file")}
    source |= {key: list(getattr(config, key)) for key in ("species", "accept") if getattr(config, key)}
    content = with_checksum({"identity": wanted, "source": source})
    store.write(REQUEST_NAME, (json.dumps(content, sort_keys=True, indent=1) + "\n").encode())


def rules_without_use(source: str | None) -> tuple[str, ...]:
    """The settings of `ReadRules` that do nothing for a source; older requests may have them."""
    return {"chgcar": (), "folder": (), "embedded": ("species", "accept")}.get(source or "", ("species",))


def request_content(content: bytes, source: str, remedy: str) -> dict[str, Any]:
    values, checked = parse_checked(content, source, "the request of a shard set", remedy)
    if not checked:
        refuse_unknown_keys(values, frozenset({"identity", "source"}), source, remedy)
    return values


def request_identity(config: RetokenizeConfig, job: ShardJob, materials: Sequence[Material]) -> dict[str, Any]:
    """All that decides the bytes of the set; where the densities lie does not."""
    names = "\n".join(material.material_id for material in materials)
    fitted = {"fit": "relative" if config.relative else "lloyd_max", "bins": config.bins, "objective": config.objective}
    return {
        "layout": config.sequence_layout.to_dict(),
        "codec": fitted if config.codec is None or job.codec is None else job.codec.sha256,
        "promolecule": job.promolecule.sha256 if job.promolecule else "fit" if job.fits_promolecule else None,
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


def _survey_in_store(
    config: RetokenizeConfig, job: ShardJob, store: Store, materials: Sequence[Material], runner: Runner
) -> tuple[ShardManifest, int]:
    """Survey what is not surveyed, refuse if too much is skipped, start the set. Returns its plan, how many are new."""
    units = stages.survey_units(materials)
    records = set(store.names(stages.SURVEY_PREFIX))
    surveys = {
        unit.index: stages.unit_survey(store, unit)
        for unit in units
        if unit.part(stages.RECORD).removeprefix(stages.SURVEY_PREFIX) in records
    }
    # A unit with skipped materials is looked at again: they may have been repaired since. So is an older one, in which
    # voxels outside the codec were not counted, or which left no structures and sums.
    left = [
        unit
        for unit in units
        if any(name.removeprefix(stages.SURVEY_PREFIX) not in records for name in unit.parts(job))
        or surveys[unit.index].skipped
        or not (job.codec is None or all(each.outside_codec for each in surveys[unit.index].materials))
    ]
    n = len(materials)
    n_left = sum(len(unit.materials) for unit in left)
    _run_with_bar(runner, partial(stages.survey_unit, job), left, "Surveying materials", n, done=n - n_left)
    surveys |= {unit.index: stages.unit_survey(store, unit) for unit in left}
    skipped = [f"{name}: {reason}" for unit in units for name, reason in surveys[unit.index].skipped]
    allowed = int(config.max_skipped * n) if config.max_skipped < 1 else int(config.max_skipped)
    if len(skipped) > allowed:
        more = f"; and {len(skipped) - REASONS_SHOWN} more" if len(skipped) > REASONS_SHOWN else ""
        raise TomatError(
            f"{len(skipped)} of {counted(n, 'material')} would be skipped, more than the {allowed} that max_skipped "
            f"allows: {'; '.join(skipped[:REASONS_SHOWN])}{more}. Repair them, or raise --max_skipped; the same "
            f"command then goes on ({store.url} keeps what was surveyed)."
        )
    if job.codec is None:
        tell(f"Fitting {config.bins:,} bins")
    if job.relative:
        job = _with_relative_codec(job, store, units, surveys, runner)
    planned = stages.plan_set(job, (stages.stored_findings(job, store, unit, surveys[unit.index]) for unit in units))
    found = tuple(asdict(material) for unit in units for material in surveys[unit.index].materials)
    store.write(SURVEY_NAME, lined_json({"materials": found}).encode())
    return start_shards(store, *planned), n_left


def _with_relative_codec(
    job: ShardJob,
    store: Store,
    units: Sequence[stages.SurveyUnit],
    surveys: Mapping[int, stages.UnitSurvey],
    runner: Runner,
) -> ShardJob:
    """The job with a codec relative to its promolecule. The promolecule is fitted first if none was given."""
    promolecule = job.promolecule
    if promolecule is None:
        sums = PromoleculeFit()
        for unit in units:
            found = stages.stored_findings(job, store, unit, surveys[unit.index]).promolecule
            assert found is not None  # the job fits one
            sums.merge(found)
        promolecule = sums.solve()
    job = replace(job, promolecule=promolecule, fits_promolecule=False)
    kept = [{each.material_id for each in surveys[unit.index].materials} for unit in units]
    taken = [
        stages.SurveyUnit(unit.index, tuple(each for each in unit.materials if each.material_id in names))
        for unit, names in zip(units, kept, strict=True)
        if names
    ]
    left = [unit for unit in taken if stages.counted_ratios(job, store, unit) is None]
    n, n_left = (sum(len(unit.materials) for unit in some) for some in (taken, left))
    _run_with_bar(runner, partial(stages.count_ratios, job), left, "Counting materials", n, done=n - n_left)
    histogram = RatioHistogram(promolecule)
    for unit in taken:
        if (found := stages.counted_ratios(job, store, unit)) is None:
            raise TomatError(f"{store.url}{unit.part(stages.RATIOS)} is gone or damaged. Run the command again.")
        histogram.merge(found)
    return replace(job, codec=fit_codec(histogram, job.bins, job.objective))


def _run_with_bar(
    runner: Runner, function: Callable[[Any], int], units: Sequence[Any], what: str, total: int, done: int = 0
) -> None:
    """Run units with a progress bar. `what`: two words; the second names what the bar counts."""
    if not units:
        return
    began = time.monotonic()
    finished = 0
    with progress(rate="{task.fields[rate]}") as bar:
        task = bar.add_task(what, total=total, completed=done, rate="")

        def on_done(count: int) -> None:
            nonlocal finished
            finished += count
            rate = finished / max(time.monotonic() - began, 1e-9)
            bar.update(task, advance=count, rate=f"{rate:,.1f} {what.split()[-1]}/s")

        runner.run(function, units, on_done)


def skipped_by_reason(manifest: ShardManifest) -> list[tuple[str, int]]:
    """How often each kind of reason occurs, without the names and numbers in it, most frequent first."""
    kinds = Counter(
        " ".join(word for word in entry.reason.split(":")[-1].split() if not any(c.isdigit() for c in word))
        for entry in manifest.skipped
    )
    return kinds.most_common()
