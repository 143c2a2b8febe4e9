import bz2
import gzip
import lzma
import re

import numpy as np
import pytest
from chgcar_files import as_vasp_writes

from tomat.base.errors import TomatError
from tomat.data.density.chgcar import Parts, read_chgcar, read_parts
from tomat.data.density.rules import ReadRules

HELIUM = """He
1.0
 3.0 0.0 0.0
 0.0 2.0 0.0
 0.0 0.0 4.0
He
 1
Direct
 0.0 0.0 0.0

 3 2 1
 {} {} {} {} {}
 {}
"""
"""3 x 2 x 1 voxels of helium in a cell of 24 A^3."""


def test_a_chgcar_written_by_hand_runs_x_fastest(tmp_path):
    (tmp_path / "CHGCAR").write_text(HELIUM.format(0.5, 1.0, 2.0, 2.5, 2.6, 3.4))
    grid = read_chgcar(tmp_path / "CHGCAR")
    expected = np.array([[[0.5], [2.5]], [[1.0], [2.6]], [[2.0], [3.4]]]) / 24
    np.testing.assert_allclose(grid.rho, expected, rtol=1e-6)
    assert grid.electron_count == pytest.approx(2)
    with pytest.raises(TomatError, match="no CHGCAR at .*absent"):
        read_chgcar(tmp_path / "absent")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(("spin_blocks", "augmentation"), [(0, False), (0, True), (1, True), (3, False)])
def test_what_vasp_writes_is_read(tmp_path, grid, spin_blocks, augmentation, newline):
    text = as_vasp_writes(grid, spin_blocks=spin_blocks, augmentation=augmentation, newline=newline)
    (tmp_path / "CHGCAR").write_bytes(text.encode())
    back = read_chgcar(tmp_path / "CHGCAR")
    np.testing.assert_allclose(back.rho, grid.rho, rtol=1e-5)
    assert back.atomic_numbers.tolist() == [3, 9] and back.clipped_voxels == 0
    if newline == "\n":
        from pymatgen.io.vasp import Chgcar

        expected = np.asarray(Chgcar.from_file(tmp_path / "CHGCAR").data["total"]) / grid.volume_a3
        np.testing.assert_allclose(back.rho, expected, rtol=1e-6)
    (tmp_path / "CHGCAR.gz").write_bytes(gzip.compress(text.encode()))
    np.testing.assert_array_equal(read_chgcar(tmp_path / "CHGCAR.gz").rho, back.rho)


def test_negative_values_and_exponents_of_three_digits(tmp_path):
    text = HELIUM.format("0.50000000000E+00", "-.10000000000-104", "2.0", "2.5", "2.6", "4.5")
    (tmp_path / "CHGCAR").write_text(text)
    grid = read_chgcar(tmp_path / "CHGCAR", rules=ReadRules(accept=("fractional_electrons",)))
    np.testing.assert_allclose(grid.rho[1, 0, 0], 0)
    assert grid.clipped_voxels == 1 and grid.rho[0, 0, 0] == pytest.approx(0.5 / 24)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_exponents_of_fortran_are_read_everywhere(tmp_path, grid, pack):
    """D in the header, the values, the occupancies, the moments and the spin density."""
    text = as_vasp_writes(grid, spin_blocks=1)
    (tmp_path / "e.CHGCAR").write_text(text)
    content = re.sub(r"(\.\d{6})(?=\s)", r"\1d0", re.sub(r"(\d)E([+-])", r"\1D\2", text))
    (tmp_path / "d.CHGCAR").write_bytes(pack(content.encode()))
    assert content.count("d0") == 15 and content.count("D") > 200 and not re.search(r"\dE", content)
    plain, found = (read_chgcar(tmp_path / f"{name}.CHGCAR") for name in "ed")
    np.testing.assert_array_equal(found.rho, plain.rho)
    np.testing.assert_array_equal(found.lattice, plain.lattice)
    np.testing.assert_array_equal(found.frac_coords, plain.frac_coords)
    assert read_parts(tmp_path / "d.CHGCAR") == read_parts(tmp_path / "e.CHGCAR")


def test_one_value_on_a_line_keeps_its_exponent(tmp_path):
    """pymatgen's parser takes the 3.4 of 3.4D-01 for the whole word where it is the last of what it is given."""
    (tmp_path / "CHGCAR").write_text(HELIUM.format(0.5, 1.0, 2.0, 2.5, 2.66, "0.34D+01").replace("2.66 ", "2.66"))
    assert read_chgcar(tmp_path / "CHGCAR", rules=ReadRules(accept=("fractional_electrons",))).rho[2, 1, 0] == (
        pytest.approx(3.4 / 24)
    )
    for broken in ("3.4x", "3.4D", "3_4", "3.4+"):
        (tmp_path / "CHGCAR").write_text(HELIUM.format(0.5, 1.0, 2.0, 2.5, 2.6, broken))
        with pytest.raises(TomatError, match="found '3.4|found '3_4"):
            read_chgcar(tmp_path / "CHGCAR")


@pytest.mark.parametrize(("per_line", "spin_blocks"), [(5, 0), (7, 1), (10, 3)])
def test_zeros_that_fill_a_last_line_are_no_damage(tmp_path, make_grid, per_line, spin_blocks):
    """In every block: 6 x 11 x 4 = 264 values, 13 occupancies and 2 moments are multiples of none of these."""
    grid = make_grid((6, 11, 4))
    text = as_vasp_writes(grid, spin_blocks=spin_blocks, per_line=per_line)
    padded = as_vasp_writes(grid, spin_blocks=spin_blocks, per_line=per_line, fill=" 0.00000000000E+00")
    assert len(padded) > len(text)
    for name, content in (("a", text), ("b", padded)):
        (tmp_path / f"{name}.CHGCAR").write_text(content)
    np.testing.assert_array_equal(*(read_chgcar(tmp_path / f"{name}.CHGCAR").rho for name in "ab"))
    assert read_parts(tmp_path / "b.CHGCAR") == Parts(spin_blocks, True)
    # What is no zero, and a whole line of zeros, are values too many.
    for fill in (" 0.00000000001E+00", " 0.00000000000E+00" * (per_line + 1)):
        (tmp_path / "CHGCAR").write_text(as_vasp_writes(grid, per_line=per_line, fill=fill, augmentation=False))
        with pytest.raises(TomatError, match="it is damaged|values are left over"):
            read_chgcar(tmp_path / "CHGCAR")


def test_a_bomb_behind_a_small_header_is_refused_early(tmp_path):
    head = HELIUM.format(0.5, 1.0, 2.0, 2.5, 2.6, 3.4)
    with gzip.open(tmp_path / "CHGCAR.gz", "wb", compresslevel=1) as file:
        file.write(head.encode())
        for _ in range(20):
            file.write((b" " * 63 + b"\n") * (1 << 14))
    with pytest.raises(TomatError, match="has more than .* bytes, too many for a density"):
        read_chgcar(tmp_path / "CHGCAR.gz")


def test_a_part_is_accepted_by_its_name_alone_and_all_electrons_are_total(tmp_path):
    """`--accept not_total` for one AECCAR0 must not let a CHGCAR in another unit in."""
    text = HELIUM.format(*[0.01 * value for value in (0.5, 1.0, 2.0, 2.5, 2.6, 3.4)])
    for name in ("AECCAR0", "CHGCAR"):
        (tmp_path / name).write_text(text)
    rules = ReadRules(accept=("not_total",))
    assert read_chgcar(tmp_path / "AECCAR0", rules=rules).electron_count == pytest.approx(0.02)
    with pytest.raises(TomatError, match="average to 0.02"):
        read_chgcar(tmp_path / "CHGCAR", rules=rules)
    (tmp_path / "AECCAR2").write_text(HELIUM.format(0.5, 1.0, 2.0, 2.5, 2.6, 3.4))
    assert read_chgcar(tmp_path / "AECCAR2").formula == "He"
