"""The page of a log: what each run was for, where it ran, as what, by which words, and what came of it.

tomat owns what stands between its markers. The notes below each entry are people's, and stay.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tomat.base.documents import mapping
from tomat.base.report.document import empty_section, find_sections, read_document, replace_sections, write_if_changed
from tomat.base.report.formats import UNKNOWN, count, markdown_table, percent
from tomat.base.report.text import code, fenced, plain
from tomat.base.reporting import counted
from tomat.train.runs.devices import ASKED, devices_of, devices_sentence
from tomat.train.runs.entries import Entry, Log
from tomat.train.runs.run_log import LAB, RUN

PAGE_TEMPLATE = """# Log of {place}

{contents}
"""
NOTES = "**Notes**:\n\n<!-- What was seen, and what to do because of it. The text outside tomat's markers is yours. -->"
CONTENTS = "contents"
COMMAND_COLUMNS = 118
FAILED_WORDS = {"out of memory": "OOM", "too long": "TIME", "measured": "OK"}


def write_log_page(log: Log, page: Path) -> Path:
    """Write the page of a log, or bring it up to date; notes that stand in it stay where they are.

    Raises:
        TomatError: The page's markers are broken. Nothing is written then.
    """
    sections = log_sections(log)
    empty = PAGE_TEMPLATE.format(place=plain(log.place), contents=empty_section(CONTENTS))
    text = read_document(page) if page.is_file() else empty
    known = find_sections(text, str(page))
    # Each new entry with a place for notes below it.
    for name in sections:
        if name not in known:
            text = f"{text.rstrip()}\n\n{empty_section(name)}\n\n{NOTES}\n"
    write_if_changed(page, replace_sections(text, sections, str(page)))
    return page


def log_sections(log: Log) -> dict[str, str]:
    """The contents, then the section of each run and each sweep, by the names of their markers."""
    sweeps: dict[str, list[Entry]] = {}
    for entry in log.entries:
        if entry.kind == LAB:
            sweeps.setdefault(str(entry.sweep), []).append(entry)
    sections = {CONTENTS: _contents(log, sweeps)}
    for entry in log.entries:
        if entry.kind == RUN:
            sections[_marker("run", f"{entry.name} {entry.began}", entry.name)] = run_section(entry)
        elif (rows := sweeps.pop(str(entry.sweep), None)) is not None:
            sections[_marker("lab", str(entry.sweep), str(entry.sweep))] = sweep_section(rows)
    return sections


def run_section(entry: Entry) -> str:
    """One run in the form of a log that is kept by hand."""
    figures = entry.figures
    parts = [
        f"## {entry.began[:10] or 'no date'}: {plain(entry.name)}",
        f"**Goal**: {plain(entry.about('purpose') or UNKNOWN)}",
    ]
    parts += [f"**Instance**: {instance(entry)}", _configuration(entry), _commands([entry])]
    detail = f": {plain(entry.detail)}" if entry.detail else ""
    parts.append(f"**Result**: {plain(entry.status.upper())}{detail}")
    rows = [(name, value) for name, value in result_rows(figures) if value is not None]
    if rows:
        parts.append(markdown_table(("metric", "value"), rows))
    if len(entry.pieces) > 1:
        starts = [f"step {piece.step} ({piece.time[:19].replace('T', ' ')})" for piece in entry.pieces]
        parts.append(f"In {counted(len(starts), 'piece')}, from {', '.join(starts)}.")
    if not entry.folder:
        parts.append("The run's folder is gone or holds a later run; these figures are those of its last end.")
    return "\n\n".join(part for part in parts if part)


def sweep_section(rows: Sequence[Entry]) -> str:
    """The measured rows of a sweep in one table."""
    first = rows[0]
    title = str(first.about("purpose") or first.sweep)
    common = common_settings(rows)
    body = []
    for entry in rows:
        figures = entry.figures
        ratio = UNKNOWN
        if "against_base_mean" in figures:
            low, high = figures.get("against_base_low", 0.0), figures.get("against_base_high", 0.0)
            ratio = f"{figures['against_base_mean']:.3f} ({low:.3f} to {high:.3f}), {figures.get('verdict', '')}"
        body.append(
            (
                plain(entry.name),
                settings_text(own_settings(entry, common)),
                _figure(figures, "batch_sequences", "{:,.0f}"),
                _figure(figures, "accumulations", "{:.0f}"),
                _figure(figures, "tokens_per_second_median", "{:,.0f}"),
                _figure(figures, "step_seconds_median", "{:,.1f}", 1e3),
                _figure(figures, "peak_memory_bytes", "{:,.0f}", 1 / 2**20),
                _figure(figures, "memory_limit_bytes", "{:,.0f}", 1 / 2**20),
                _figure(figures, "loss", "{:.4f}"),
                FAILED_WORDS.get(entry.status, entry.status),
                plain(entry.detail) or ratio,
            )
        )
    header = ("run", "extra", "batch", "accum", "tok/s", "step ms", "mem peak MiB", "limit MiB", "loss", "status",
              "against base, 95 %")  # fmt: skip
    parts = [
        f"## {first.began[:10] or 'no date'}: {plain(first.sweep)} (rows of a step, measured)",
        f"**Goal**: {plain(title)}",
        f"**Instance**: {instance(first)}",
        f"**Config**: {code(first.about('recipe'))}" if first.about("recipe") else "",
        f"**In every row**: {settings_text(common)}" if common else "",
        _commands(rows),
        f"**Result**: {sum(entry.status == 'measured' for entry in rows)} of {counted(len(rows), 'row')} measured",
        markdown_table(header, body, "llrrrrrrrll"),
    ]
    return "\n\n".join(part for part in parts if part)


def common_settings(rows: Sequence[Entry]) -> dict[str, Any]:
    """Settings that differ from the recipe, and alike in all rows of a sweep; of one row none."""
    if len(rows) < 2:
        return {}
    first, *others = (mapping(entry.about("settings")) for entry in rows)
    return {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}


def own_settings(entry: Entry, common: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the recipe in this row, without what does in all rows of its sweep."""
    return {key: value for key, value in mapping(entry.about("settings")).items() if key not in common}


def instance(entry: Entry) -> str:
    """Devices, host and code of the newest piece that says."""
    host, devices = entry.about("host"), _ran_on(entry)
    words = [plain(devices)] if devices else []
    if host:
        processors = entry.about("processors")
        words.append(f"host {plain(host)}" + (f" with {counted(processors, 'processor')}" if processors else ""))
    if commit := entry.about("commit"):
        words.append(f"commit {code(commit)}")
    return ", ".join(words) or UNKNOWN


def _ran_on(entry: Entry) -> str:
    """Devices and hosts of the newest piece that says, and the slice it asked for where that is another; else empty."""
    piece = next((one.about for one in reversed(entry.pieces) if one.about.get("devices")), {})
    found = devices_of(piece)
    return "" if found is None else devices_sentence(found, piece.get(ASKED))


def result_rows(figures: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Names of figures of a run, and what they read; None where they are not known."""
    done, total = figures.get("steps_done"), figures.get("steps_total")
    first, last = figures.get("first_loss"), figures.get("last_loss")
    improvement = f"{first - last:.4f} ({percent(1 - last / first, 0)})" if first and last is not None else None

    def shown(name: str, form: str, scale: float = 1.0) -> str | None:
        value = figures.get(name)
        return None if value is None else form.format(scale * value)

    return [
        ("steps", None if done is None else f"{done:,} of {total:,}" if total is not None else f"{done:,}"),
        ("initial loss", shown("first_loss", "{:.4f}")),
        ("final loss (mean of 10 steps)", shown("last_loss", "{:.4f}")),
        ("improvement", improvement),
        ("validation loss, newest", shown("validation_loss", "{:.4f}")),
        ("validation loss, best", shown("validation_loss_best", "{:.4f}")),
        ("NMAE held out, from structures alone", shown("free_running_nmae", "{:.2f} %", 100)),
        ("NMAE held out, teacher-forced", shown("held_out_nmae_median", "{:.2f} %", 100)),
        ("step, median", shown("step_seconds_median", "{:,.1f} ms", 1e3)),
        ("tokens/s, median", shown("tokens_per_second_median", "{:,.0f}")),
        ("MFU, median", shown("mfu_full_median", "{:.1f} %", 100)),
        ("tokens", None if figures.get("tokens") is None else count(figures["tokens"])),
        ("time of the steps, with what came between", _duration(figures.get("wall_seconds"))),
    ]


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings on one line of a table."""
    words = [f"{key} {value}" for key, value in settings.items()]
    return code(" ".join(words).replace("|", "/"))


def _contents(log: Log, sweeps: Mapping[str, Sequence[Entry]]) -> str:
    common = {name: common_settings(rows) for name, rows in sweeps.items()}
    body = []
    for entry in log.entries:
        figures = entry.figures
        if entry.kind == RUN:
            loss = figures.get("validation_loss", figures.get("last_loss"))
            result = UNKNOWN if loss is None else f"loss {loss:.4f}"
            if (error := figures.get("free_running_nmae", figures.get("held_out_nmae_median"))) is not None:
                result += f", NMAE {percent(error, 2)}"
        else:
            result = f"{_figure(figures, 'peak_memory_bytes', '{:,.0f} MiB', 1 / 2**20)}"
        body.append(
            (
                entry.began[:16].replace("T", " ") or UNKNOWN,
                plain(entry.name if entry.kind == RUN else f"{entry.sweep}: {entry.name}"),
                plain(_ran_on(entry) or UNKNOWN),
                settings_text(own_settings(entry, common.get(str(entry.sweep), {}))),
                result,
                _figure(figures, "tokens_per_second_median", "{:,.0f}"),
                plain(entry.status),
            )
        )
    parts = [markdown_table(("began (UTC)", "name", "device", "differs from the recipe", "result", "tok/s", "status"),
                            body, "lllllrl")]  # fmt: skip
    if any(common.values()):
        parts.append("What all rows of a sweep have in common stands with the sweep below.")
    if log.damaged_lines:
        parts.append(f"{counted(log.damaged_lines, 'line')} of the log could not be read and count for nothing.")
    parts += [f"{code(url)} could not be read: {plain(reason)}" for url, reason in log.unreadable.items()]
    return "\n\n".join(parts)


def _configuration(entry: Entry) -> str:
    lines = []
    if recipe := entry.about("recipe"):
        lines.append(f"- recipe: {code(recipe)}" + (f", configuration {code(entry.about('configuration'))}"
                                                 if entry.about("configuration") else ""))  # fmt: skip
    settings = mapping(entry.about("settings"))
    lines += [f"- {code(key)}: {plain(_value(value))}" for key, value in settings.items()]
    if entry.setup:
        lines.append("- in all: " + ", ".join(plain(f"{key} {value}") for key, value in entry.setup.items()))
    return "**Config**:\n\n" + ("\n".join(lines) if lines else UNKNOWN)


def _commands(entries: Sequence[Entry]) -> str:
    """Each command once, in the order of their times."""
    pieces = sorted((piece for entry in entries for piece in entry.pieces), key=lambda piece: piece.time)
    commands = list(dict.fromkeys(str(piece.about["command"]) for piece in pieces if piece.about.get("command")))
    if not commands:
        return f"**Command**: {UNKNOWN}"
    return "**Command**:\n\n" + fenced("\n".join(map(wrapped, commands)), "bash")


def wrapped(command: str) -> str:
    """A command on lines that a shell reads as one; no word is cut, and none stands apart from its flag."""
    try:
        lines, words = [""], shlex.split(command)
    except ValueError:  # of a damaged line of the log
        return command
    for number, word in enumerate(words):
        apart = word.startswith("--") or number == 0 or not words[number - 1].startswith("--")
        quoted = shlex.quote(word)
        following = words[number + 1 : number + 2] if word.startswith("--") else []
        needed = len(shlex.join([word, *following]))
        if lines[-1] and apart and len(lines[-1]) + 1 + needed > COMMAND_COLUMNS:
            lines.append(quoted)
        else:
            lines[-1] = f"{lines[-1]} {quoted}".strip()
    return " \\\n    ".join(lines)


def _value(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def _figure(figures: Mapping[str, Any], name: str, form: str, scale: float = 1.0) -> str:
    value = figures.get(name)
    return UNKNOWN if value is None else form.format(scale * value)


def _duration(value: float | None) -> str | None:
    if value is None:
        return None
    hours, minutes = divmod(round(value / 60), 60)
    return f"{value:.0f} s" if value < 120 else f"{minutes} min" if not hours else f"{hours} h {minutes:02} min"


def _marker(kind: str, unique: str, name: str) -> str:
    """A marker's name: words that a person knows, and a hash that tells names apart that read alike."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "unnamed"
    return f"{kind}-{words}-{hashlib.sha256(unique.encode()).hexdigest()[:6]}"
