"""What a reader may assume, and which of its refusals are lifted: the settings that every reader of densities takes."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tomat.base.errors import TomatError
from tomat.data.density.elements import SYMBOLS

ACCEPTABLE = {
    "not_total": "densities of cores, spins, bands and differences, told by names and titles (AECCAR0, *SPIN_DENSITY*)",
    "distances": "cells with atoms unusually close, far apart or few: isolated atoms, extreme pressure",
    "zeros": "runs of exact zeros beside ordinary values",
    "fractional_electrons": "electron counts that are no whole number: alloys of pseudo-atoms",
    "electrons": "electron counts that no known pseudopotentials give, or unlike the other files': charged cells",
    "atoms": "densities that do not lie on their atoms",
    "cube_e_per_a3": "cubes that hold e/Å³, where e/bohr^3 is expected: those whose electrons say so",
}
"""What `--accept` takes, each with what it lets in."""


@dataclass(frozen=True)
class ReadRules:
    """How densities are read."""

    species: tuple[str, ...] = ()
    """Elements of a VASP 4 CHGCAR, which names none, in the order of its counts."""
    accept: tuple[str, ...] = ()
    """Keys of `ACCEPTABLE` whose refusal is lifted."""
    count_electrons: bool = True
    """Whether the electron count is compared with what the atoms bring. False: the caller knows it and compares it
    himself."""
    valences: Mapping[int, float] | None = None
    """Electrons that an atom brings, by atomic number, where they are known; densities of other elements have the known
    ones."""

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
    """Refuse `--species` and `--accept` where no density is read that they could act on."""
    if species or accept:
        raise TomatError(f"--species and --accept are for --input; they say nothing of {where}. Leave them out.")


def rules_of(species: Sequence[str] | None, accept: Sequence[str] | None) -> ReadRules:
    """The rules that the flags of `add_rule_flags` give."""
    return ReadRules(tuple(species or ()), tuple(accept or ()))
