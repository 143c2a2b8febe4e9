"""The `tomat` command: it parses and calls, and decides nothing.

Each room registers its own verbs in its `commands.py`; those modules import only argparse, so that `tomat --help` and a
wrong verb answer at once, and a verb pays only for what it uses.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from tomat import __version__
from tomat.errors import TomatError

COMMAND_MODULES = (
    "tomat.density.commands",
    "tomat.codec.commands",
    "tomat.tokens.commands",
    "tomat.workflow",
    "tomat.evaluation.commands",
    "tomat.performance.commands",
    "tomat.performance.profile_commands",
    "tomat.planning.plan_commands",
    "tomat.training.bench_commands",
    "tomat.launch.commands",
    "tomat.runs.commands",
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every verb of every room."""
    parser = argparse.ArgumentParser(prog="tomat", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--version", action="version", version=f"tomat {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name in COMMAND_MODULES:
        importlib.import_module(name).register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The exit status: 0 for success, 2 for input that was refused (with one line on standard error), or what the verb
        returns.
    """
    # Levanter imports transformers, which advises on every start that PyTorch is missing; nothing here wants it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not getattr(args, "takes_overrides", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides = rest
    return report_errors(lambda: args.run(args))


def report_errors(run) -> int:
    """Call `run`, and turn a TomatError into one line on standard error and status 2."""
    try:
        return run()
    except TomatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped by the user", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
