"""The pages of ``docs/tracking``: one a run or plan, and the table of all of them.

``<run>.md`` has hand-written parts (hypothesis, verdict, next) and tomat's sections between markers;
``data/<run>.json`` is the row of the index and the configuration that later pages are diffed against; ``figures/``
holds the SVGs. Pages that are not made again lie in ``archive/``. Everything is written from what is passed in: no
clock is read, so writing twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args

from msgspec import Meta

from tomat.base.documents import flatten
from tomat.base.errors import TomatError
from tomat.base.layout import ARCHIVE_DIR, CONFIG_FILE, DATA_DIR, FIGURES_DIR, INDEX_FILE, RUN_NAME, SWEEPS_DIR
from tomat.base.overrides import read_yaml
from tomat.base.records import Amount, Count, read_typed
from tomat.base.report.document import find_sections, read_document, section_text, write_if_changed
from tomat.base.report.formats import percent, seconds
from tomat.base.report.markdown import update_page
from tomat.base.report.model import Cell, Column, Link, Part, Report, Section, Table
from tomat.base.reporting import dump_json
from tomat.hardware.mfu import MFU_KEYS, TABLE_UTILISATIONS
from tomat.perf.profile.breakdown import Breakdown
from tomat.report.pages.page_sections import (
    breakdown_parts,
    differences,
    memory_part,
    mfu_parts,
    operations_parts,
    setup_facts,
)

RECORD_FORMAT = 1
Kind = Literal["measured", "predicted", "reference"]
KINDS = get_args(Kind)
RECORD_MFU_KEYS = (*MFU_KEYS, "tokens_per_second_per_chip", "untimed_step_share")

INTRODUCTION = """Every run, plan and reference figure on record. tomat rewrites the table; a run's verdict is the first
line under `## Verdict` of its page. MFU is a share of the slice's peak for what is multiplied: *full* counts every
query against every key, *causal* the pairs the mask leaves, *useful* no padding and no logits without a loss, *HFU*
what the program multiplies. *Without timings* is the share of a planned step that rests on kernels which no chip of its
kind has timed (–: planned before that was kept)."""


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
    """Write (or bring up to date) the page of one run, its figures, its record and the index; nothing where the markers
    of one of them are broken.

    Args:
        run_dir: The run's folder; `config.yaml` in it is the setup. It may lack one (a plan, a foreign trace).
        docs_dir: The tracking folder, such as `docs/tracking`.
        breakdown: Of its profile; None leaves those sections saying that there was none.
        mfu_report: Of `step_report` or `run_report` (`hardware/mfu.py`).
        run_name: Default: the folder's name.
        baseline: Name of a run in `docs_dir` to diff the configuration against.
        commit, date, config_hash: As the caller knows them.
        kind: One of `KINDS`.
    """
    name = run_name or Path(run_dir).name
    if not RUN_NAME.match(name):
        raise TomatError(f"run name is {name!r}; expected letters, digits, '.', '_' and '-', since it names files.")
    config_file = Path(run_dir) / CONFIG_FILE
    settings = flatten(read_yaml(config_file, "train")) if config_file.exists() else {}
    base = read_record(docs_dir, baseline) if baseline else None
    page, index = docs_dir / f"{name}.md", docs_dir / INDEX_FILE
    if kind == "measured":  # a slice that was asked for says nothing of what ran
        ran = {key: (mfu_report or {}).get(key) for key in ("slice", "devices_that_ran")}
        ran["asked_slice"] = settings.get("slice")
    else:
        ran = {"slice": (mfu_report or {}).get("slice") or settings.get("slice")}
    record = {
        "record_format": RECORD_FORMAT,
        "run": name,
        "kind": kind,
        **ran,
        "commit": commit,
        "date": date,
        "config_hash": config_hash,
        **_record_figures(breakdown, mfu_report or {}, settings),
    }
    if index.exists():  # before anything is written
        find_sections(read_document(index), str(index))
    update_page(page, _page(name, record, settings, base, breakdown, mfu_report), docs_dir / FIGURES_DIR)
    write_if_changed(docs_dir / DATA_DIR / f"{name}.json", dump_json(record))
    write_index(docs_dir)
    return page


def _page(
    name: str,
    record: Mapping[str, Any],
    settings: Mapping[str, Any],
    base: Record | None,
    breakdown: Breakdown | None,
    mfu_report: Mapping[str, Any] | None,
) -> Report:
    """The parts that people write stand in it too, as what they are asked for."""

    def results(heading: str, marker: str, parts: Sequence[Part]) -> Section:
        return Section(heading, parts, marker, level=3, owns_heading=True)

    why = "<!-- Why this run: what is expected to change, by how much, and why. -->"
    verdict = "<!-- What it showed, with the figure that decides it. Negative results stay. -->"
    return Report(
        name,
        (
            Section("Hypothesis", by_hand=why),
            Section("Setup", [setup_facts(record, breakdown)], "setup"),
            Section("", [differences(settings, base)], "differences"),
            Section("Results"),
            results("MFU", "mfu", mfu_parts(mfu_report)),
            results("HBM", "memory", [memory_part(breakdown)]),
            results("Where the cycles went", "breakdown", breakdown_parts(breakdown, name)),
            results("Top operations", "operations", operations_parts(breakdown)),
            Section("Verdict", by_hand=verdict),
            Section("Next", by_hand="<!-- What to try because of it. -->"),
        ),
    )


class _Named(TypedDict):
    run: Annotated[str, Meta(pattern=RUN_NAME.pattern)]
    kind: Kind
    commit: str
    config_hash: str
    config: dict[str, Any]


class Record(_Named, total=False):
    """`data/<run>.json`, as far as it is read again; what older ones lack is absent. It has no checksum, so a figure
    that damage made another figure cannot be seen."""

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


def _record_figures(breakdown: Breakdown | None, mfu: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the index shows of a run, and what a later page needs to name it as its baseline."""
    largest = max(breakdown.categories, key=lambda r: r.seconds, default=None) if breakdown else None
    step = mfu.get("step_seconds") or (breakdown.step_seconds if breakdown else None)
    return {
        "model": settings.get("preset"),
        "batch_sequences": mfu.get("batch_sequences") or settings.get("trainer.train_batch_size"),
        "sequence_tokens": mfu.get("sequence_tokens") or settings.get("data.seq_len"),
        "step_seconds": step,
        **{key: mfu.get(key) for key in RECORD_MFU_KEYS},
        "largest_category": largest.name if largest else None,
        "largest_category_share": largest.share if largest else None,
        "config": settings,
    }


def write_index(docs_dir: Path) -> Path:
    """The table of all records in `docs_dir/data`, newest first, reference figures last."""
    records = [read_record(docs_dir, path.stem) for path in sorted((docs_dir / DATA_DIR).glob("*.json"))]
    records.sort(key=lambda r: r["run"])
    records.sort(key=lambda r: r.get("date") or "", reverse=True)
    records.sort(key=lambda r: KINDS.index(r["kind"]))
    settings = [Column(name) for name in ("run", "kind", "model", "slice", "batch", "tokens")]
    shares = [Column(one.short, percent) for one in TABLE_UTILISATIONS] + [Column("without timings", percent)]
    said = [Column("largest category"), Column("verdict", prose=True)]
    columns = [*settings, Column("step", seconds), *shares, *said]
    rows = [_index_row(record, docs_dir) for record in records]
    table = Table("", columns, rows) if rows else "No run is on record yet."
    sections = [Section("", by_hand=INTRODUCTION), Section("", [table], "runs")]
    if sweeps := _sweeps(docs_dir):
        sections.append(Section("Sweeps", [sweeps], "sweeps", owns_heading=True))
    return update_page(docs_dir / INDEX_FILE, Report("Runs and plans", sections))


@dataclass(frozen=True)
class SweepEntry:
    """A sweep's record, as far as the index shows it."""

    sweep: str
    title: str
    n_rows: Count
    n_fitting: Count
    ranking: list[str]
    rows: list[Any]

    def __post_init__(self) -> None:
        if self.n_fitting and not self.ranking:
            raise ValueError("expected a ranking where rows fit")


def _sweeps(docs_dir: Path) -> Table | None:
    """Links to the sweeps of plans (`tomat/perf/tuning/sweep.py`) whose records are in `docs_dir/sweeps`."""
    rows = []
    for path in sorted((docs_dir / SWEEPS_DIR).glob("*.json")):
        record = read_typed(path, SweepEntry, "Delete it and run the sweep again.")
        n_planned = len(record.rows)
        said = str(record.n_rows) if n_planned == record.n_rows else f"{n_planned} of {record.n_rows} planned"
        best = record.ranking[0] if record.n_fitting else None
        page = _page_of(docs_dir, f"{record.sweep}.md").relative_to(docs_dir).as_posix()
        rows.append((Link(record.title, page), said, record.n_fitting, best))
    columns = (Column("sweep"), Column("rows", right=True), Column("fit"), Column("best MFU"))
    return Table("", columns, rows) if rows else None


def _page_of(docs_dir: Path, name: str) -> Path:
    """A page, in the archive where that alone has it."""
    archived = docs_dir / ARCHIVE_DIR / name
    return archived if archived.exists() and not (docs_dir / name).exists() else docs_dir / name


def _index_row(record: Record, docs_dir: Path) -> tuple[Cell, ...]:
    name = record["run"]
    page = _page_of(docs_dir, record.get("page") or f"{name}.md")
    verdict = record.get("verdict") or ""
    if page.exists() and not verdict:
        verdict = section_text(read_document(page), "Verdict").split("\n")[0]
    category = record.get("largest_category")
    return (
        Link(name, page.relative_to(docs_dir).as_posix()) if page.exists() else name,
        record["kind"],
        record.get("model"),
        record.get("slice"),
        record.get("batch_sequences") or None,
        record.get("sequence_tokens") or None,
        record.get("step_seconds"),
        *(record.get(one.key) for one in TABLE_UTILISATIONS),
        record.get("untimed_step_share"),
        f"{category} {percent(record.get('largest_category_share'), 0)}" if category else None,
        verdict or None,
    )


def read_record(docs_dir: Path, name: str) -> Record:
    """The record of a run."""
    path = docs_dir / DATA_DIR / f"{name}.json"
    remedy = "Delete it and write the run's page again."
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in (docs_dir / DATA_DIR).glob("*.json"))) or "none"
        raise TomatError(f"run {name!r} is not on record in {docs_dir / DATA_DIR}; on record: {known}.")
    return read_typed(path, Record, remedy, version=("record_format", RECORD_FORMAT))
