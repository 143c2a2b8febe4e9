"""A6: files that were read as another material, or as a density they do not hold, and what is made of them now."""

import gzip

import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.codec.inputs import path_inputs
from tomat.data.density.io import open_density

SODIUM = {"lattice": 4.29 * np.eye(3), "symbols": ("Na",), "counts": (2,), "electrons": 2}
MAGNESIA = {"lattice": 2.98 * np.eye(3), "symbols": ("Mg", "O"), "counts": (1, 1), "electrons": 8}


def values_of(crystal, side=29):
    """rho x V on `side`^3 voxels: a Gaussian at each of two atoms in a body-centred cell, and a floor."""
    axis = np.arange(side) / side
    rho = np.full((side,) * 3, 0.1)
    for atom in (0.0, 0.5):
        wave = np.exp(4 * (np.cos(2 * np.pi * (axis - atom)) - 1))
        rho += np.einsum("i,j,k->ijk", wave, wave, wave)
    return rho * crystal["electrons"] / rho.mean()


def chgcar(crystal, values=None, **changes):
    """The text that VASP writes; `changes` replace a part of the header."""
    values = values_of(crystal) if values is None else values
    parts = {
        "lattice": crystal["lattice"],
        "species": " ".join(crystal["symbols"]) + "\n",
        "counts": " ".join(map(str, crystal["counts"])),
        "coords": np.array([[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]),
        "grid": values.shape,
    } | changes
    rows = "\n".join("  ".join(f"{number:.6f}" for number in row) for row in parts["lattice"])
    coords = "\n".join("  ".join(f"{number:.6f}" for number in row) for row in parts["coords"])
    head = f"title\n 1.0\n{rows}\n{parts['species']}{parts['counts']}\nDirect\n{coords}\n\n"
    words = [f"{number:.11E}" for number in values.ravel(order="F")]
    lines = "\n".join(" ".join(words[start : start + 5]) for start in range(0, len(words), 5))
    return head + "  ".join(map(str, parts["grid"])) + "\n" + lines + "\n"


def zeroed(values, kind):
    """A tenth of the values lost."""
    lost = values.ravel(order="F").copy()
    size = lost.size // 10
    if kind == "scattered":
        lost[np.random.default_rng(0).choice(lost.size, size, replace=False)] = 0
    else:
        start = {"front": 0, "middle": lost.size // 2, "end": lost.size - size}[kind]
        lost[start : start + size] = 0
    return lost.reshape(values.shape, order="F")


CASES = {
    "VASP 4, no species line (Na)": lambda: chgcar(SODIUM, species=""),
    "Mg O F over two counts": lambda: chgcar(MAGNESIA, species="Mg O F\n"),
    "Mg over two counts": lambda: chgcar(MAGNESIA, species="Mg\n"),
    "a count less than coordinates": lambda: chgcar(SODIUM, counts="1"),
    "a count more than coordinates": lambda: chgcar(SODIUM, counts="3"),
    "grid 29 29 28 over 29^3 values": lambda: chgcar(MAGNESIA, grid=(29, 29, 28)),
    "grid 29 29 30 over 29^3 values": lambda: chgcar(MAGNESIA, grid=(29, 29, 30)),
    "lattice in bohr": lambda: chgcar(MAGNESIA, lattice=MAGNESIA["lattice"] / 0.529177),
    "lattice times 10": lambda: chgcar(MAGNESIA, lattice=MAGNESIA["lattice"] * 10),
    "lattice over 10": lambda: chgcar(MAGNESIA, lattice=MAGNESIA["lattice"] / 10),
    "two atoms at one place": lambda: chgcar(MAGNESIA, coords=np.full((2, 3), 0.25)),
    "two atoms 0.3 A apart": lambda: chgcar(MAGNESIA, coords=np.array([[0, 0, 0], [0.1, 0, 0]])),
    **{
        f"a tenth zeroed, {kind}": lambda kind=kind: chgcar(MAGNESIA, zeroed(values_of(MAGNESIA), kind))
        for kind in ("front", "middle", "end", "scattered")
    },
}


def outcome(read):
    """ "refused", or as what a file was accepted."""
    try:
        grid = read()
    except TomatError:
        return "refused"
    return (
        f"accepted as {grid.formula} with {grid.atomic_numbers.size} atoms, {grid.grid_shape}, "
        f"{grid.volume_a3:.4g} A^3, {grid.electron_count:.4g} electrons"
    )


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_or_incomplete_file_is_refused(tmp_path, figure, case):
    (tmp_path / "CHGCAR").write_text(CASES[case]())
    # The two ways into every verb: `tokenise` and `codec fit`, and `retokenize`.
    fitted = outcome(lambda: path_inputs([str(tmp_path / "CHGCAR")]).get_grid(tmp_path.name))
    opened = outcome(lambda: open_density(tmp_path / "CHGCAR"))
    figure("A6", case, fitted)
    assert fitted == opened == "refused"


@pytest.mark.parametrize("name", ["AECCAR0", "AECCAR1.gz", "mp-1.AECCAR0.vasp", "PARCHG", "PARCHG.0010.ALLK.vasp"])
def test_a_density_that_is_not_total_is_refused_by_name(tmp_path, figure, name):
    content = chgcar(SODIUM).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    found = outcome(lambda: open_density(tmp_path / name))
    figure("A6", name, found)
    assert found == "refused"


@pytest.mark.parametrize("crystal", [SODIUM, MAGNESIA], ids=["Na", "MgO"])
def test_the_whole_file_is_read(tmp_path, figure, crystal):
    (tmp_path / "CHGCAR").write_text(chgcar(crystal))
    figure(
        "A6", f"the whole file of {' '.join(crystal['symbols'])}", outcome(lambda: open_density(tmp_path / "CHGCAR"))
    )
    values = open_density(tmp_path / "CHGCAR").rho_times_volume()
    np.testing.assert_allclose(values, values_of(crystal), rtol=1e-6)
