"""How much a command says: `--quiet`, `--verbose` and the level of the log, alike for every verb and study.

Results, what was written, warnings and errors are always said. What is said on the way to them (`reporting.tell`, bars
and stages) ends with `--quiet`. The log is that of Python's `logging`, so of JAX, Levanter and all other libraries, and
goes to standard error; compilers and measurements run in processes of their own, which log nothing there.
"""

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from tomat.base.errors import TomatError

LEVELS = ("debug", "info", "warning", "error")
LOG_LEVEL = "--log_level"


@dataclass
class Verbosity:
    quiet: bool = False
    """Whether results, warnings and errors are all that is said."""
    log_level: int = logging.WARNING
    """Below it nothing is logged to the terminal."""
    logs: bool = False
    """Whether a level was asked for: else libraries log as they do by themselves, which is warnings alone."""


chosen = Verbosity()
"""For the verb that runs."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The three flags, which stand before or after the name of a verb: unset they leave what was set before it."""
    group = parser.add_argument_group("how much is said")
    text = "results, warnings and errors alone: no progress, stages or remarks"
    group.add_argument("--quiet", action="store_true", default=argparse.SUPPRESS, help=text)
    text = "what was asked and found, and the log of JAX, Levanter and other libraries from info on"
    group.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=text)
    text = f"least level of that log, on standard error: {', '.join(LEVELS)} (default: warning)"
    group.add_argument(LOG_LEVEL, choices=LEVELS, default=argparse.SUPPRESS, metavar="LEVEL", help=text)


@contextlib.contextmanager
def as_asked(args: argparse.Namespace) -> Iterator[None]:
    """What the flags ask for holds inside, and what held before after it.

    Raises:
        TomatError: Both quiet and verbose.
    """
    quiet, verbose = getattr(args, "quiet", False), getattr(args, "verbose", False)
    if quiet and verbose:
        raise TomatError("--quiet and --verbose are both there; leave one of them out.")
    asked = getattr(args, "log_level", "info" if verbose else None)
    before, root = vars(chosen).copy(), logging.getLogger()
    root_before, level_before = list(root.handlers), root.level
    level = logging.WARNING if asked is None else logging.getLevelNamesMapping()[asked.upper()]
    chosen.quiet, chosen.log_level, chosen.logs = quiet, level, asked is not None
    level_log()
    try:
        yield
    finally:
        vars(chosen).update(before)
        if asked is not None:
            root.setLevel(level_before)
            for handler in root.handlers[:]:
                if isinstance(handler, _Terminal) and handler not in root_before:
                    root.removeHandler(handler)


def leave_out_advice() -> None:
    """Leave out what Levanter's imports advise on every start, and nothing here wants: transformers to install PyTorch,
    and, in a notebook, tqdm to install widgets for bars that tomat does not draw."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    warnings.filterwarnings("ignore", message="IProgress not found")


def level_log() -> None:
    """Have the terminal's handlers log from the chosen level on; again after a library has set up the log as it likes
    it (Levanter 0.2.227 takes away all handlers that were there)."""
    root = logging.getLogger()
    kinds = (logging.StreamHandler, _Terminal)
    terminals = [cast(logging.StreamHandler, one) for one in root.handlers if type(one) in kinds]
    if chosen.logs:
        root.setLevel(min(chosen.log_level, root.level))
        if all(handler.stream is not sys.stderr for handler in terminals):
            terminals.append(_Terminal(sys.stderr))
            terminals[-1].setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            root.addHandler(terminals[-1])
    for handler in terminals:
        handler.setLevel(chosen.log_level)


class _Terminal(logging.StreamHandler):
    """The handler of this module."""
