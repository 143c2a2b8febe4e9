"""`tomat profile`: parses a trace or a compiled program, compares two, writes tracking pages."""

import argparse
from pathlib import Path

from tomat.base.arguments import add_verb, count, iso_date, percent, report_file
from tomat.base.errors import TomatError
from tomat.base.layout import METRICS_FILE
from tomat.base.reporting import console, write_report

EPILOG = """\
forms:
  tomat profile PROFILE              a JAX profile directory (local or gs://), *.xplane.pb, Chrome/Perfetto JSON,
                                     a run's folder, or an XLA HLO module (text or proto)
  tomat profile compare A B          two of those, plans, or breakdowns written by --json; exit status 1 if the step or
                                     a category of B took longer than in A by --fail_percent of A's step
  tomat profile index DOCS           rewrite the table of runs in DOCS (such as docs/tracking)
"""
OF_A_PAGE = ("run_name", "baseline", "commit", "date")
"""Flags of the page that `--docs` writes."""
OF_ONE_PROFILE = ("program", "session", "docs", *OF_A_PAGE)


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "where the cycles of a step went, from a profile or a compiled program"
    shown = {"epilog": EPILOG, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = add_verb(subparsers, "profile", text, _run_profile, **shown)
    parser.add_argument("target", nargs="+", metavar="PROFILE", help="see the forms below")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the breakdown or comparison")
    parser.add_argument("--top", type=count, default=15, help="operations to print (default 15)")
    parser.add_argument("--device_kind", help="JAX's name of the chip, if the input does not hold it")
    text = "the program that a step executes; default: the longest of those that repeat"
    parser.add_argument("--program", metavar="NAME", help=text)
    parser.add_argument("--session", help="which session of a profile directory; default: the newest")
    parser.add_argument("--xprof", action="store_true", help="now profiling/beside_xprof.py in a checkout")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="write the run's page into this tracking folder")
    parser.add_argument("--run_name", help="name of the page (with --docs); default: the folder's")
    parser.add_argument("--baseline", help="run on record to diff the configuration against (with --docs)")
    parser.add_argument("--commit", help="commit of the code that ran (with --docs)")
    parser.add_argument("--date", type=iso_date, help="ISO date of the run (with --docs)")
    parser.add_argument("--warn_percent", type=percent, default=2.0, help="compare: warn if the step grew by so much")
    parser.add_argument("--fail_percent", type=percent, default=5.0, help="compare: fail if the step grew by so much")


def _run_profile(args: argparse.Namespace) -> int:
    """Where the cycles of a step went, from a profile or a compiled program."""
    target, *words = args.target
    if target == "compare":
        if len(words) != 2:
            raise TomatError(f"compare takes two profiles or breakdowns, got {len(words)}: {' '.join(words)}.")
        if given := next((name for name in OF_ONE_PROFILE if getattr(args, name)), None):
            how = "write the breakdown of each with --json, and compare these"
            raise TomatError(f"--{given} is for one profile and does not go with compare; {how}.")
        return compare_targets(args, *words)
    if target == "index":
        if len(words) != 1:
            raise TomatError("index takes one folder, such as docs/tracking.")
        if given := next((name for name in ("json", "device_kind", *OF_ONE_PROFILE) if getattr(args, name)), None):
            raise TomatError(f"--{given} does not go with index, which only rewrites a table; leave it out.")
        if not Path(words[0]).is_dir():
            raise TomatError(f"{words[0]}: no such folder. Give the tracking folder, such as docs/tracking.")
        from tomat.report.pages.report import write_index

        console.print(f"up to date: {write_index(Path(words[0]))}")
        return 0
    if args.xprof:
        raise TomatError("--xprof, which checks tomat itself, is now profiling/beside_xprof.py in a checkout.")
    if words:
        got = f"{len(args.target)}: {' '.join(args.target)}"
        raise TomatError(f"expected one profile, got {got}. To compare: tomat profile compare A B.")
    if args.docs is None and (given := next((name for name in OF_A_PAGE if getattr(args, name)), None)):
        raise TomatError(f"--{given} is for the page of a run; give --docs with its tracking folder, or leave it out.")

    from tomat.perf.profile.load import load_breakdown
    from tomat.report.terminal import print_breakdown

    breakdown = load_breakdown(target, device_kind=args.device_kind, session=args.session, program=args.program)
    print_breakdown(breakdown, args.top)
    write_report(args.json, breakdown.to_dict())
    if args.docs is not None:
        from tomat.report.pages.report import write_run_page

        of_the_run = {name: value for name in OF_A_PAGE if (value := getattr(args, name))}
        kind, figures = ("measured" if breakdown.source == "trace" else "predicted"), None
        if kind == "measured" and (Path(target) / METRICS_FILE).is_file():
            from tomat.app.workflow.train import mfu_if_known

            figures = mfu_if_known(Path(target))
        console.print(f"wrote {write_run_page(Path(target), args.docs, breakdown, figures, kind=kind, **of_the_run)}")
    return 0


def compare_targets(args: argparse.Namespace, a: str, b: str) -> int:
    """Compare two profiles, plans or breakdowns. Returns 1 if the second regresses by more than `args.fail_percent`."""
    from tomat.perf.profile.load import load_breakdown
    from tomat.perf.profile.two_breakdowns import Verdict, compare_breakdowns
    from tomat.report.terminal import print_comparison

    if args.warn_percent > args.fail_percent:
        given = f"--warn_percent {args.warn_percent} and --fail_percent {args.fail_percent}"
        raise TomatError(f"{given}: expected 0 <= warn <= fail.")
    left, right = (load_breakdown(each, device_kind=args.device_kind) for each in (a, b))
    result = compare_breakdowns(left, right, args.warn_percent, args.fail_percent)
    print_comparison(result)
    write_report(args.json, result.to_dict())
    return 1 if result.verdict == Verdict.FAIL else 0
