"""The command line's own parser, for words that name files which are not there."""

import argparse
from pathlib import Path

from tomat.base.arguments import config_file

CONFIG_FILE = config_file("train").__qualname__
LOOKS = ("existing_file", "existing_place", "run_folder", "run_or_hub", "output_file", "report_file")
"""Types of arguments that look for a file."""


def parser_without_files[Parser: argparse.ArgumentParser](parser: Parser) -> Parser:
    """The same words taken, with no file looked for but configurations that ship: guides name files of the reader's."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in (action.choices or {}).values():
                parser_without_files(verb)
        elif getattr(action.type, "__name__", "") in LOOKS:
            action.type = Path
        elif getattr(action.type, "__qualname__", "") == CONFIG_FILE:
            action.type = lambda text, given=action.type: given(text) if ships(text) else Path(text)
    return parser


def ships(text: str) -> bool:
    """Whether a configuration is named as one of tomat's own: by its path in a checkout, or by its name alone."""
    return text.startswith("configs/") or Path(text).name == Path(text).stem == text
