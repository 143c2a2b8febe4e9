"""The pseudopotentials of the embedded densities, in the format of other codes.

eminus contains the GTH-PBE parameters in CP2K's form. Quantum ESPRESSO (upflib/gth.f90) and ABINIT read the same values
in ABINIT's format 10: title; atomic number, valence, date; format, functional (11: PBE), largest l, l of the local
part, mesh, r2well; r_loc, number of C, C1 ...; largest l again; for each l its radius, number of projectors, the rows
of the upper triangle of h, and for l > 0 the same number of rows of the spin-orbit k.
"""

import importlib.util
from collections.abc import Iterable
from typing import Any

from tomat.base.errors import TomatError
from tomat.data.density.elements import atomic_number

FUNCTIONAL = "pbe"
"""Functional of the embedded densities and their pseudopotentials."""


def require_eminus() -> None:
    """Raise an error if eminus is not installed.

    Raises:
        TomatError: eminus is not installed.
    """
    if importlib.util.find_spec("eminus") is None:
        raise TomatError("eminus is not installed; install it with `uv sync --extra demo-data`.")


def gth_text(symbol: str, valence: int) -> str:
    """The text of one element's file. Quantum ESPRESSO recognizes the format by the ending `.gth` of the file name.

    Raises:
        TomatError: eminus is not installed, or has no such pseudopotential.
    """
    require_eminus()
    from eminus.io.gth import read_gth

    parameters: dict[str, Any] = dict(read_gth(symbol, valence, FUNCTIONAL))
    if parameters["Zion"] != valence:
        raise TomatError(f"eminus has no GTH pseudopotential of {symbol} with {valence} valence electrons.")
    largest_l = parameters["lmax"] - 1
    lines = [
        f"GTH-{FUNCTIONAL.upper()}-q{valence} {symbol}",
        f"{atomic_number(symbol)} {valence} 0",
        # The local part gets an l above all channels: with the largest l, Quantum ESPRESSO would count one less.
        f"10 11 {largest_l} {largest_l + 1} 0 0",
        f"{parameters['rloc']:.8f} 4 {_row(parameters['cloc'])}",
        str(largest_l),
    ]
    for l in range(largest_l + 1):  # noqa: E741 (the field's letter)
        n = parameters["Nproj_l"][l]
        rows = [parameters["h"][l][i, i:n] for i in range(n)]
        lines.append(f"{parameters['rp'][l]:.8f} {n} {_row(rows[0]) if n else ''}".rstrip())
        lines += [_row(row) for row in rows[1:]]
        if l > 0:
            lines += [_row([0.0] * len(row)) for row in rows]
    return "\n".join(lines) + "\n"


def _row(values: Iterable[float]) -> str:
    return " ".join(f"{value:.8f}" for value in values)
