"""The driver of re-tokenising: takes the stages in order, hands units to a runner, decides whether to go on.

It holds no state: everything that is finished is in the output, so that a driver that is killed and started again finds
it there.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from tomat.base.checked_json import parse_checked, refuse_unknown_keys, with_checksum
from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.regions import check_regions, known_places
from tomat.base.reporting import console, counted
from tomat.base.storage import ARRAY_NAME, MANIFEST_NAME, Store
from tomat.data.codec.base import DensityCodec
from tomat.data.density.promolecule import Promolecule
from tomat.data.tokens.manifest import ShardManifest, SkippedMaterial, lined_json, plan_rows
from tomat.data.tokens.patch import check_codec
from tomat.data.tokens.pipeline.config import RetokenizeConfig
from tomat.data.tokens.pipeline.sources import Material, find_materials
from tomat.data.tokens.pipeline.stages import (
    SURVEY_PREFIX,
    SurveyUnit,
    UnitSurvey,
    codec_before_survey,
    fit_codec,
    fit_promolecule,
    gather_structures,
    missing_chunks,
    promolecule_before_survey,
    request_identity,
    survey_unit,
    survey_units,
    write_unit,
    write_units,
)
from tomat.data.tokens.structures import Structures
from tomat.data.tokens.writer import check_planned_promolecule, finalise, read_plan, start_shards, stored_codec

REQUEST_NAME = "request.json"
"""What the set was asked to be; the first object that is written, and kept."""
SURVEY_NAME = "survey.json"
"""Grid, atoms and electron count of every material, and why others were skipped; kept."""
REASONS_SHOWN = 5


class Runner(Protocol):
    """Runs the units of a stage: a process pool, or Zephyr."""

    def run[Unit](self, function: Callable[[Unit], int], units: Sequence[Unit], on_done: Callable[[int], None]) -> None:
        """Call `function` for every unit, in any order, anywhere.

        Args:
            function: picklable; leaves its result in the output and returns how many items were done.
            units: picklable.
            on_done: called in the driver with the number of items of a finished unit.

        Raises:
            TomatError: what a unit raised, or that workers died again and again. Finished units stay finished.
        """
        ...


@dataclass(frozen=True)
class RetokenizeResult:
    """What a run did."""

    manifest: ShardManifest
    surveyed: int
    """Materials surveyed by this run; those surveyed before it do not count."""
    rows_written: int
    """Rows written by this run."""
    survey_seconds: float
    write_seconds: float


def retokenize(config: RetokenizeConfig, runner: Runner, *, allow_cross_region: bool = False) -> RetokenizeResult:
    """Write a shard set, or finish one.

    Raises:
        TomatError: if input, output and worker are in different regions and that is not allowed; input or output cannot
            be reached; the output holds another set; too many materials are skipped; or nothing can be tokenised.
    """
    store = Store(config.output, config.storage_tries)
    # Also finds out whether the output can be reached, before anything is listed or read.
    started = store.read(REQUEST_NAME)
    places = {"input": config.input, "output": config.output}
    if message := check_regions(known_places(places, "worker"), allow_cross_region):
        console.print(message)
    materials = find_materials(config)
    check_request(config, store, started, materials)
    plan = read_plan(store)
    surveyed, survey_seconds = 0, 0.0
    if plan is not None:
        check_planned_promolecule(store, plan, config.promolecule is not None)
    if plan is None:
        began = time.monotonic()
        plan, codec, structures, promolecule, surveyed = _survey_and_plan(config, store, materials, runner)
        survey_seconds = time.monotonic() - began
        start_shards(store, plan, codec, structures, promolecule)
    elif not plan.complete:
        start_shards(store, plan, stored_codec(store))
    began = time.monotonic()
    rows = _write(config, store, plan, materials, runner)
    manifest = finalise(store)
    store.delete(SURVEY_PREFIX)
    return RetokenizeResult(manifest, surveyed, rows, survey_seconds, time.monotonic() - began)


def check_request(config: RetokenizeConfig, store: Store, started: bytes | None, materials: Sequence[Material]) -> None:
    """Check that the output is empty or holds the set of this request; write the request into an empty one.

    Raises:
        TomatError: if it holds another set, or something else.
    """
    codec_sha256 = None
    if config.codec is not None:
        codec = codec_before_survey(config)
        check_codec(config.sequence_layout, codec)
        codec_sha256 = codec.sha256
    promolecule = promolecule_before_survey(config)
    promolecule_sha256 = promolecule and promolecule.sha256
    # By way of JSON, so that tuples and lists compare equal.
    wanted = json.loads(json.dumps(request_identity(config, materials, codec_sha256, promolecule_sha256)))
    if started is not None:
        again = f"Remove {store.url} and start again."
        try:
            found = request_content(started, store.url + REQUEST_NAME, again)["identity"]
            # A set that was begun before voxels outside the codec were counted, or there were promolecules, goes on.
            found = {key: wanted[key] for key in ("max_clipped_share", "promolecule")} | found
            found = {key: value for key, value in found.items() if key not in rules_without_use(config.source)}
            differing = sorted(key for key in wanted | found if wanted.get(key) != found.get(key))
        except (KeyError, TypeError, AttributeError) as error:
            raise TomatError(
                f"{store.url}{REQUEST_NAME} is damaged ({type(error).__name__}: {error}). {again}"
            ) from error
        if differing:
            raise TomatError(
                f"{store.url} holds another data set: it differs in {', '.join(differing)}. Remove it, or choose "
                "another place."
            )
        return
    if store.read(MANIFEST_NAME) is not None or store.names(f"{ARRAY_NAME}/"):
        raise TomatError(
            f"{store.url} holds a data set that `tomat retokenize` did not write. Remove it, or choose another place."
        )
    # Where the set lies and how patient its writer was say nothing about it.
    source = {key: getattr(config, key) for key in ("source", "input", "filelist", "split_file")}
    source |= {key: list(getattr(config, key)) for key in ("species", "accept") if getattr(config, key)}
    content = with_checksum({"identity": wanted, "source": source})
    store.write(REQUEST_NAME, (json.dumps(content, sort_keys=True, indent=1) + "\n").encode())


def rules_without_use(source: str | None) -> tuple[str, ...]:
    """The settings of `ReadRules` that do nothing for a source; older requests may have them."""
    return {"chgcar": (), "folder": (), "embedded": ("species", "accept")}.get(source or "", ("species",))


def request_content(content: bytes, source: str, remedy: str) -> dict[str, Any]:
    """What a request says.

    Raises:
        TomatError: if it is damaged; ends with the remedy.
    """
    values, checked = parse_checked(content, source, "the request of a shard set", remedy)
    if not checked:
        refuse_unknown_keys(values, frozenset({"identity", "source"}), source, remedy)
    return values


def _survey_and_plan(
    config: RetokenizeConfig, store: Store, materials: Sequence[Material], runner: Runner
) -> tuple[ShardManifest, DensityCodec, Structures, Promolecule | None, int]:
    """Survey what is not surveyed, refuse if too much is skipped, fit, and lay out the rows.

    Returns:
        Plan, codec, structures and promolecule, and the number of materials that were surveyed.
    """
    units = survey_units(materials)
    records = set(store.names(SURVEY_PREFIX))
    findings = {
        unit.index: _finding(store, unit) for unit in units if unit.record.removeprefix(SURVEY_PREFIX) in records
    }
    # A unit with skipped materials is looked at again: they may have been repaired since. So is an older one, in which
    # voxels outside the codec were not counted, or which left no structures and sums.
    left = [
        unit
        for unit in units
        if any(name.removeprefix(SURVEY_PREFIX) not in records for name in unit.parts(config))
        or findings[unit.index].skipped
        or not (config.fits_codec or all(each.outside_codec for each in findings[unit.index].materials))
    ]
    _run_with_bar(
        runner,
        partial(survey_unit, config),
        left,
        "Surveying materials",
        "materials/s",
        total=len(materials),
        done=len(materials) - sum(len(unit.materials) for unit in left),
    )
    findings |= {unit.index: _finding(store, unit) for unit in left}
    found = [material for unit in units for material in findings[unit.index].materials]
    skipped = [SkippedMaterial(*item) for unit in units for item in findings[unit.index].skipped]
    check_skipped(skipped, len(materials), config.n_skipped_allowed(len(materials)), store.url)
    if config.fits_codec:
        console.print(f"Fitting {config.bins:,} bins")
    codec = fit_codec(config, store, units)
    structures = gather_structures(store, units, findings)
    promolecule = fit_promolecule(config, store, units)
    plan = plan_rows(
        [(material.material_id, material.grid_shape) for material in found],
        layout=config.sequence_layout,
        codec=codec,
        patches_per_material=config.patches_per_material,
        seed=config.seed,
        split=config.split,
        skipped=skipped,
        block_rows=config.block_rows,
        clipped=[each.outside_codec for each in found if each.outside_codec is not None and each.outside_codec.voxels],
        max_clipped_share=config.max_clipped_share,
        structures_sha256=structures.sha256,
        promolecule_sha256=promolecule and promolecule.sha256,
    )
    store.write(SURVEY_NAME, lined_json({"materials": tuple(asdict(material) for material in found)}).encode())
    return plan, codec, structures, promolecule, sum(len(unit.materials) for unit in left)


def check_skipped(skipped: Sequence[SkippedMaterial], n_materials: int, allowed: int, url: str) -> None:
    """Refuse to go on with too many materials skipped.

    Raises:
        TomatError: with how many, and the first reasons.
    """
    if len(skipped) > allowed:
        shown = "; ".join(f"{each.material_id}: {each.reason}" for each in skipped[:REASONS_SHOWN])
        more = f"; and {len(skipped) - REASONS_SHOWN} more" if len(skipped) > REASONS_SHOWN else ""
        raise TomatError(
            f"{len(skipped)} of {counted(n_materials, 'material')} would be skipped, more than the {allowed} that "
            f"max_skipped allows: {shown}{more}. Repair them, or raise --max_skipped; the same command then "
            f"goes on ({url} keeps what was surveyed)."
        )


def _finding(store: Store, unit: SurveyUnit) -> UnitSurvey:
    content = store.read(unit.record)
    if content is None:
        raise TomatError(f"{store.url}{unit.record} is gone although its unit was surveyed. Run the command again.")
    return UnitSurvey.from_bytes(content, unit, store.url + unit.record)


def _write(
    config: RetokenizeConfig, store: Store, plan: ShardManifest, materials: Sequence[Material], runner: Runner
) -> int:
    """Write the chunks that are missing; the number of their rows."""
    units = write_units(plan, materials, missing_chunks(store, plan))
    spans = [plan.chunk_rows(chunk) for unit in units for chunk in unit.chunks]
    rows = sum(stop - start for start, stop in spans)
    _run_with_bar(
        runner,
        partial(write_unit, config, plan.codec_sha256),
        units,
        "Writing rows",
        "rows/s",
        total=plan.rows,
        done=plan.rows - rows,
    )
    return rows


def _run_with_bar(
    runner: Runner,
    function: Callable[[Any], int],
    units: Sequence[Any],
    what: str,
    rate_unit: str,
    *,
    total: int,
    done: int,
) -> None:
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
            bar.update(task, advance=count, rate=f"{rate:,.1f} {rate_unit}")

        runner.run(function, units, on_done)


def skipped_by_reason(manifest: ShardManifest) -> list[tuple[str, int]]:
    """How often each kind of reason occurs, without the names and numbers in it, most frequent first."""
    kinds = Counter(
        " ".join(word for word in entry.reason.split(":")[-1].split() if not any(c.isdigit() for c in word))
        for entry in manifest.skipped
    )
    return kinds.most_common()
