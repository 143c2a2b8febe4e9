"""`tomat page`: writes a run, plan, profile, sweep or prediction as one HTML file for a browser."""

import argparse
import time
import webbrowser

from tomat.base.arguments import add_report, add_verb, output_file
from tomat.base.errors import TomatError
from tomat.base.reporting import console, readable_bytes, waiting, write_report
from tomat.data.density.rules import add_rule_flags, rules_of


def register(subparsers: argparse._SubParsersAction) -> None:
    text = "one HTML file of a run, plan, profile, sweep or prediction, which opens from disk without a network"
    parser = add_verb(subparsers, "page", text, _run_page)
    text = "a run's folder (or gs://), a JSON of `tomat plan` or `tomat profile`, a trace, a record of a sweep, "
    text += "a folder of `tomat predict`, or a density"
    parser.add_argument("target", metavar="RUN|PLAN|PROFILE|SWEEP|PREDICTION", help=text)
    text = "the page (default: index.html in a folder, NAME.html beside a file)"
    parser.add_argument("--output", type=output_file, metavar="FILE", help=text)
    text = "density to draw beside a prediction, or a folder of densities"
    parser.add_argument("--reference", metavar="PATH", help=text)
    add_rule_flags(parser)
    parser.add_argument("--device_kind", help="chip that a compiled program is for, such as 'TPU v6 lite'")
    parser.add_argument("--open", action="store_true", help="show it in the browser of this machine")
    add_report(parser, "write what the page shows, and its size")


def _run_page(args: argparse.Namespace) -> int:
    """Write one HTML file that opens from disk without a network: figures to point at and zoom, tables that sort and
    filter, densities with slices to drag."""
    from tomat.report.html.density import LOOKED_AT
    from tomat.report.html.document import write_page
    from tomat.report.html.kinds import default_output, page_of

    started = time.monotonic()
    rules = rules_of(args.species, [*(args.accept or ()), *LOOKED_AT.accept])
    output = args.output or default_output(args.target)
    with waiting(f"reading {args.target}"):
        page = page_of(args.target, reference=args.reference, device_kind=args.device_kind, rules=rules)
        size = write_page(output, page)
    took = time.monotonic() - started
    said = f"page of a {page.kind}: {output}, {readable_bytes(size)}, {took:.1f} s"
    console.print(said, soft_wrap=True, highlight=False)
    figures = {"page": str(output), "kind": page.kind, "page_bytes": size, "seconds": took, "shown": dict(page.figures)}
    write_report(args.json, figures)
    if args.open and not webbrowser.open(output.resolve().as_uri()):
        raise TomatError(f"no browser was found on this machine; open {output.resolve()} in one.")
    return 0
