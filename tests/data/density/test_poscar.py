import gzip
import io
import logging
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.data.density.limits import BoundedText
from tomat.data.density.poscar import check_species_used, read_header, species_of
from tomat.data.density.rules import ReadRules

SODIUM = """bcc sodium, VASP 4
 1.0
 4.29 0.0 0.0
 0.0 4.29 0.0
 0.0 0.0 4.29
{}2
Direct
 0.0 0.0 0.0
 0.5 0.5 0.5

"""


def header(text):
    return read_header(BoundedText(io.BytesIO(text.encode()), "file"))


@given(
    st.lists(
        st.tuples(st.sampled_from(["Na", "Mg_pv", "O/79d9987ad87", "Cl", "U"]), st.integers(1, 4)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from(["1.0", "2.5", "-300.0"]),
    st.sampled_from(["Direct", "Cartesian", "Selective dynamics\nDirect", "  direct", "Selective\nCart"]),
    st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_whole_header_is_read_as_pymatgen_does(groups, scale, mode, seed):
    from pymatgen.io.vasp import Poscar

    if scale[0] == "-" and "art" in mode:
        mode = "Direct"  # pymatgen multiplies Cartesian places by the negative volume
    rng = np.random.default_rng(seed)
    lattice = rng.uniform(-1, 1, (3, 3)) + 4 * np.eye(3)
    lines = ["title", scale, *(" ".join(f"{x:.8f}" for x in row) for row in lattice)]
    if len(groups) > 20:  # pymatgen strips what follows the symbol on the first line only
        groups = [(re.split("[_/]", symbol)[0], count) for symbol, count in groups]
    for kind in range(2):  # VASP starts a new line after 20 groups
        words = [str(group[kind]) for group in groups]
        lines += [" ".join(words[start : start + 20]) for start in range(0, len(words), 20)]
    lines.append(mode)
    flags = " T F T" if mode[0] == "S" else ""
    n_atoms = sum(count for _, count in groups)
    lines += [" ".join(f"{x:.8f}" for x in rng.uniform(-0.5, 1.5, 3)) + flags for _ in range(n_atoms)]
    text = "\n".join(lines) + "\n\n"
    found = header(text)
    expected = Poscar.from_str(text).structure
    assert species_of(found, Path("CHGCAR"), ReadRules()).tolist() == list(expected.atomic_numbers)
    np.testing.assert_allclose(found.lattice, expected.lattice.matrix, rtol=1e-9)
    np.testing.assert_allclose(found.frac_coords, expected.frac_coords, atol=1e-9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Na\n2", "Mg O F\n1 1", r"names Mg O F, but there are 2 count\(s\): 1 1"),
        ("Na\n2", "Nq\n2", "names 'Nq', which is no element"),
        ("Na\n2", "Na\n99999999", "the cell has 99,999,999 atoms; expected 1 to 10,000"),
        ("Na\n2", "Na\n0", "expected at least one in each group"),
        ("Na\n2", "Na\n1", "after the last atom of 1; expected an empty line"),
        (" 1.0\n", " 0.0\n", "the scale is"),
        ("4.29 0.0 0.0", "nan 0.0 0.0", "where a lattice vector is expected"),
        (" 4.29 0.0 0.0", " 0.0 4.29 0.0", "flat"),
        (" 0.0 0.0 0.0\n 0.5 0.5 0.5\n\n", "", "not a complete structure header: it ends before .* atom 1 of 2"),
    ],
)
def test_damaged_headers(old, new, message):
    text = SODIUM.format("Na\n")
    assert old in text
    with pytest.raises(TomatError, match=message):
        header(text.replace(old, new, 1))


def with_symbols(first, second, line=""):
    """A header whose coordinate lines end in elements."""
    text = SODIUM.format(line).replace("0.5 0.5 0.5", f"0.5 0.5 0.5 {second}")
    return text.replace("0.0 0.0 0.0\n 0.5", f"0.0 0.0 0.0 {first}\n 0.5")


def test_atoms_that_are_not_sorted_are_as_many_groups():
    rows = "".join(f"{i / 1000} 0 0\n" for i in range(1000))
    text = SODIUM.split("{}")[0] + "Na   Cl   " * 500 + "\n" + "     1" * 1000 + f"\nDirect\n{rows}\n"
    assert header(text).elements == ("Na", "Cl") * 500


def test_logicals_without_selective_dynamics_are_no_fluorine():
    assert header(with_symbols("F F F", "F F F")).elements is None
    assert header(with_symbols("F F F Na", "F F F Na")).elements == ("Na", "Na")
    assert header(with_symbols("F", "F")).elements == ("F", "F")


def species(tmp_path, text="", **rules):
    found = header(text or SODIUM.format(""))
    return species_of(found, tmp_path / "CHGCAR", ReadRules(**rules))


def test_species_from_the_flag_or_the_ends_of_the_lines(tmp_path):
    scaled = header(SODIUM.format("").replace(" 1.0\n", " 1.0 2.0 3.0\n", 1))
    np.testing.assert_allclose(scaled.lattice, np.diag([4.29, 8.58, 12.87]))
    remedies = r"CHGCAR names no elements.*--species Na, or put the POSCAR, CONTCAR or POTCAR"
    with pytest.raises(TomatError, match=remedies):
        species(tmp_path)
    assert species(tmp_path, species=("Na",)).tolist() == [11, 11]
    with pytest.raises(TomatError, match=r"1 group\(s\) of 2 atom\(s\), but --species names Na Cl"):
        species(tmp_path, species=("Na", "Cl"))
    text = with_symbols("Na", "Na")
    assert species(tmp_path, text).tolist() == species(tmp_path, text, species=("Na",)).tolist() == [11, 11]
    line = "Mg O\n"
    text = with_symbols("Mg", "O", line).replace("O\n2\n", "O\n1 1\n")
    assert species(tmp_path, text).tolist() == [12, 8]
    with pytest.raises(TomatError, match="line names Mg O, but the ends of the coordinate lines differ.*: O Mg"):
        species(tmp_path, with_symbols("O", "Mg", line).replace("O\n2\n", "O\n1 1\n"))


@pytest.mark.parametrize("text", [SODIUM.format("Na\n"), with_symbols("Na", "Na")])
@pytest.mark.parametrize("flag", [("K",), ("Na", "Cl")])
def test_the_flag_leaves_a_file_that_names_its_elements_alone_and_says_so(tmp_path, caplog, text, flag):
    assert species(tmp_path, text, species=flag).tolist() == [11, 11]
    (said,) = caplog.messages
    assert f"names its elements, Na; --species {' '.join(flag)} is for files that name none" in said


def test_the_flag_is_refused_where_every_file_names_its_elements(tmp_path):
    named, nameless, broken = (tmp_path / name for name in ("CHGCAR.1", "CHGCAR.2", "CHGCAR.3"))
    named.write_text(SODIUM.format("Na\n"))
    nameless.write_text(SODIUM.format(""))
    broken.write_text("x")
    rules = ReadRules(species=("K",))
    with pytest.raises(TomatError, match="CHGCAR.1 names Na, --species K; the flag is for files that name none"):
        check_species_used([str(named), str(named)], rules)
    for paths in ([named, nameless], [named, broken], [nameless]):
        check_species_used(map(str, paths), rules)
    check_species_used([str(named)], ReadRules(species=("Na",)))
    check_species_used([str(named)], ReadRules())


@pytest.mark.parametrize("name", ["POSCAR", "CONTCAR", "POTCAR", "POSCAR.gz"])
def test_species_from_beside_are_taken_and_said(tmp_path, caplog, name):
    content = SODIUM.format("Na_pv\n")
    if name == "POTCAR":
        content = " PAW_PBE Na_pv 19Sep2006\n   VRHFIN =Na: s1p0\n   TITEL  = PAW_PBE Na_pv 19Sep2006\n"
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    with caplog.at_level(logging.WARNING):
        assert species(tmp_path).tolist() == [11, 11]
    assert f"taken from the {name} beside it: Na" in caplog.text


def test_what_lies_beside_must_fit(tmp_path):
    sodium = SODIUM.format("Na\n")
    for content, why in (
        (sodium.replace("\n2\n", "\n1\n").replace(" 0.5 0.5 0.5\n", ""), "POSCAR has Na 1"),
        (SODIUM.format(""), "POSCAR names no element either"),
        (sodium.replace(" 1.0\n", " 1.1\n", 1), r"POSCAR has a cell of 105.1 A\^3, this one 78.95 A\^3"),
        ("broken", ".*POSCAR is not a complete structure header"),
    ):
        (tmp_path / "POSCAR").write_text(content)
        with pytest.raises(TomatError, match=f"does not fit: {why}"):
            species(tmp_path)
    assert species(tmp_path, species=("K",)).tolist() == [19, 19]
    (tmp_path / "POSCAR").write_text(sodium.replace(" 1.0\n", " 1.05\n", 1))  # 16 % more
    assert species(tmp_path).tolist() == species(tmp_path, species=("Na",)).tolist() == [11, 11]
    with pytest.raises(TomatError, match=r"--species K, but POSCAR beside it has Na\. Correct the flag"):
        species(tmp_path, species=("K",))
    # Where the files beside it differ, the flag is the way out.
    (tmp_path / "POTCAR").write_text("   VRHFIN =K: s1\n")
    with pytest.raises(TomatError, match="POSCAR beside it has Na, POTCAR beside it has K. Name them with --species"):
        species(tmp_path)
    assert species(tmp_path, species=("K",)).tolist() == [19, 19]
    (tmp_path / "POTCAR").write_text("   VRHFIN =Na: s1\n   VRHFIN =Cl: p5\n")
    assert species(tmp_path).tolist() == [11, 11]


@pytest.mark.parametrize("name", ["mp-2.CHGCAR", "mp-2.vasp", "CHGCAR.mp-2", "CHGCAR_mp-2.gz"])
def test_a_collection_takes_no_elements_from_a_neighbour(tmp_path, name):
    """A folder of many densities holds no POSCAR of each: that of sodium would make every crystal of two atoms one."""
    (tmp_path / "POSCAR").write_text(SODIUM.format("Na\n"))
    with pytest.raises(TomatError, match="names no elements.*a folder of their own and this as CHGCAR"):
        species_of(header(SODIUM.format("")), tmp_path / name, ReadRules())
    for own in ("CHGCAR", "CHGCAR.gz", "CHG", "AECCAR2.bz2", "CHGCAR.xz"):
        assert species_of(header(SODIUM.format("")), tmp_path / own, ReadRules()).tolist() == [11, 11]
