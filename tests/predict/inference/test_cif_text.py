"""What is counted of a CIF before pymatgen parses it, and what is left out."""

import time
import warnings

import pytest
from pymatgen.core import Lattice, Structure
from pymatgen.io.cif import CifParser, CifWriter

from tomat.base.errors import TomatError
from tomat.predict.inference.cif_text import MOST_IMAGES, bounded_cif

SALT = Structure.from_spacegroup("Fm-3m", Lattice.cubic(5.64), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]])


def many_sites(count: int, operations: int = 1) -> str:
    head = "data_x\n" + "".join(f"_cell_length_{axis} 60\n" for axis in "abc")
    head += "".join(f"_cell_angle_{angle} 90\n" for angle in ("alpha", "beta", "gamma"))
    head += "loop_\n_symmetry_equiv_pos_as_xyz\n" + "'x,y,z'\n" * operations
    names = "loop_\n _atom_site_label\n _atom_site_fract_x\n _atom_site_fract_y\n _atom_site_fract_z\n"
    return head + names + "Na 0.1 0.2 0.3\n" * count


@pytest.mark.parametrize("symprec", [None, 0.01])
def test_what_pymatgen_writes_is_left_as_it_means(symprec):
    text = str(CifWriter(SALT, symprec=symprec))
    more = "loop_\n_refln_index_h\n_refln_F_meas\n" + "1 2.5\n" * 50 + "\n\n_audit_author 'A [x] B'\n"
    found = bounded_cif(text.replace("loop_\n", more + "loop_\n", 1), "a.cif")
    assert "_refln" not in found and "\n\n" not in found and "A [x] B" in found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = (CifParser.from_str(each).parse_structures(primitive=False)[0] for each in (found, text))
    assert ours == theirs and len(ours) == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (many_sites(20_000), "a.cif: the cell has 20,000 atoms; expected 1 to 10,000"),
        (
            many_sites(101, 200),
            f"101 sites and 200 operations of symmetry, 20,200 images; expected at most {MOST_IMAGES:,}",
        ),
        (
            many_sites(200).replace(
                "loop_\n_symmetry_equiv_pos_as_xyz\n'x,y,z'", "_space_group_name_H-M_alt 'F m -3 m'"
            ),
            "200 sites and 192 operations",
        ),
        (many_sites(1) + "'x" * 100_000, "lines of thousands of quotes"),
    ],
    ids=["sites", "images", "group", "quotes"],
)
def test_what_would_take_pymatgen_minutes_is_refused(text, message):
    with pytest.raises(TomatError, match=message):
        bounded_cif(text, "a.cif")


@pytest.mark.parametrize("filler", ["\n", " ", "#", "loop_\n", "_x\n", "loop_\n_atom_site_fract_x\n", " \n"])
def test_the_look_takes_time_in_proportion(filler):
    """Blank lines and loops without end were searched again from each of them."""
    started = time.process_time()
    text = many_sites(4) + filler * (2_000_000 // len(filler))
    bounded_cif(text, "a.cif")
    assert time.process_time() - started < 10


@pytest.mark.parametrize("group", ["'P 1'", "P1", "?", '"P 1"'])
def test_no_symmetry_by_name_is_one_operation(group):
    text = many_sites(2_000).replace(
        "loop_\n_symmetry_equiv_pos_as_xyz\n'x,y,z'", f"_symmetry_space_group_name_H-M {group}"
    )
    assert "_atom_site_fract_x" in bounded_cif(text, "a.cif")
