"""The first pages of ``docs/tracking``: the tables of the tracking issue before tomat, and what is wrong in them.

The figures are data, ``reference.yaml`` in the tracking folder; the utilisation in tomat's conventions is computed from
them with `flops` and `chips`, so the pages follow when those change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.reporting import dump_json, write_text
from tomat.hardware.chips import slice_named
from tomat.hardware.flops import ModelShape, levanter_training_flops, training_flops
from tomat.pages.document import empty_section, update_document
from tomat.pages.tables import UNKNOWN, markdown_table, percent, seconds
from tomat.tracking.report import DATA_DIR, RECORD_FORMAT

DATA_FILE = "reference.yaml"
PAGES = {
    "reference-runs": "Reference: the runs",
    "reference-bottlenecks": "Reference: where the cycles went",
    "reference-experiments": "Reference: experiments 1 to 7",
    "reference-ideas": "Reference: queued ideas and open questions",
}
INTRODUCTION = (
    "From the tracking issue that preceded tomat, kept by hand. Its figures are transcribed in `reference.yaml`; what "
    "was wrong is corrected below and said. Text outside the markers is yours."
)


def write_reference_pages(docs_dir: Path) -> list[Path]:
    """Bring the reference pages and the runs' records up to date; none where `docs_dir` has no `reference.yaml`.

    Raises:
        TomatError: the data or a page's markers are damaged.
    """
    path = docs_dir / DATA_FILE
    if not path.exists():
        return []
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        contents = {
            "reference-runs": runs_section(data),
            "reference-bottlenecks": bottlenecks_section(data),
            "reference-experiments": experiments_section(data),
            "reference-ideas": ideas_section(data),
        }
        records = [reference_record(data, run) for run in data["runs"]]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise TomatError(f"{path}: cannot be read as the reference's tables ({error!r}).") from None
    pages = []
    for name, title in PAGES.items():
        template = f"# {title}\n\n{INTRODUCTION}\n\n{empty_section('reference')}\n"
        update_document(docs_dir / f"{name}.md", {"reference": contents[name]}, template)
        pages.append(docs_dir / f"{name}.md")
    for record in records:
        file = docs_dir / DATA_DIR / f"{record['run']}.json"
        text = dump_json(record)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            write_text(file, text)
    return pages


def utilisation(data: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, float]:
    """MFU of a run by convention, as fractions; empty where its step time is not on record."""
    if run.get("step_seconds") is None:
        return {}
    shape = ModelShape(**data["models"][run["model"]])
    peak = slice_named(run["slice"]).peak_bf16_flops_per_second * run["step_seconds"]
    batch, length = run["batch_sequences"], run["sequence_tokens"]
    return {
        "mfu_full": batch * training_flops(shape, length, "full").total / peak,
        "mfu_causal": batch * training_flops(shape, length, "causal").total / peak,
        "mfu_levanter": batch * levanter_training_flops(shape, length) / peak,
    }


def reference_record(data: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """A reference run as a record of the index."""
    profiles = [b for b in data["bottlenecks"] if b["model"] == run["model"]]
    breakdown = next((b for b in profiles if b["step_seconds"] == run.get("step_seconds")), None)
    largest = max(breakdown["rows"], key=lambda row: row["share"]) if breakdown else None
    return {
        "record_format": RECORD_FORMAT,
        "run": run["name"],
        "kind": "reference",
        "page": "reference-runs.md",
        "commit": "",
        "date": "",
        "config_hash": "",
        "slice": run["slice"],
        "model": run["model"],
        "batch_sequences": run["batch_sequences"],
        "sequence_tokens": run["sequence_tokens"],
        "step_seconds": run.get("step_seconds"),
        "mfu_useful": None,
        "hfu": None,
        "tokens_per_second_per_chip": None,
        "mfu_full": None,
        "mfu_causal": None,
        "mfu_levanter": None,
        **utilisation(data, run),
        "largest_category": largest["operation"] if largest else None,
        "largest_category_share": largest["share"] if largest else None,
        "verdict": f"stated {percent(run['mfu_stated'], 1)}",
        "config": {
            key: run[key]
            for key in ("model", "slice", "batch_sequences", "sequence_tokens", "gradient_checkpointing", "shuffle")
        },
    }


def runs_section(data: Mapping[str, Any]) -> str:
    """The runs with the stated MFU and tomat's."""
    header = ("run", "model", "slice", "batch", "tokens", "checkpointing", "shuffle", "stated MFU", "step",
              "Levanter's formula", "MFU full", "MFU causal")  # fmt: skip
    rows = []
    for run in data["runs"]:
        figures = utilisation(data, run)
        rows.append(
            (
                run["name"],
                run["model"],
                run["slice"],
                str(run["batch_sequences"]),
                str(run["sequence_tokens"]),
                run["gradient_checkpointing"],
                run["shuffle"],
                f"~{percent(run['mfu_stated'])}",
                seconds(run.get("step_seconds")),
                *(percent(figures.get(key), 2) for key in ("mfu_levanter", "mfu_full", "mfu_causal")),
            )
        )
    return "\n\n".join(
        [
            markdown_table(header, rows, "lllrrllrrrrr"),
            "Step times are on record for two of them. MFU is a share of 918 TFLOP/s bf16 a chip, with "
            f"{next(iter(data['models'].values()))['vocab_size']:,} ids, whole vocabulary, every position.",
            _bullets("Corrections", data["run_corrections"] + data["other_corrections"]),
        ]
    )


def bottlenecks_section(data: Mapping[str, Any]) -> str:
    """Both profiles, with the time each row means and what is missing to the step."""
    parts = []
    for table in data["bottlenecks"]:
        step = table["step_seconds"]
        rows = [(r["operation"], percent(r["share"]), seconds(r["share"] * step)) for r in table["rows"]]
        rest = 1.0 - sum(r["share"] for r in table["rows"])
        label = "**not on record**" if rest > 0 else "**counted beyond the step**"
        rows.append((label, percent(abs(rest)), seconds(abs(rest) * step)))
        parts += [
            f"## {table['model']} on {table['slice']}, step {step} s",
            markdown_table(("operation", "stated share", "time"), rows),
        ]
    parts.append(_corrections(data["bottleneck_corrections"]))
    return "\n\n".join(parts)


def experiments_section(data: Mapping[str, Any]) -> str:
    """Experiments, and the table of what did not fit."""
    parts = []
    for item in data["experiments"]:
        lines = [f"## {item['number']}. {item['title']}", f"Goal: {item['goal']}", f"Result: {item['result']}"]
        if item.get("correction"):
            lines.append(f"**Correction.** {item['correction']}")
        parts += lines
    capacity = data["oom"]["capacity_gib"]
    rows = []
    for row in data["oom"]["rows"]:
        used, compiled = row["used_gb"], row["compiled_gb"]
        rows.append(
            (
                str(row["date"]),
                str(row["batch_sequences"]),
                str(row["sequence_tokens"]),
                UNKNOWN if used is None else f"{used:.2f}",
                row["stated_overshoot"],
                UNKNOWN if used is None else f"{used - capacity:+.2f} ({percent(used / capacity - 1, 0)})",
                UNKNOWN if used is None else f"{used / capacity:.2f}",
                UNKNOWN if compiled is None else f"{compiled:.2f}",
                UNKNOWN if compiled is None else f"{100 * (compiled / used - 1):+.1f} %",
            )
        )
    header = ("date", "batch", "tokens", "needed, GiB", "stated overshoot", "beyond capacity, GiB", "needed/capacity",
              "compiled without a TPU, GiB", "difference")  # fmt: skip
    parts += [
        f"## What did not fit without checkpointing (200M, v6e-16, {capacity} GiB a chip)",
        markdown_table(header, rows),
        _corrections(data["oom_corrections"]),
    ]
    return "\n\n".join(parts)


def ideas_section(data: Mapping[str, Any]) -> str:
    """What was queued, and the open questions with their answers."""
    rows = [(i["confidence"], i["title"], i["stated"], i.get("correction", UNKNOWN)) for i in data["ideas"]]
    parts = [
        markdown_table(("confidence", "idea", "as stated", "correction"), rows, "llll"),
        "## Open questions",
    ]
    for item in data["questions"]:
        parts.append(f"**{item['question']}** {item['answer']}")
    return "\n\n".join(parts)


def _corrections(items: Sequence[Mapping[str, str]]) -> str:
    rows = [(item["stated"], item["correction"]) for item in items]
    return "## Corrections\n\n" + markdown_table(("as stated", "correction"), rows, "ll")


def _bullets(heading: str, items: Sequence[str]) -> str:
    return "\n".join([f"## {heading}", "", *(f"- {item}" for item in items)])
