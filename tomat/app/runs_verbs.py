"""`tomat runs`: lists, checks, logs and compares the runs in a folder or bucket, without starting JAX."""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from tomat.base.arguments import add_report, add_verb, add_verbs, output_file, port_number
from tomat.base.errors import TomatError
from tomat.base.layout import WEIGHTS_FOLDER
from tomat.base.progress import progress
from tomat.base.report.formats import loss
from tomat.base.report.model import Column, Facts, Table
from tomat.base.report.terminal import show
from tomat.base.reporting import console, counted, waiting, warn, write_report

if TYPE_CHECKING:
    from tomat.train.runs.summary import RunSummary

COLUMNS = (
    ("run", "its name"),
    ("steps", "in the log, of those that were asked for"),
    (
        "state",
        "by what it wrote last: finished, preempted, stopped, ended by a guard, or open, with the age of its log",
    ),
    ("checkpoint", "last step in the newest whole checkpoint; a resume goes on after it"),
    ("cut short", "later checkpoints, which are not whole and are never resumed from (`show`: all of these)"),
    ("training loss", "of the first step -> mean of the last 10, in the unit of the configured loss"),
    ("validation loss", "the newest, in the same unit"),
    ("MFU %", "median of the last 50 steps, every query counted against every key; - if the chip's peak is unknown"),
    ("ran on", "devices and hosts of its newest piece, and the slice that was asked for if it is another"),
    ("interruptions", "times it went on after SIGTERM, Ctrl-C, a notice of preemption or a kill"),
)
"""Heading and meaning of each column of `list`; `show` has them as rows."""
LOG_PAGE = "log.md"
ORIGINS = ("fork", "warm_start")
"""Events of a run that started with the weights of another run."""
LEGEND = "\n".join(f"  {heading:16} {meaning}" for heading, meaning in COLUMNS)


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verbs = add_verbs(subparsers, "runs", "look at runs: state, losses, interruptions, log; compare them")
    for name, text, place, run in (
        ("list", "the runs in a folder or bucket, one a line", "folder or gs:// URL of runs, or of one", _run_list),
        ("show", "one run: its history, checkpoints and figures", "folder or gs:// URL of a run", _run_show),
        ("verify", "check every checkpoint and the log; status 1 on damage", "folder or gs:// URL", _run_verify),
    ):
        shown = {} if name == "verify" else {"epilog": f"columns:\n{LEGEND}"}
        parser = add_verb(verbs, name, text, run, formatter_class=argparse.RawDescriptionHelpFormatter, **shown)
        parser.add_argument("place", nargs="?" if name == "list" else None, default="runs", metavar="PLACE", help=place)
        add_report(parser)
    log = add_verb(verbs, "log", "the log of an output folder: every run and measured row, as a page", _run_log)
    log.add_argument("place", nargs="?", default="runs", metavar="DIR", help="folder or gs:// URL of runs (runs)")
    text = f"the page (default: {LOG_PAGE} in the folder)"
    log.add_argument("--output", type=output_file, metavar="FILE.md", help=text)
    add_report(log, "write the entries")
    text = "runs beside each other: settings, losses, speeds, where the time went"
    compare = add_verb(verbs, "compare", text, _run_compare)
    compare.add_argument("runs", nargs="+", metavar="RUN", help="folders or gs:// URLs of runs, two or more")
    compare.add_argument("--output", type=output_file, metavar="FILE.md", help="write a page, and its figure beside it")
    add_report(compare)
    text = "runs in a browser while they train: states, losses, speeds against plans, curves"
    serve = add_verb(verbs, "serve", text, _run_serve, epilog="The guide is docs/guides/pages.md.")
    serve.add_argument("place", nargs="?", default="runs", metavar="DIR", help="folder or gs:// URL of runs (runs)")
    serve.add_argument("--port", type=port_number, default=8080, help="port (default: %(default)s)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    serve.add_argument("--token", action="store_true", help="make a token, and answer only who sends it")


def _run_list(args: argparse.Namespace) -> int:
    """The runs in a folder or bucket, one a line."""
    from tomat.train.runs.checkpoints import survey
    from tomat.train.runs.record import find_runs, read_record
    from tomat.train.runs.summary import summarise

    urls = find_runs(args.place)
    summaries = []
    with progress() as bar:
        for url in bar.track(urls, description="read runs"):
            record = read_record(url)
            whole, partial = survey(url, record.temporary_url)
            summaries.append(summarise(record, whole, len(partial), time.time()))
    columns = [Column(heading, right=heading not in ("run", "state", "ran on")) for heading, _ in COLUMNS]
    legend = (f"{heading}: {meaning}" for heading, meaning in COLUMNS)
    show(Table(args.place, columns, list(map(_cells, summaries))), *legend)
    write_report(args.json, {"runs": [summary.to_dict() for summary in summaries]})
    return 0


def _run_show(args: argparse.Namespace) -> int:
    """One run: its history, checkpoints and figures."""
    from tomat.report.run import history_table
    from tomat.train.runs.checkpoints import list_checkpoints
    from tomat.train.runs.record import find_runs, read_record
    from tomat.train.runs.summary import summarise

    urls = find_runs(args.place)
    if urls != [args.place.rstrip("/")]:
        names = ", ".join(url.rsplit("/", 1)[-1] for url in urls)
        raise TomatError(f"{args.place} is a folder of runs, not a run; name one of them: {names}.")
    record = read_record(urls[0])
    checkpoints = list_checkpoints(urls[0], record.temporary_url)
    whole = [found for found in checkpoints if found.whole]
    summary = summarise(record, whole[-1] if whole else None, len(checkpoints) - len(whole), time.time())
    hashes = list(dict.fromkeys(event["configuration"] for event in record.events if "configuration" in event))
    parents = [str(event.get("parent") or event.get("source")) for event in record.events if event["event"] in ORIGINS]
    facts = {heading: cell for (heading, _), cell in zip(COLUMNS, _cells(summary), strict=True)}
    facts |= {
        "configuration": ", ".join(hashes) or "-",
        "came from": ", ".join(parents) or "-",
        "purpose": " ".join(str(record.config.get("purpose") or "").split()) or "-",
    }
    for found in checkpoints:
        name = f"step-{found.step}"
        kind = "temporary" if found.temporary else "whole" if found.whole else found.reason
        facts[name] = f"{facts[name]}, {kind}" if name in facts else kind
    show(Facts(facts, summary.url), history_table(record.events))
    figures = {"history": record.events, "configuration_hashes": hashes}
    write_report(args.json, {**summary.to_dict(), **figures, "checkpoints": [vars(found) for found in checkpoints]})
    return 0


def _run_verify(args: argparse.Namespace) -> int:
    """Check every checkpoint and the log; status 1 on damage."""
    from tomat.predict.weights.folder import read_weights
    from tomat.predict.weights.record import is_weights_folder
    from tomat.train.runs.checkpoints import list_checkpoints
    from tomat.train.runs.record import find_runs, read_record
    from tomat.train.runs.verify import verify_run

    verdicts = []
    with progress() as bar:
        for url in bar.track(find_runs(args.place), description="verify runs"):
            record = read_record(url)
            found = verify_run(record, list_checkpoints(url, record.temporary_url, read_data=True))
            # Also check the weights in a local run's folder, or the folder itself if it is a folder of weights.
            damaged = []
            for folder in () if "://" in url else (Path(url), Path(url) / WEIGHTS_FOLDER):
                if is_weights_folder(folder):
                    try:
                        read_weights(folder)
                    except TomatError as error:
                        damaged.append(str(error))
            verdicts.append(replace(found, problems=(*found.problems, *damaged)))
    for verdict in verdicts:
        colour, word = ("red", "damaged") if verdict.problems else ("green", "sound")
        found = f"{counted(verdict.checkpoints, 'whole checkpoint')}, {counted(verdict.log_lines, 'line')} of log"
        console.print(Text.assemble((word, colour), f" {verdict.name}: {found}"))
        show(*(f"  {line}" for line in (*verdict.problems, *(f"note: {note}" for note in verdict.notes))))
    write_report(args.json, {"runs": [vars(verdict) for verdict in verdicts]})
    return 1 if any(verdict.problems for verdict in verdicts) else 0


def _run_log(args: argparse.Namespace) -> int:
    """Write the log of an output folder as a page: for each run and each measured sweep its purpose, where it ran,
    settings that differ from the recipe, command, result. Notes below an entry are kept."""
    from tomat.base.storage import is_remote
    from tomat.report.pages.run_log_page import write_log_page
    from tomat.train.runs.run_log import RUN, read_log

    if args.output is None and is_remote(args.place):
        raise TomatError(f"{args.place} is a bucket; say where to write the page with --output FILE.md.")
    with waiting("reading the log and the runs"):
        log = read_log(args.place, time.time())
    page = write_log_page(log, args.output or Path(args.place) / LOG_PAGE)
    n_runs = sum(entry.kind == RUN for entry in log.entries)
    show(f"{counted(n_runs, 'run')}, {counted(len(log.entries) - n_runs, 'measured row')}")
    if log.damaged_lines:
        show(f"{counted(log.damaged_lines, 'damaged line')} of the log left out")
    for url, reason in log.unreadable.items():
        warn(f"{url}: {reason}")
    console.print(f"wrote {page}", highlight=False)
    figures = {"entries": [entry.to_dict() for entry in log.entries], "damaged_lines": log.damaged_lines}
    write_report(args.json, figures | {"unreadable": dict(log.unreadable)})
    return 0


def _run_compare(args: argparse.Namespace) -> int:
    """Compare runs with the first of them: settings that differ, losses drawn together, figures, where the
    time went."""
    from tomat.report.pages import compare_page
    from tomat.train.runs.compare import compare_runs

    with waiting("reading the runs"):
        comparison = compare_runs(args.runs)
    parts = compare_page.breakdown_parts(comparison)
    lines = [f"{line} {name}" for name, line in compare_page.sparklines(comparison)]
    scale = f"training loss of {len(comparison.common_steps):,} common steps, one scale"
    lines.append(scale if lines else "the runs have no common step with a loss")
    show(compare_page.settings_part(comparison), compare_page.figures_table(comparison), *parts, *lines)
    for reason in comparison.not_comparable:
        console.print(Text.assemble(("losses cannot be compared:", "yellow"), f" {reason}"))
    if args.output is not None:
        console.print(f"wrote {compare_page.write_comparison_page(comparison, args.output)}", highlight=False)
    write_report(args.json, comparison.to_dict())
    return 0


def _run_serve(args: argparse.Namespace) -> int:
    """Serve the runs of a folder or bucket to a browser of this machine, until Ctrl-C. Reads only."""
    from tomat.report.dashboard.server import serve

    serve(args.place, host=args.host, port=args.port, with_token=args.token)
    return 0


def _cells(summary: "RunSummary") -> list[str]:
    losses = (summary.first_loss, summary.last_loss, summary.validation_loss)
    first, last, validation = ("-" if each is None else loss(each) for each in losses)
    return [
        summary.name,
        f"{summary.steps_done:,} of {summary.steps_total:,}" if summary.steps_total is not None else "?",
        f"{summary.state}: {summary.state_detail}" if summary.state_detail else summary.state,
        "-" if summary.last_whole_step is None else f"step {summary.last_whole_step:,}",
        str(summary.partial_checkpoints),
        "-" if summary.first_loss is None else f"{first} -> {last}",
        validation,
        "-" if summary.mfu is None else f"{100 * summary.mfu:.1f}",
        summary.devices,
        str(summary.survived),
    ]
