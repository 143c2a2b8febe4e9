"""What the verbs share to read a command line: one parser, and the types of its numbers and files.

It uses only the standard library, so that a wrong word is refused before anything heavy is imported.
"""

import argparse
import contextlib
import datetime
import difflib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE

STANDARD_OUTPUT = Path("-")
"""`--json -`: the report goes to standard output, and everything else to standard error."""

SPELT_BEFORE = {"tokenise": "tokenize"}
"""Old spelling of a verb -> present spelling. The old spellings go with the release after this one."""

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_LEVEL = "--log_level"


def spelt_today(verb: str) -> str:
    """A verb in its present spelling: `demo_data` becomes `demo-data`, `tokenise` becomes `tokenize`."""
    spelt = verb.replace("_", "-")
    return SPELT_BEFORE.get(spelt, spelt)


def first_verb(words: Sequence[str]) -> tuple[int, str]:
    """The place of the verb in a command line, after flags that may precede it, and the verb (empty: none)."""
    for at, word in enumerate(words):
        if not word.startswith("-") and (at == 0 or words[at - 1].replace("_", "-") != LOG_LEVEL.replace("_", "-")):
            return at, word
    return len(words), ""


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Add the three flags, which may stand before or after a verb. After it, an unset flag keeps its earlier value."""
    group = parser.add_argument_group("how much is said")
    text = "results, warnings and errors alone: no progress, stages or remarks"
    group.add_argument("--quiet", action="store_true", default=argparse.SUPPRESS, help=text)
    text = "also what was asked and found, and the log of JAX, Levanter and other libraries from level info on"
    group.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=text)
    text = f"lowest level of that log, on standard error: {', '.join(LOG_LEVELS)} (default: warning)"
    group.add_argument(LOG_LEVEL, choices=LOG_LEVELS, default=argparse.SUPPRESS, metavar="LEVEL", help=text)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that refuses with one `TomatError`, in every verb alike.

    Flags are printed with underscores, as the keys of the configuration are, and taken with dashes too. A flag cannot
    be abbreviated: among overrides (`--a.b VALUE`) a misspelt key would be read as some flag that begins alike.
    """

    examples: tuple[str, ...] = ()
    """Command lines that the help ends with."""
    moved: Mapping[str, str] = {}
    """Former verb -> what does the same now."""
    _words: Sequence[str] = ()

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        add_verbosity(self)

    def format_help(self) -> str:
        """The help of `ArgumentParser`, and the examples, one per line whatever the width."""
        lines = "\n  ".join(["examples:" if len(self.examples) > 1 else "example:", *self.examples])
        return super().format_help() + (f"\n{lines}\n" if self.examples else "")

    # Subparsers are called through this method as well.
    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """As `ArgumentParser` does it, but a verb that takes no overrides refuses words that belong to nothing."""
        words = list(sys.argv[1:] if args is None else args)
        for place, word in enumerate(words):
            name, equals, value = word.partition("=")
            spelt = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
            if spelt in self._option_string_actions:
                words[place] = spelt + equals + value
        verbs = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        at, verb = first_verb(words)
        if any(spelt_today(verb) in names for names in verbs if names):
            words[at] = spelt_today(verb)
        if now := self.moved.get(verb.replace("_", "-")):
            self.error(f"`{self.prog} {verb}` is now {now}")
        self._words = words
        found, rest = super().parse_known_args(words, namespace)
        if rest and not getattr(found, "takes_overrides", False):
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _near(self) -> str:
        """A sentence on the first word that is not a flag or verb of this parser but is spelt like one; else empty."""
        below = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        verbs = [verb for choices in below for verb in choices]
        # For a verb that takes overrides any other flag may be a key.
        flags = [] if self.get_default("takes_overrides") else list(self._option_string_actions)
        at, _ = first_verb(self._words)
        for place, word in enumerate(self._words):
            name = word.partition("=")[0]
            known = flags if name.startswith("--") else verbs if place == at else []
            if (
                known
                and name not in known
                and (near := difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.7))
            ):
                return f"{name} is not known; did you mean {near[0]}?"
        return ""

    def verb_of(self, words: Sequence[str]) -> "Parser":
        """The parser of the verb that a command line begins with."""
        for action in self._actions:
            below = (isinstance(action, argparse._SubParsersAction) and action.choices) or {}
            if words and words[0] in below:
                return below[words[0]].verb_of(words[1:])
        return self

    def error(self, message: str) -> NoReturn:
        said = self._near() or f"{message.rstrip('.')}."
        raise TomatError(f"{said} `{self.prog} --help` says what is expected.")


def _number[Number: (int, float)](
    convert: Callable[[str], Number], holds: Callable[[Number], bool], expected: str
) -> Callable[[str], Number]:
    """An argparse type: a number for which `holds` is true; it is false for NaN. `expected` describes these numbers."""

    def parse(text: str) -> Number:
        with contextlib.suppress(ValueError):
            value = convert(text)
            if holds(value):
                return value
        raise argparse.ArgumentTypeError(f"found '{text}', expected {expected}")

    return parse


MOST = 2**53
"""No count on a command line is larger; beyond it a float no longer holds every whole number."""

positive_int = _number(int, lambda value: 1 <= value <= MOST, "a whole number of at least 1")
count = _number(int, lambda value: 0 <= value <= MOST, "a whole number of at least 0")
port_number = _number(int, lambda value: 1 <= value <= 65_535, "a port from 1 to 65535")
whole_number = _number(int, lambda value: -MOST <= value <= MOST, "a whole number")
positive_float = _number(float, lambda value: 0 < value < math.inf, "a finite number above 0")
share = _number(float, lambda value: 0 <= value <= 1, "a share from 0 to 1")
percent = _number(float, lambda value: 0 <= value < math.inf, "a percentage of at least 0")


def iso_date(text: str) -> str:
    with contextlib.suppress(ValueError):
        if datetime.date.fromisoformat(text).isoformat() == text:
            return text
    raise argparse.ArgumentTypeError(f"found '{text}', expected a date such as 2026-11-30")


def add_flag(parser: argparse._ActionsContainer, name: str, default: Any, text: str, **options: Any) -> None:
    """Add a flag whose help ends with its default; `options` are those of `add_argument`."""
    parser.add_argument(name, default=default, help=f"{text} (default: %(default)s)", **options)


def existing_file(text: str) -> Path:
    # os.path and not Path, which raises on names that are too long.
    if not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a folder, expected a file")
    return Path(text)


def config_file(kind: str) -> Callable[[str], Path]:
    """An argparse type: an existing configuration, or the name of one of this kind that ships with tomat."""

    def parse(text: str) -> Path:
        from tomat.base.shipped import named_configuration, none_of_that_name

        found = named_configuration(text, kind)
        if found is None and not os.path.exists(text):
            raise argparse.ArgumentTypeError(none_of_that_name(text, kind))
        return found or existing_file(text)

    return parse


def run_folder(text: str) -> Path:
    if not os.path.isfile(os.path.join(text, CONFIG_FILE)):
        give = "give a folder that `tomat train` made, such as runs/demo"
        raise argparse.ArgumentTypeError(f"{text} is not a run: it has no {CONFIG_FILE}; {give}")
    return Path(text)


def output_file(text: str) -> Path:
    """An argparse type: a local file that can be written. Its folder need not exist."""
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a folder, expected a file to write")
    folder = os.path.dirname(os.path.abspath(text))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{text} lies below {folder}, which is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: no permission in {folder}")
    return Path(text)


PICTURES = (".png", ".svg", ".pdf")
"""Endings of the names of pictures of densities."""


def picture_file(text: str) -> Path:
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"cannot draw to {text}, expected a name that ends in {', '.join(PICTURES)}")
    return output_file(text)


def report_file(text: str) -> Path:
    """An argparse type: a file that can be written, or `-` for standard output."""
    return STANDARD_OUTPUT if text == str(STANDARD_OUTPUT) else output_file(text)


def add_verbs(subparsers: Any, name: str, text: str, moved: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Add a word with verbs below it, which `add_verb` adds. `moved`: as in `Parser`."""
    parser = subparsers.add_parser(name, help=text)
    parser.moved = moved
    return parser.add_subparsers(title="verbs", metavar="VERB", required=True)


def add_verb(verbs: Any, name: str, text: str, run: Callable[..., int], **options: Any) -> Parser:
    """Add a verb, with `text` in the list of verbs. Its own help is the docstring of `run`."""
    described = {"description": " ".join((run.__doc__ or "").split()), **options}
    parser = verbs.add_parser(name, help=text, **described)
    parser.set_defaults(run=run)
    return parser


def add_report(parser: argparse.ArgumentParser, text: str = "write the figures", **defaults: Any) -> None:
    """Add the last flag of a verb, `--json`, and values that no flag sets."""
    parser.add_argument("--json", type=report_file, metavar="FILE", help=text)
    parser.set_defaults(**defaults)
