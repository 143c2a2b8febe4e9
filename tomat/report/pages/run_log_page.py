"""The page of a log: each run's purpose, place, configuration, command and result.

tomat rewrites the text between its markers. The notes below each entry are written by people and stay.
"""

import hashlib
import re
import shlex
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tomat.base.documents import in_common, mapping
from tomat.base.report.formats import UNKNOWN, loss, number, percent, ranged
from tomat.base.report.markdown import update_page
from tomat.base.report.model import Cell, Code, Column, Facts, Items, Lines, Part, Report, Section, Table, columns
from tomat.base.reporting import counted
from tomat.report.run import results_table
from tomat.train.runs.devices import ASKED, devices_of, devices_sentence
from tomat.train.runs.run_log import LAB, RUN, Entry, Log

NOTES = "**Notes**:\n\n<!-- What was seen, and what to do because of it. The text outside tomat's markers is yours. -->"
FAILED_WORDS = {"out of memory": "OOM", "too long": "TIME", "measured": "OK"}


def write_log_page(log: Log, page: Path) -> Path:
    return update_page(page, Report(f"Log of {log.place}", log_sections(log)))


def log_sections(log: Log) -> list[Section]:
    sweeps: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in (one for one in log.entries if one.kind == LAB):
        sweeps[str(entry.sweep)].append(entry)
    sections = [Section("", _contents(log, sweeps), "contents")]
    for entry in log.entries:
        began = entry.began[:10] or "no date"
        if entry.kind == RUN:
            marker = _marker("run", f"{entry.name} {entry.began}", entry.name)
            sections.append(Section(f"{began}: {entry.name}", run_parts(entry), marker, NOTES, owns_heading=True))
        elif (rows := sweeps.pop(str(entry.sweep), None)) is not None:
            marker = _marker("lab", str(entry.sweep), str(entry.sweep))
            heading = f"{began}: {entry.sweep} (rows of a step)"
            sections.append(Section(heading, sweep_parts(rows), marker, NOTES, owns_heading=True))
    return sections


def run_parts(entry: Entry) -> list[Part]:
    result = ": ".join(filter(None, (entry.status.upper(), entry.detail)))
    facts: dict[str, Cell] = {"goal": str(entry.about("purpose") or UNKNOWN), "instance": instance(entry)}
    lines = []
    if recipe := entry.about("recipe"):
        configuration = entry.about("configuration")
        lines.append(f"recipe: `{recipe}`" + (f", configuration `{configuration}`" if configuration else ""))
    for key, value in mapping(entry.about("settings")).items():
        written = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
        lines.append(f"`{key}`: {written}")
    if entry.setup:
        lines.append("in all: " + ", ".join(f"{key} {value}" for key, value in entry.setup.items()))
    parts: list[Part] = [Facts(facts | {"result": result}), *(["Configuration:", Items(lines)] if lines else [])]
    parts += _commands([entry])
    if results := results_table(entry.figures):
        parts.append(results)
    if len(entry.pieces) > 1:
        starts = [f"step {piece.step} ({piece.time[:19].replace('T', ' ')})" for piece in entry.pieces]
        parts.append(f"In {counted(len(starts), 'piece')}, from {', '.join(starts)}.")
    if not entry.folder:
        parts.append("The run's folder is gone or holds a later run; these figures are from its last end.")
    return parts


def sweep_parts(rows: Sequence[Entry]) -> list[Part]:
    first, common = rows[0], common_settings(rows)
    measured = sum(entry.status == "measured" for entry in rows)
    recipes = dict.fromkeys(str(recipe) for entry in rows if (recipe := entry.about("recipe")))
    facts: dict[str, Cell] = {
        "goal": str(first.about("purpose") or first.sweep),
        "instance": "; ".join(dict.fromkeys(map(instance, rows))),
        "recipe": Code(", ".join(recipes)) if recipes else None,
        "in every row": settings_cell(common),
        "result": f"{measured} of {counted(len(rows), 'row')} measured",
    }
    figures = {
        "batch_sequences": Column("batch", number(0)),
        "accumulations": Column("accum", number(0)),
        "tokens_per_second_median": Column("tok/s", number(0)),
        "step_seconds_median": Column("step ms", number(1, 1e3)),
        "peak_memory_bytes": Column("mem peak MiB", number(0, 1 / 2**20)),
        "memory_limit_bytes": Column("limit MiB", number(0, 1 / 2**20)),
        "loss": Column("loss", number(4)),
    }
    body = []
    for entry in rows:
        known, against = entry.figures, entry.detail or None
        if "against_base_mean" in known and not against:
            span = (known.get(f"against_base_{key}", 0.0) for key in ("mean", "low", "high"))
            against = f"{ranged(*span, show=number(3))}, {known.get('verdict', '')}"
        found = *map(known.get, figures), FAILED_WORDS.get(entry.status, entry.status), against
        body.append((entry.name, settings_cell(mapping(entry.about("settings")), common), *found))
    heads = [*columns("run", "extra"), *figures.values(), *columns("status", "against base, 95 %")]
    return [Facts(facts), *_commands(rows), Table("", heads, body)]


def common_settings(rows: Sequence[Entry]) -> dict[str, Any]:
    """Settings that differ from the recipe and are the same in all rows of a sweep; empty for a single row."""
    return in_common([mapping(entry.about("settings")) for entry in rows]) if len(rows) > 1 else {}


def instance(entry: Entry) -> str:
    words = [_ran_on(entry)]
    if host := entry.about("host"):
        processors = entry.about("processors")
        words.append(f"host {host}" + (f" with {counted(processors, 'processor')}" if processors else ""))
    if commit := entry.about("commit"):
        words.append(f"commit {commit}")
    return ", ".join(filter(None, words)) or UNKNOWN


def _ran_on(entry: Entry) -> str:
    """Devices and hosts of the newest piece that records them, and the slice it asked for if different; else empty."""
    piece = next((one.about for one in reversed(entry.pieces) if one.about.get("devices")), {})
    found = devices_of(piece)
    return "" if found is None else devices_sentence(found, piece.get(ASKED))


def settings_cell(settings: Mapping[str, Any], common: Container[str] = ()) -> Cell:
    """Settings on one line of a table, without the settings that all rows of a sweep share."""
    words = " ".join(f"{key} {value}" for key, value in settings.items() if key not in common)
    return Code(words) if words else ""


def _contents(log: Log, sweeps: Mapping[str, Sequence[Entry]]) -> list[Part]:
    common = {name: common_settings(rows) for name, rows in sweeps.items()}
    body = []
    for entry in log.entries:
        name = entry.name if entry.kind == RUN else f"{entry.sweep}: {entry.name}"
        own = settings_cell(mapping(entry.about("settings")), common.get(str(entry.sweep), {}))
        what = entry.began[:16].replace("T", " ") or None, name, _ran_on(entry) or None, own
        body.append((*what, _result(entry), entry.figures.get("tokens_per_second_median"), entry.status))
    heads = columns("began (UTC)", "name", "device", "differs from the recipe", "result")
    parts: list[Part] = [Table("", [*heads, Column("tok/s", number(0)), Column("status")], body)]
    if any(common.values()):
        parts.append("What all rows of a sweep have in common stands with the sweep below.")
    if log.damaged_lines:
        parts.append(f"{counted(log.damaged_lines, 'line')} of the log could not be read and count for nothing.")
    return parts + [f"`{url}` could not be read: {reason}" for url, reason in log.unreadable.items()]


def _result(entry: Entry) -> str | None:
    figures = entry.figures
    if entry.kind == LAB:
        peak = figures.get("peak_memory_bytes")
        return None if peak is None else f"{peak / 2**20:,.0f} MiB"
    last = figures.get("validation_loss", figures.get("last_loss"))
    error = figures.get("free_running_nmae", figures.get("held_out_nmae_median"))
    said = [] if last is None else [f"loss {loss(last)}"]
    said += [] if error is None else [f"NMAE {percent(error, 2)}"]
    return ", ".join(said) or None


def _commands(entries: Sequence[Entry]) -> list[Part]:
    """Each distinct command once, in order of time."""
    pieces = sorted((piece for entry in entries for piece in entry.pieces), key=lambda piece: piece.time)
    commands = list(dict.fromkeys(str(piece.about["command"]) for piece in pieces if piece.about.get("command")))
    return [Lines("\n".join(map(wrapped, commands)), "bash")] if commands else []


def wrapped(command: str) -> str:
    """A command on several lines that a shell reads as one command, with one flag and its values on each line."""
    try:
        words = shlex.split(command)
    except ValueError:  # from a damaged line of the log
        return command
    lines = [""]
    for word in words:
        if word.startswith("--"):
            lines.append("")
        lines[-1] = f"{lines[-1]} {shlex.quote(word)}".strip()
    return " \\\n    ".join(lines)


def _marker(kind: str, unique: str, name: str) -> str:
    """A marker's name: readable words, and a hash that keeps names with the same words apart."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "unnamed"
    return f"{kind}-{words}-{hashlib.sha256(unique.encode()).hexdigest()[:6]}"
