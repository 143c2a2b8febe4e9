"""What a reader may assume, which of its refusals are lifted, and what the name and titles of a file say that it holds.
Codes write cores, spins, bands, differences and potentials beside their densities, in the same formats."""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
    species: tuple[str, ...] = ()
    """Elements of a VASP 4 CHGCAR, which names none, in the order of its counts."""
    accept: tuple[str, ...] = ()
    """Keys of `ACCEPTABLE` whose refusal is lifted."""
    count_electrons: bool = True
    """Whether the electron count is compared with what the atoms bring; False: the caller compares it."""
    valences: Mapping[int, float] | None = None
    """Electrons that an atom brings, by atomic number; not used for a density with other elements."""

    def __post_init__(self) -> None:
        for symbol in self.species:
            if symbol not in SYMBOLS:
                raise TomatError(f"--species names {symbol!r}, which is no element; expected symbols such as Na or Mg.")
        for name in self.accept:
            if name not in ACCEPTABLE:
                raise TomatError(f"--accept names {name!r}; expected some of {', '.join(ACCEPTABLE)}.")


DEFAULT_RULES = ReadRules()


def add_rule_flags(parser: argparse.ArgumentParser) -> None:
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
        raise TomatError(f"--species and --accept are for --input; they do not apply to {where}. Leave them out.")


def rules_of(species: Sequence[str] | None, accept: Sequence[str] | None) -> ReadRules:
    return ReadRules(tuple(species or ()), tuple(accept or ()))


@dataclass(frozen=True)
class Kind:
    """A quantity that is not the total density that is learnt."""

    words: str
    form: Literal["not_total", "no_density", "other_total"]
    """`not_total`: electrons, but not all; `no_density`: no electrons in any unit; `other_total`: a total density of
    another kind, which is not taken from a folder, but is read if its file is given itself."""
    name: str = ""
    """Regular expression for file names, ignoring case. Only letters belong to a word."""
    title: str = ""
    """The same for title lines."""


OWN_TITLE = ", by tomat: "
"""Part of the titles that tomat writes: the formula stands before it, what made the density after it."""

_BEGINS, _ENDS = r"(?<![A-Za-z])", r"(?![A-Za-z])"
"""Ends of a word: `MAG` is a word in `CHGCAR_mag_GdN`, but not in `magnetite`."""


def _words(*alternatives: str) -> str:
    return rf"{_BEGINS}(?:{'|'.join(alternatives)}){_ENDS}"


KINDS = (
    # VASP's own files, and what chgsplit.pl, chgdiff.pl and VASPKIT make of them.
    Kind("the density of the cores", "not_total", "AECCAR0"),
    Kind("the superposition of free atoms", "not_total", "AECCAR1"),
    Kind("the valence density with its nodes at the nuclei", "other_total", "AECCAR2"),
    Kind("the density of some bands", "not_total", "PARCHG"),
    Kind("a localisation function", "no_density", rf"ELFCAR|{_BEGINS}ELF_S\d|{_words('ELF', 'LOL')}",
         rf"locali[sz]ation function|{_words('ELF', 'LOL')}"),
    Kind("a potential", "no_density",
         "LOCPOT|" + _words("ESP", "TOTESP", "V_?HARTREE", "V_?XC", "(?:HARTREE_|LOCAL_)?POTENTIAL", "VTOTAL", "ELPOT"),
         _words("potential", "V_?hartree", "V_?xc")),
    Kind("a kinetic energy density", "no_density", "TAUCAR|" + _words("KINETIC_ENERGY_DENSITY"), "kinetic energy dens"),
    # CP2K: NAME-SPIN_DENSITY-1_0.cube; FHI-aims: cube_001_spin_density.cube; ORCA: NAME.spindens.cube; Psi4: Ds.cube.
    Kind("a spin density", "not_total", r"^(?:SPIN|DS)\.|" + _words(
             r"SPIN[_ .-]?DENS(?:ITY)?", r"SPIN[_ .-]?(?:UP|DOWN|DIFF)", "MAG", "MAGNETI[SZ]ATION", "MAGDENS(?:ITY)?"),
         r"spin[ _-]?(?:\w+ )?dens|magneti[sz]ation dens|" + _words("alpha minus beta")),
    Kind("a difference of densities", "not_total",
         _words("(?:CHG|CHGCAR|CHARGE|RHO|DENSITY)_?DIFF(?:ERENCE)?", "DIFF(?:ERENCE)?_?(?:DENSITY|RHO|CHARGE)",
                "DELTA_?(?:RHO|DENSITY)", "DEFORMATION_DENSITY"),
         "difference dens|density difference|deformation dens|delta[ _]dens"),
    Kind("an orbital", "not_total", _words("WFN", "HOMO", "LUMO", "ORBITAL", "PSI_[AB]"),
         _words("orbitals?", "wave ?functions?", "MO coefficients")),
    Kind("electrons and nuclei together", "no_density", "-TOTAL_DENSITY-"),
)  # fmt: skip
"""Kinds by name and title lines; the first that matches says what a file holds."""


def kind_of_name(location: str) -> Kind | None:
    """What the name of a file or of a `.zarr` folder says that it holds; None for a total density."""
    name = location.rstrip("/").replace("\\", "/").rsplit("/", 1)[-1]
    return next((kind for kind in KINDS if kind.name and re.search(kind.name, name, re.IGNORECASE)), None)


def check_kind(location: str, titles: Iterable[str], accept: Iterable[str]) -> bool:
    """Refuse a file that says it is no total density; True for a part that `accept` lets in."""
    # What tomat adds to a title has names of runs and paths, which say nothing about the quantity.
    of_name, text = kind_of_name(location), "\n".join(title.partition(OWN_TITLE)[0] for title in titles)
    of_title = (kind for kind in KINDS if kind.title and re.search(kind.title, text, re.IGNORECASE))
    kind = of_name or next(of_title, None)
    if kind is None or kind.form == "other_total":
        return False
    if (partial := kind.form == "not_total") and "not_total" in accept:
        return True
    raise TomatError(
        f"{location}: its {'name' if of_name else 'title'} says that it holds {kind.words}; expected the total "
        f"electron density.{' `--accept not_total` reads it nevertheless.' if partial else ''}"
    )
