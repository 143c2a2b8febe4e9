"""What a reader may assume, and which of its refusals are lifted: the settings that every reader of densities takes."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from tomat.base.errors import TomatError
from tomat.density.elements import SYMBOLS

ACCEPTABLE = {
    "not_total": "files called AECCAR0, AECCAR1 or PARCHG, which hold a part of the electrons",
    "distances": "cells with atoms unusually close, far apart or few: isolated atoms, extreme pressure",
    "zeros": "runs of exact zeros beside ordinary values",
    "fractional_electrons": "electron counts that are no whole number: alloys of pseudo-atoms",
}
"""What `--accept` takes, each with what it lets in."""


@dataclass(frozen=True)
class ReadRules:
    """How densities are read.

    Raises:
        TomatError: a symbol or a name that does not exist.
    """

    species: tuple[str, ...] = ()
    """Elements of a VASP 4 CHGCAR, which names none, in the order of its counts."""
    accept: tuple[str, ...] = ()
    """Keys of `ACCEPTABLE` whose refusal is lifted."""
    electron_tolerance: float | None = 0.005
    """Largest relative deviation of the electron count from a whole number. None: the caller knows the count and
    compares it himself."""

    def __post_init__(self) -> None:
        for symbol in self.species:
            if symbol not in SYMBOLS:
                raise TomatError(f"--species names {symbol!r}, which is no element; expected symbols such as Na or Mg.")
        for name in self.accept:
            if name not in ACCEPTABLE:
                raise TomatError(f"--accept names {name!r}; expected some of {', '.join(ACCEPTABLE)}.")


DEFAULT_RULES = ReadRules()


def add_rule_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--species` and `--accept` to a verb that reads densities."""
    parser.add_argument(
        "--species",
        nargs="+",
        metavar="SYMBOL",
        help="elements of CHGCARs that name none (VASP 4), in the order of their counts",
    )
    parser.add_argument(
        "--accept",
        nargs="+",
        metavar="NAME",
        help="read what is refused otherwise: " + "; ".join(f"{name} ({text})" for name, text in ACCEPTABLE.items()),
    )


def refuse_rules(species: Sequence[str] | None, accept: Sequence[str] | None, where: str) -> None:
    """Refuse `--species` and `--accept` where no density is read that they could act on.

    Raises:
        TomatError: naming `where`, such as "the embedded densities".
    """
    if species or accept:
        raise TomatError(f"--species and --accept are for --input; they say nothing of {where}. Leave them out.")


def rules_of(species: Sequence[str] | None, accept: Sequence[str] | None) -> ReadRules:
    """The rules that the flags of `add_rule_flags` give."""
    return ReadRules(tuple(species or ()), tuple(accept or ()))
