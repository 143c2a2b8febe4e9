"""The pages of ``docs/tracking``: one page for each run or plan, and the table of all of them.

``<run>.md`` has hand-written parts (hypothesis, verdict, next) and tomat's sections between markers;
``data/<run>.json`` is the row of the index and the configuration that later pages are diffed against; ``figures/``
holds the SVGs. Pages that are not made again lie in ``archive/``. Everything is written from the arguments and no
clock is read, so writing twice changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Required, TypedDict, get_args

from msgspec import Meta

from tomat.base.documents import flatten
from tomat.base.errors import TomatError
from tomat.base.layout import ARCHIVE_DIR, CONFIG_FILE, DATA_DIR, FIGURES_DIR, INDEX_FILE, RUN_NAME, SWEEPS_DIR
from tomat.base.overrides import read_yaml
from tomat.base.records import Amount, Count, read_typed
from tomat.base.report.document import find_sections, read_document, section_text, write_if_changed
from tomat.base.report.formats import UNKNOWN, percent, quantity, seconds
from tomat.base.report.markdown import update_page
from tomat.base.report.model import Cell, Code, Column, Facts, Items, Link, Part, Report, Section, Table, columns
from tomat.base.reporting import dump_json
from tomat.hardware.mfu import MFU_KEYS, TABLE_UTILISATIONS
from tomat.perf.profile.breakdown import Breakdown
from tomat.report import step
from tomat.report.mfu import mfu_parts
from tomat.train.runs.former_keys import former_key

RECORD_FORMAT = 1
Kind = Literal["measured", "predicted", "reference"]
KINDS = get_args(Kind)
RECORD_MFU_KEYS = (*MFU_KEYS, "tokens_per_second_per_chip", "untimed_step_share")

TOP_OPERATIONS = 20
NO_PROFILE = "No profile was taken."
NO_BUFFERS = (
    "How much HBM the step holds is not known, without XLA's buffer assignment. `tomat plan` lists it; the "
    "`*after_optimizations.hlo.pb` of `--xla_dump_to=DIR --xla_dump_hlo_as_proto` has it; `enable_hlo_proto` puts it "
    "into a trace, where the backend gives it."
)

INTRODUCTION = """This page lists every run, plan and reference figure on record. tomat rewrites the table; a run's
verdict is the first line under `## Verdict` of its page. MFU is the share of the slice's peak that the products of a
step reach: *full* counts every query against every key, *causal* the pairs that the mask leaves, *useful* leaves out
padding and logits without a loss, *HFU* counts all that the program multiplies. *Without timings* is the share of a
planned step that rests on kernels never timed on such a chip (–: planned before this was kept)."""


def write_run_page(
    run_dir: Path,
    docs_dir: Path,
    breakdown: Breakdown | None,
    mfu_report: Mapping[str, Any] | None = None,
    *,
    run_name: str | None = None,
    baseline: str | None = None,
    commit: str = "",
    date: str = "",
    config_hash: str = "",
    kind: str = "measured",
) -> Path:
    """Write or update the page of one run, its figures, its record and the index in a tracking folder. If the markers
    of the page or the index are broken, nothing is written.

    `config.yaml` in the run's folder is the setup, which a plan or a foreign trace may lack. `mfu_report` comes from
    `step_report` or `run_report` (`hardware/mfu.py`). `baseline` is a run in `docs_dir` to diff the configuration
    against. `kind` is one of `KINDS`. Without `run_name` the run has the name of its folder. A commit, date or
    `config_hash` that is not given stays what the page on record says, if that is of the same configuration.
    """
    name = run_name or Path(run_dir).name
    if not RUN_NAME.match(name):
        raise TomatError(f"run name is {name!r}; expected letters, digits, '.', '_' and '-', since it names files.")
    config_file = Path(run_dir) / CONFIG_FILE
    settings = flatten(read_yaml(config_file, "train")) if config_file.exists() else {}
    base = read_record(docs_dir, baseline) if baseline else None
    mfu, index = mfu_report or {}, docs_dir / INDEX_FILE
    made_by = {"commit": commit, "date": date, "config_hash": config_hash}
    if not all(made_by.values()) and (docs_dir / DATA_DIR / f"{name}.json").exists():
        before = read_record(docs_dir, name)
        if before["config"] == settings:
            made_by = {key: given or before.get(key) or "" for key, given in made_by.items()}
    record: dict[str, Any] = {"record_format": RECORD_FORMAT, "run": name, "kind": kind}
    if kind == "measured":  # the slice that was asked for may differ from the one that ran
        record |= {key: mfu.get(key) for key in ("slice", "devices_that_ran")} | {"asked_slice": settings.get("slice")}
    else:
        record["slice"] = mfu.get("slice") or settings.get("slice")
    largest = max(breakdown.categories, key=lambda r: r.seconds, default=None) if breakdown else None
    record |= {
        **made_by,
        "model": settings.get("preset"),
        "batch_sequences": mfu.get("batch_sequences") or settings.get("trainer.train_batch_size"),
        "sequence_tokens": mfu.get("sequence_tokens") or settings.get("data.seq_len"),
        "step_seconds": mfu.get("step_seconds") or (breakdown.step_seconds if breakdown else None),
        **{key: mfu.get(key) for key in RECORD_MFU_KEYS},
        "largest_category": largest.name if largest else None,
        "largest_category_share": largest.share if largest else None,
        "config": settings,
    }
    if index.exists():  # before anything is written
        find_sections(read_document(index), str(index))

    def results(heading: str, marker: str, parts: Sequence[Part]) -> Section:
        return Section(heading, parts, marker, level=3, owns_heading=True)

    memory: list[Part] = [NO_PROFILE]
    cycles = operations = memory
    if breakdown is not None:
        memory, cycles = [memory_part(breakdown)], breakdown_parts(breakdown, name)
        operations = operations_parts(breakdown)
    # The sections that people write are included too, each with a comment that says what belongs there.
    why = "<!-- Why this run: what is expected to change, by how much, and why. -->"
    verdict = "<!-- What it showed, with the figure that decides it. Negative results stay. -->"
    sections = (
        Section("Hypothesis", by_hand=why),
        Section("Setup", [setup_facts(record, breakdown)], "setup"),
        Section("", [differences(settings, base)], "differences"),
        Section("Results"),
        results("MFU", "mfu", mfu_parts(mfu_report)),
        results("HBM", "memory", memory),
        results("Where the cycles went", "breakdown", cycles),
        results("Top operations", "operations", operations),
        Section("Verdict", by_hand=verdict),
        Section("Next", by_hand="<!-- What to try because of it. -->"),
    )
    page = update_page(docs_dir / f"{name}.md", Report(name, sections), docs_dir / FIGURES_DIR)
    write_if_changed(docs_dir / DATA_DIR / f"{name}.json", dump_json(record))
    write_index(docs_dir)
    return page


def setup_facts(record: Mapping[str, Any], breakdown: Breakdown | None) -> Facts:
    asked, batch, length = record.get("asked_slice"), record["batch_sequences"], record["sequence_tokens"]
    rows: dict[str, Cell] = {
        "kind": str(record["kind"]),
        "commit": Code(record["commit"]) if record["commit"] else UNKNOWN,
        "date": record["date"] or UNKNOWN,
        "configuration": Code(record["config_hash"]) if record["config_hash"] else UNKNOWN,
        "slice": str(record["slice"] or UNKNOWN),
        "slice that was asked for": None if asked == record["slice"] else asked,
        "ran on": record.get("devices_that_ran"),
        "batch": f"{batch} sequences of {length} tokens" if batch and length else None,
    }
    if breakdown is not None:
        roofs = breakdown.roofs
        flops, hbm = quantity(roofs.peak_flops_per_second, "FLOP/s"), quantity(roofs.peak_hbm_bytes_per_second, "B/s")
        stated = " (as the trace states them)" if roofs.stated_by_trace else ""
        peaks = f"{flops} bf16, {hbm} HBM, {quantity(roofs.clock_hz, 'Hz')}{stated}"
        known = roofs.peak_flops_per_second or roofs.peak_hbm_bytes_per_second
        rows["device"] = f"{roofs.device_kind or 'unknown'}, {breakdown.n_devices} on {breakdown.n_hosts} host(s)"
        rows["profile"] = f"{breakdown.title}, {breakdown.source}, mean of {breakdown.n_steps} step(s)"
        rows["peaks of a device"] = peaks if known else "not in the table of chips"
    return Facts(rows)


def differences(config: Mapping[str, Any], base: Mapping[str, Any] | None) -> Part:
    if base is None:
        return "No baseline was named."
    old, name = base["config"], base["run"]
    changed = sorted(k for k in {*old, *config} if old.get(k, UNKNOWN) != config.get(k, UNKNOWN) and not former_key(k))
    if not changed:
        return f"The same configuration as `{name}`."
    rows = [(Code(key), *(Code(str(one.get(key, UNKNOWN))) for one in (old, config))) for key in changed]
    return Table("", columns("setting", name, "this run"), rows)


def memory_part(breakdown: Breakdown) -> Part:
    return step.memory_table(breakdown) if breakdown.memory_bytes else NO_BUFFERS


def breakdown_parts(breakdown: Breakdown, stem: str) -> list[Part]:
    """Where the cycles of a step went. The names of the charts' files begin with `stem`."""
    parts: list[Part] = [
        f"One step of one device, {seconds(breakdown.step_seconds)}. Time is exclusive, so the shares sum to the step; "
        "hidden is communication beside compute, in no sum.",
        step.groups_table(breakdown.categories, "category"),
        *step.step_charts(breakdown, stem),
        "By part of the model:",
        step.groups_table(breakdown.parts, "part"),
    ]
    parts += [step.windows_table(breakdown)] if breakdown.step_classes else []
    parts += [step.waits_table(breakdown)] if breakdown.gaps else []
    notes = step.step_notes(breakdown)
    return [*parts, "Notes:", Items(notes)] if notes else parts


def operations_parts(breakdown: Breakdown) -> list[Part]:
    found = step.operations_table(breakdown, TOP_OPERATIONS)
    heads = [column.heading for column in found.columns if column.heading not in ("HBM bytes", "flops", "scope")]
    return [f"{found.caption}.", found.chosen(*heads)]


class Record(TypedDict, total=False):
    """The keys of `data/<run>.json` that are read back; an older file may lack some. It has no checksum, so damage that
    turns one number into another is not noticed."""

    run: Required[Annotated[str, Meta(pattern=RUN_NAME.pattern)]]
    kind: Required[Kind]
    commit: Required[str]
    config_hash: Required[str]
    config: Required[dict[str, Any]]
    date: str | None
    verdict: str | None
    page: str | None
    slice: str | None
    asked_slice: str | None
    model: str | None
    batch_sequences: Count | None
    sequence_tokens: Count | None
    step_seconds: Amount | None
    mfu_full: Amount | None
    mfu_causal: Amount | None
    mfu_useful: Amount | None
    mfu_levanter: Amount | None
    hfu: Amount | None
    tokens_per_second_per_chip: Amount | None
    untimed_step_share: Amount | None
    largest_category: str | None
    largest_category_share: Amount | None


def write_index(docs_dir: Path) -> Path:
    """The table of all records in `docs_dir/data`, newest first, reference figures last."""
    records = [read_record(docs_dir, path.stem) for path in sorted((docs_dir / DATA_DIR).glob("*.json"))]
    records.sort(key=lambda r: r["run"])
    records.sort(key=lambda r: r.get("date") or "", reverse=True)
    records.sort(key=lambda r: KINDS.index(r["kind"]))
    rows: list[tuple[Cell, ...]] = []
    for record in records:
        name, category = record["run"], record.get("largest_category")
        page = _page_of(docs_dir, record.get("page") or f"{name}.md")
        verdict = record.get("verdict")
        if page.exists() and not verdict:
            verdict = section_text(read_document(page), "Verdict").split("\n")[0]
        figures = "step_seconds", *(one.key for one in TABLE_UTILISATIONS), "untimed_step_share"
        rows.append((
            Link(name, page.relative_to(docs_dir).as_posix()) if page.exists() else name,
            *map(record.get, ("kind", "model", "slice")),
            *(record.get(key) or None for key in ("batch_sequences", "sequence_tokens")),
            *map(record.get, figures),
            f"{category} {percent(record.get('largest_category_share'), 0)}" if category else None,
            verdict or None,
        ))  # fmt: skip
    heads = [*columns("run", "kind", "model", "slice", "batch", "tokens"), Column("step", seconds)]
    heads += columns(*(one.short for one in TABLE_UTILISATIONS), "without timings", show=percent)
    heads += [Column("largest category"), Column("verdict", prose=True)]
    table = Table("", heads, rows) if rows else "No run is on record yet."
    sections = [Section("", by_hand=INTRODUCTION), Section("", [table], "runs")]
    sweeps = []
    for path in sorted((docs_dir / SWEEPS_DIR).glob("*.json")):
        sweep = read_typed(path, SweepEntry, "Delete it and run the sweep again.")
        own = f"{sweep.sweep}-planned.md"  # where its measurements have the page of its name
        page = _page_of(docs_dir, own if (docs_dir / own).exists() else f"{sweep.sweep}.md")
        page = page.relative_to(docs_dir).as_posix()
        n_planned = len(sweep.rows)
        said = str(sweep.n_rows) if n_planned == sweep.n_rows else f"{n_planned} of {sweep.n_rows} planned"
        sweeps.append((Link(sweep.title, page), said, sweep.n_fitting, sweep.ranking[0] if sweep.n_fitting else None))
    if sweeps:
        of_sweeps = Column("sweep"), Column("rows", right=True), Column("fit"), Column("best MFU")
        sections.append(Section("Sweeps", [Table("", of_sweeps, sweeps)], "sweeps", owns_heading=True))
    return update_page(docs_dir / INDEX_FILE, Report("Runs and plans", sections))


@dataclass(frozen=True)
class SweepEntry:
    sweep: str
    title: str
    n_rows: Count
    n_fitting: Count
    ranking: list[str]
    rows: list[Any]

    def __post_init__(self) -> None:
        if self.n_fitting and not self.ranking:
            raise ValueError("expected a ranking where rows fit")


def _page_of(docs_dir: Path, name: str) -> Path:
    """The path of a page, in the archive if only the archive has it."""
    archived = docs_dir / ARCHIVE_DIR / name
    return archived if archived.exists() and not (docs_dir / name).exists() else docs_dir / name


def read_record(docs_dir: Path, name: str) -> Record:
    folder = docs_dir / DATA_DIR
    path = folder / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.json"))) or "none"
        raise TomatError(f"run {name!r} is not on record in {folder}; on record: {known}.")
    remedy = "Delete it and write the run's page again."
    return read_typed(path, Record, remedy, version=("record_format", RECORD_FORMAT))
