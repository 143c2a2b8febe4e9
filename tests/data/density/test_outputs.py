"""What is written is read back with pymatgen: values, order, units, spacing."""

import dataclasses
import math
import signal
import subprocess
import sys

import numpy as np
import pytest
from pymatgen.core import Structure
from pymatgen.io.common import VolumetricData
from pymatgen.io.vasp import Chgcar
from scipy.io import FortranFile
from small_promolecule import skewed, skewed_density

from tomat.base.errors import TomatError
from tomat.data.density.chgcar import Parts, read_augmentation, read_chgcar, read_parts
from tomat.data.density.espresso import read_coefficients
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.grid import DensityGrid
from tomat.data.density.io import open_density
from tomat.data.density.outputs import CHARGE_DENSITY, FORMATS, WRITING, OutputError, size_bytes, write_density
from tomat.data.density.rules import ReadRules
from tomat.data.density.zarr_store import read_zarr


@pytest.fixture
def structure() -> Structure:
    return skewed()


@pytest.fixture
def grid() -> DensityGrid:
    return skewed_density()


def test_a_chgcar_is_read_by_pymatgen_and_by_the_strict_reader(tmp_path, grid, structure):
    path = tmp_path / "NaF.CHGCAR"
    write_density(grid, path, "chgcar")
    found = Chgcar.from_file(str(path))
    assert np.allclose(found.data["total"], grid.rho * grid.volume_a3, rtol=1e-6)
    assert found.dim == (6, 5, 4) and np.allclose(found.structure.lattice.matrix, structure.lattice.matrix, atol=1e-6)
    assert [str(site.specie) for site in found.structure] == ["Na", "F"]
    assert np.allclose(found.structure.frac_coords, structure.frac_coords, atol=1e-6)
    again = read_chgcar(path)
    assert np.allclose(again.rho, grid.rho, rtol=1e-6) and again.electron_count == pytest.approx(8, rel=1e-6)
    coords = np.random.default_rng(2).random((4, 3))
    mixed = DensityGrid(grid.rho * 2, grid.lattice, np.array([9, 11, 9, 11]), coords, "x")
    write_density(mixed, tmp_path / "CHGCAR", "chgcar")
    assert [site.specie.Z for site in Chgcar.from_file(str(tmp_path / "CHGCAR")).structure] == [9, 11, 9, 11]
    # x fastest: the second number of the values is the neighbour along x.
    values = path.read_text().partition("   6   5   4\n")[2].split()
    assert float(values[1]) == pytest.approx(float(grid.rho[1, 0, 0]) * grid.volume_a3, rel=1e-6)


def test_a_cube_is_in_bohr(tmp_path, grid, structure):
    write_density(grid, tmp_path / "NaF.cube", "cube")
    found = VolumetricData.from_cube(str(tmp_path / "NaF.cube"))
    assert np.allclose(found.data["total"] / BOHR_A**3, grid.rho, rtol=1e-5)
    assert np.allclose(found.structure.lattice.matrix, structure.lattice.matrix, atol=1e-4)
    assert np.allclose(found.structure.cart_coords, structure.cart_coords, atol=1e-4)
    lines = (tmp_path / "NaF.cube").read_text().splitlines()
    voxel = np.array([[float(word) for word in line.split()[1:]] for line in lines[3:6]])
    volume_bohr3 = abs(np.linalg.det(voxel))
    assert found.data["total"].sum() * volume_bohr3 == pytest.approx(8, rel=1e-4)


def test_zarr_is_that_of_the_data_sets_and_replaced_whole(tmp_path, grid):
    for factor in (1.0, 1.01):
        changed = dataclasses.replace(grid, rho=grid.rho * factor)
        write_density(changed, tmp_path / "NaF.zarr", "zarr", metadata={"predictor": "p"})
        found = read_zarr(tmp_path / "NaF.zarr", rules=ReadRules(accept=("fractional_electrons",)))
        assert np.allclose(found.rho, changed.rho, rtol=1e-6)
    assert [each.name for each in tmp_path.iterdir()] == ["NaF.zarr"] and (size_bytes(tmp_path / "NaF.zarr") or 0) > 500


AUGMENTATION = """augmentation occupancies   1   6
  0.2512469E-04  0.2601868E-21  0.1316082E-11 -0.3207091E-12  0.1861221E-11
 -0.1679365E-11
augmentation occupancies   2   3
  0.6668695E-04 -0.1982265E-02  0.0000000E+00
"""


def test_augmentation_occupancies_are_copied_to_the_letter_and_never_made_up(tmp_path, grid):
    write_density(grid, tmp_path / "none.CHGCAR", "chgcar")
    assert "augmentation" not in (tmp_path / "none.CHGCAR").read_text()
    with pytest.raises(TomatError, match="occupancies of 0 of 2 atoms"):
        read_augmentation(tmp_path / "none.CHGCAR")
    source = tmp_path / "CHGCAR"
    spin = "".join(f" {each:.10E}\n" for each in np.zeros(120))
    source.write_text((tmp_path / "none.CHGCAR").read_text() + AUGMENTATION + f"  0.0 0.0\n   6   5   4\n{spin}")
    augmentation = read_augmentation(source)
    write_density(grid, tmp_path / "with.CHGCAR", "chgcar", augmentation=augmentation)
    text = (tmp_path / "with.CHGCAR").read_text()
    assert text == (tmp_path / "none.CHGCAR").read_text() + AUGMENTATION
    assert set(Chgcar.from_file(str(tmp_path / "with.CHGCAR")).data_aug["total"]) == {1, 2}
    other = DensityGrid(grid.rho, grid.lattice, grid.atomic_numbers[::-1], grid.frac_coords, "FNa")
    with pytest.raises(TomatError, match=r"2 atoms \(Na F\), FNa has 2 atoms \(F Na\)"):
        write_density(other, tmp_path / "other.CHGCAR", "chgcar", augmentation=augmentation)
    source.write_text(source.read_text().partition("augmentation occupancies   2")[0])
    with pytest.raises(TomatError, match="occupancies of 1 of 2 atoms"):
        read_augmentation(source)
    source.write_text(source.read_text().partition(" -0.1679365E-11")[0])
    with pytest.raises(TomatError, match="ends within the augmentation occupancies of atom 1"):
        read_augmentation(source)
    assert not (tmp_path / "other.CHGCAR").exists()


def columns(atom, count, imaginary=False):
    """As VASP's `2I4`."""
    label = "augmentation occupancies" + " (imaginary part)" * imaginary
    return label + "".join(f"{each:4d}" if each < 10_000 else "****" for each in (atom, count)) + "\n"


def occupancies(values, exponent="E"):
    return "".join(f" {each:.7E}\n" for each in values).replace("E", exponent)


@pytest.mark.parametrize(
    ("n_atoms", "most", "soc", "exponent"),
    [(3, 1234, True, "D"), (1001, 2, True, "E"), (10_000, 1, False, "E")],
)
def test_augmentation_of_any_calculation_is_what_pymatgen_reads(tmp_path, n_atoms, most, soc, exponent):
    """Columns that have grown together (1,000 atoms, 1,000 values), that overflow (10,000), with imaginary parts."""
    side = math.ceil(n_atoms ** (1 / 3))
    coords = np.array(list(np.ndindex(side, side, side)))[:n_atoms] / side
    rho = np.random.default_rng(1).uniform(0.1, 1.0, (6, 5, 4))
    cell = np.eye(3) * 3 * side
    rho *= n_atoms / (rho.mean() * np.linalg.det(cell))
    grid = DensityGrid(rho, cell, np.full(n_atoms, 3), coords, "Li")
    write_density(grid, tmp_path / "plain.CHGCAR", "chgcar")
    rng = np.random.default_rng(2)
    expected = {}
    total, blocks = "", ""
    for block in range(1 + 3 * soc):
        text = "" if not block else "   6   5   4\n" + occupancies(np.zeros(120), exponent)
        for atom in range(1, n_atoms + 1):
            values = rng.normal(size=most if atom == n_atoms else 1).round(4) * 1e-3
            text += columns(atom, len(values)) + occupancies(values, exponent)
            if soc:
                imaginary = rng.normal(size=len(values)).round(4)
                text += columns(atom, len(values), True) + occupancies(imaginary, exponent)
                values = values + 1j * imaginary
            if not block:
                expected[atom] = values
        total, blocks = (text, blocks) if not block else (total, blocks + text)
    source = tmp_path / "CHGCAR"
    source.write_text((tmp_path / "plain.CHGCAR").read_text() + total + blocks)
    assert read_parts(source) == Parts(3 * soc, True)
    for form, again in (("once", source), ("twice", tmp_path / "once.CHGCAR")):
        augmentation = read_augmentation(again)
        write_density(read_chgcar(again), tmp_path / f"{form}.CHGCAR", "chgcar", augmentation=augmentation)
    assert (tmp_path / "once.CHGCAR").read_bytes() == (tmp_path / "twice.CHGCAR").read_bytes()
    found = Chgcar.from_file(str(tmp_path / "once.CHGCAR"))
    assert np.allclose(found.data["total"], grid.rho * grid.volume_a3, rtol=1e-5)
    assert found.data_aug["total"].keys() == expected.keys()
    for atom, values in expected.items():
        np.testing.assert_allclose(found.data_aug["total"][atom], values, rtol=1e-6)
    # VASP's own columns stand where it looks for them.
    if exponent == "E":
        heads = [line for line in total.splitlines(keepends=True) if "aug" in line]
        ours = [line for line in (tmp_path / "once.CHGCAR").read_text().splitlines() if "aug" in line]
        assert all(line.startswith(head.rstrip("\n")) for line, head in zip(ours, heads, strict=True))


def test_damaged_heads_of_occupancies_and_missing_imaginary_parts_are_refused(tmp_path, grid):
    write_density(grid, tmp_path / "CHGCAR", "chgcar")
    text = (tmp_path / "CHGCAR").read_text()
    for head in (" 1", "", "   1   x", "   1   2   1   3", "   1   2 (imaginary part)"):
        (tmp_path / "CHGCAR").write_text(f"{text}augmentation occupancies{head}\n  0.1 0.2\n")
        for read in (read_chgcar, read_augmentation):
            with pytest.raises(TomatError, match="expected an atom and the number of augmentation occupancies"):
                read(tmp_path / "CHGCAR")
    parts = [columns(1, 1) + occupancies([0.1]), columns(1, 1, True) + occupancies([0.2]), columns(2, 1) + "0.3\n"]
    (tmp_path / "CHGCAR").write_text(text + "".join(parts))
    with pytest.raises(TomatError, match="of 2 of 2 atoms, some without an imaginary part"):
        read_augmentation(tmp_path / "CHGCAR")


def test_a_charge_density_of_quantum_espresso_is_on_the_vectors_of_its_run(tmp_path, structure):
    """A plane wave along each axis, with a phase: rho(r) = sum of c(G) exp(i G r)."""
    reciprocal = 2 * np.pi * np.linalg.inv(structure.lattice.matrix / BOHR_A).T
    miller = np.array([[0, 0, 0], [0, -1, 0], [2, 0, 0], [0, 0, 1], [0, 1, 0], [1, 1, 1]], np.int32)
    template = tmp_path / "charge-density.dat"

    def write_template(n_spin, factor=1.0):
        with FortranFile(template, "w") as file:
            for record in (np.array([0, 6, n_spin], np.int32), reciprocal * factor, miller, np.zeros(6, np.complex128)):
                file.write_record(record)

    for n_spin, factor, message in ((2, 1, "has 2 spin components"), (1, 1e300, "vectors"), (1, np.nan, "vectors")):
        write_template(n_spin, factor)
        with pytest.raises(TomatError, match=message):
            read_coefficients(template)
    write_template(1)
    x, y, z = np.meshgrid(*(np.arange(n) / n for n in (5, 6, 7)), indexing="ij")
    waves = 0.2 * np.cos(2 * np.pi * 2 * x) + 0.1 * np.sin(2 * np.pi * y) + 0.05 * np.cos(2 * np.pi * z + 1.0)
    rho = 8 / structure.volume * (1 + waves)
    grid = DensityGrid(rho, structure.lattice.matrix, np.array([11, 9]), structure.frac_coords, "NaF")
    vectors, _ = read_coefficients(template)
    write_density(grid, tmp_path / "NaF.save", "qe", vectors=vectors)
    with FortranFile(tmp_path / "NaF.save" / CHARGE_DENSITY) as file:
        head, axes, indices = (file.read_record(kind) for kind in ("i4", "f8", "i4"))
        coefficients = np.asarray(file.read_record("c16"))
    assert list(head) == [0, 6, 1] and np.allclose(np.reshape(axes, (3, 3)), reciprocal)
    assert np.array_equal(np.reshape(indices, (6, 3)), miller)
    mean = 8 / (structure.volume / BOHR_A**3)
    expected = mean * np.array([1, 0.05j, 0.1, 0.025 * np.exp(1j), -0.05j, 0])
    assert np.abs(coefficients - expected).max() < 1e-6 * mean
    for sides, factor, message in (
        (4, 1, "grid 4 x 6 x 7 is too coarse"),
        (5, 1.01, "has a cell with axes of .* A, x"),
    ):
        wrong = DensityGrid(rho[:sides], grid.lattice * [[1], [1], [factor]], np.array([11, 9]), grid.frac_coords, "x")
        with pytest.raises(TomatError, match=message):
            write_density(wrong, tmp_path / "c.save", "qe", vectors=vectors)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["NaF.save", "charge-density.dat"]


def test_what_cannot_be_written_leaves_nothing(tmp_path, grid):
    (tmp_path / "file").write_text("x")
    for form in ("chgcar", "cube", "zarr"):
        with pytest.raises(OutputError, match="cannot write"):
            write_density(grid, tmp_path / "file" / f"NaF{FORMATS[form]}", form)
    for form, message in (("vasp", "no format 'vasp'"), ("qe", "only qe needs")):
        with pytest.raises(TomatError, match=message):
            write_density(grid, tmp_path / "NaF", form)
    few = dataclasses.replace(grid, rho=grid.rho / 100)
    with pytest.raises(TomatError, match="integrates to 0.08 electrons"):
        write_density(few, tmp_path / "NaF.CHGCAR", "chgcar")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


WRITER = """
import sys
from pathlib import Path
from tomat.data.density.outputs import write_density
from tomat.data.density.chgcar import read_chgcar
grid = read_chgcar(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(8):
    write_density(grid, Path(sys.argv[2]), sys.argv[3])
"""


def test_several_at_once_write_whole_files_and_leave_nothing(tmp_path, grid):
    form = "zarr"
    source, place = tmp_path / "CHGCAR", tmp_path / "out" / f"NaF.{form}"
    write_density(grid, source, "chgcar")
    words = [sys.executable, "-c", WRITER, str(source), str(place), form]
    at_once = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for each in at_once:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    assert [each.communicate("go\n")[1] for each in at_once] == [None] * 3
    assert [each.returncode for each in at_once] == [0, 0, 0]
    assert [each.name for each in place.parent.iterdir()] == [place.name]
    assert np.allclose(open_density(place).rho, read_chgcar(source).rho, rtol=1e-5)


def test_a_process_that_is_killed_as_it_writes_leaves_nothing_for_good(tmp_path, grid):
    source, place = tmp_path / "CHGCAR", tmp_path / "out" / "NaF.CHGCAR"
    write_density(grid, source, "chgcar")
    killed = """
import os, signal, sys
from tomat.data.density import outputs
outputs._exchange = lambda *at: os.kill(os.getpid(), signal.SIGKILL)
"""
    words = [sys.executable, "-c", killed + WRITER, str(source), str(place), "chgcar"]
    assert subprocess.run(words, input="go\n", capture_output=True, text=True).returncode == -signal.SIGKILL
    assert [each.name.startswith(WRITING) for each in place.parent.iterdir()] == [True]
    write_density(grid, place.with_name("other.cube"), "cube")
    assert [each.name for each in place.parent.iterdir()] == ["other.cube"]
