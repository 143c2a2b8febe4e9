"""Structures of every kind, written by pymatgen and read again; and what is refused, by name."""

import gzip
import json
import lzma
import time
import tracemalloc
import warnings

import numpy as np
import pytest
from ase import Atoms
from pymatgen.core import Lattice, Molecule, Structure
from pymatgen.io.cif import CifParser, CifWriter
from pymatgen.io.vasp import Chgcar, Poscar

from tomat.base.errors import TomatError
from tomat.data.density.rules import ReadRules
from tomat.predict.inference.structures import (
    MOST_IMAGES,
    NoStructureError,
    bounded_cif,
    crystal_of,
    find_structures,
    formula,
    read_structure,
)


def same(crystal, structure: Structure) -> None:
    assert np.allclose(crystal.lattice @ crystal.lattice.T, structure.lattice.matrix @ structure.lattice.matrix.T)
    assert crystal.atomic_numbers.tolist() == [site.specie.Z for site in structure]
    apart = crystal.frac_coords - structure.frac_coords
    assert np.abs(apart - np.round(apart)).max() < 1e-6


@pytest.mark.parametrize("name", ["POSCAR", "x.vasp", "x.cif", "x.xsf", "x.POSCAR.gz", "x.json.gz", "CHGCAR"])
def test_a_structure_is_what_was_written(tmp_path, structure, name):
    path = tmp_path / name
    plain = tmp_path / name.removesuffix(".gz")
    if name == "CHGCAR":
        Chgcar(structure, {"total": np.ones((2, 2, 2))}).write_file(str(path))
    elif "POSCAR" in name or name.endswith(".vasp"):
        Poscar(structure).write_file(str(plain), significant_figures=12)
    else:
        structure.to(filename=str(plain))
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(plain.read_bytes()))
    crystal, notes = read_structure(path)
    same(crystal, structure)
    assert crystal.name == (tmp_path.name if name in ("POSCAR", "CHGCAR") else "x") and not notes
    assert formula(crystal) == "F1 Na1"


def test_extended_xyz_has_a_lattice_and_plain_xyz_is_a_molecule(tmp_path, structure):
    lattice = " ".join(f"{each:.12f}" for each in structure.lattice.matrix.ravel())
    rows = [f"0.5 {site.specie} " + " ".join(f"{each:.12f}" for each in site.coords) for site in structure]
    path = tmp_path / "a.xyz"
    path.write_text(f'2\nLattice="{lattice}" Properties=q:R:1:species:S:1:pos:R:3 pbc="T T T"\n' + "\n".join(rows))
    same(read_structure(path)[0], structure)
    path.write_text(path.read_text().replace("T T T", "T T F"))
    with pytest.raises(TomatError, match="periodic along 'T T F' only"):
        read_structure(path)
    path.write_text(path.read_text().replace("T T F", "T T T").replace("species:S", "Z:I"))
    with pytest.raises(TomatError, match="has the columns q, Z, pos; expected species and pos among them"):
        read_structure(path)
    molecule = tmp_path / "m.xyz"
    Molecule(["O", "H"], [[0, 0, 0], [0, 0, 0.96]]).to(filename=str(molecule))
    with pytest.raises(TomatError, match="m.xyz has no lattice: it is a molecule"):
        read_structure(molecule)
    (tmp_path / "m.json").write_text(json.dumps(Molecule(["O"], [[0, 0, 0]]).as_dict()))
    with pytest.raises(TomatError, match="m.json has no lattice: it is a molecule"):
        read_structure(tmp_path / "m.json")


def test_what_python_holds_is_the_same_crystal_and_what_is_not_used_is_said(structure):
    atoms = structure.to_ase_atoms()
    for given in (structure, structure.as_dict(), {"structure": structure.as_dict()}, Poscar(structure), atoms):
        crystal, notes = crystal_of(given)
        same(crystal, structure)
        assert crystal.name == "FNa" and not notes
    for moments in ([1.0, 0.0], np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])):
        decorated = structure.copy(site_properties={"magmom": moments})
        decorated.add_oxidation_state_by_element({"Na": 1, "F": -1})
        said = [note.partition(" are")[0] for note in crystal_of(decorated)[1]]
        assert said == ["oxidation states", "magnetic moments"]
    atoms.set_initial_magnetic_moments([1, 0])
    assert [note.partition(" are")[0] for note in crystal_of(atoms)[1]] == ["magnetic moments"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Atoms("OH", [[0, 0, 0], [0, 0, 0.96]]), "have no cell: a molecule"),
        (Atoms("H", cell=[3, 3, 0], pbc=True), "a cell of 2 vectors"),
        (Atoms("H", cell=[3, 3, 3], pbc=[True, True, False]), "periodic along a, b only"),
        (Atoms("X", cell=[3, 3, 3], pbc=True), "atomic numbers 0"),
        (Atoms("H", cell=[3, 3, 3], pbc=True, info={"occupancy": {"0": {"H": 0.5}}}), "fully occupied"),
        (Molecule(["O"], [[0, 0, 0]]), "it is a molecule"),
        (Structure(Lattice.cubic(4.0), [{"Na": 0.5, "K": 0.5}], [[0, 0, 0]]), "holds Na:0.5, K:0.5"),
        (Structure(Lattice.cubic(4.0, pbc=(True, True, False)), ["Na"], [[0, 0, 0]]), "is periodic along"),
        ({"formula": "NaF"}, "the dict holds no structure.*found formula"),
        (5, "found a builtins.int; expected a structure of pymatgen"),
    ],
)
def test_what_is_no_crystal_is_refused_in_words(given, words):
    with pytest.raises(TomatError, match=words):
        crystal_of(given)


def test_what_no_density_can_be_said_of_is_refused(tmp_path):
    cubic = Lattice.cubic(4.0)
    refused = {
        "mixed.cif": (Structure(cubic, [{"Na": 0.5, "Mg": 0.5}], [[0, 0, 0]]), "site 1 holds Na:0.5, Mg:0.5"),
        "vacant.cif": (Structure(cubic, [{"Na": 0.5}], [[0, 0, 0]]), "fully occupied"),
        "mixed.json": (Structure(cubic, [{"Na": 0.5, "Mg": 0.5}], [[0, 0, 0]]), "expected one element"),
        "close.cif": (Structure(cubic, ["Na", "F"], [[0, 0, 0], [0.1, 0, 0]]), r"Na \(atom 1\) and F \(2\) are 0.4 A"),
    }
    for name, (structure, message) in refused.items():
        structure.to(filename=str(tmp_path / name))
        with pytest.raises(TomatError, match=message):
            read_structure(tmp_path / name)
    assert read_structure(tmp_path / "close.cif", rules=ReadRules(accept=("distances",)))[0].name == "close"


def test_what_follows_the_atoms_of_a_contcar_of_dynamics_is_left_alone(tmp_path, structure):
    text = Poscar(structure).get_str(significant_figures=12)
    for more in ("\n  0.1 0.2 0.3\n  0.1 0.2 0.3\n", "Lattice velocities and vectors\n  1\n  0.0 0.0 0.0\n"):
        (tmp_path / "CONTCAR").write_text(text + more)
        same(read_structure(tmp_path / "CONTCAR")[0], structure)


LATTICE = '{"lattice": {"matrix": [[9,0,0],[0,9,0],[0,0,9]]}, "sites": ['
XSF = "CRYSTAL\nPRIMVEC\n4.62 0 0\n0 4.62 0\n0 0 4.62\nPRIMCOORD\n{} 1\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("POSCAR", "x\n1\n50 0 0\n0 50 0\n0 0 50\nNa\n20000\nDirect\n", "20,000 atoms"),
        ("a.json", LATTICE + "1," * 20_000 + "1]}", "20,001 atoms"),
        ("a.xyz", '20000\nLattice="9 0 0 0 9 0 0 0 9"\n' + "Li 0 0 0\n" * 20_000, "20,000 atoms"),
        ("a.xsf", XSF.format(20_000) + "Li 0 0 0\n" * 20_000, "more than 11,000 lines.*at most 10,000 atoms"),
        ("a.cssr", "1 1 1\n" * 20_000, "more than 11,000 lines"),
    ],
)
def test_too_many_atoms_are_counted_before_anything_is_made_of_them(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    started = time.process_time()
    with pytest.raises(TomatError, match=message):
        read_structure(tmp_path / name)
    assert time.process_time() - started < 5


NUMBERS = "0.1234 0.2345 0.3456"


@pytest.mark.parametrize(
    ("name", "line"), [("a.json.gz", NUMBERS), ("a.xsf.gz", NUMBERS), ("POSCAR.gz", ""), ("a.cif.gz", "_x 1")]
)
def test_a_bomb_takes_little_memory_whatever_its_kind(tmp_path, name, line):
    (tmp_path / name).write_bytes(gzip.compress(f"{line}\n".encode() * (60_000_000 // (len(line) + 1)), 1))
    tracemalloc.start()
    try:
        with pytest.raises(TomatError):
            read_structure(tmp_path / name)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000_000


def test_the_densities_in_an_xsf_are_not_read(tmp_path, structure):
    structure.to(filename=str(tmp_path / "a.xsf"))
    plain = read_structure(tmp_path / "a.xsf")[0]
    text = (tmp_path / "a.xsf").read_text() + "\nBEGIN_BLOCK_DATAGRID_3D\n" + "0.1 0.2 0.3\n" * 50_000
    (tmp_path / "b.xsf.xz").write_bytes(lzma.compress(text.encode()))
    found = read_structure(tmp_path / "b.xsf.xz")[0]
    assert np.array_equal(found.frac_coords, plain.frac_coords)
    (tmp_path / "a.xsf").write_text((tmp_path / "a.xsf").read_text().rsplit("\n", 1)[0] + "\n")
    with pytest.raises(TomatError, match="says 2 atoms, and 1 can be read"):
        read_structure(tmp_path / "a.xsf")


@pytest.mark.parametrize("name", ["a.xyz", "a.xsf"])
def test_exponents_of_fortran_are_read(tmp_path, structure, name):
    lattice = [" ".join(f"{each:.12f}D+00" for each in row) for row in structure.lattice.matrix]
    rows = [" ".join(f"{each:.12f}d0" for each in site.coords) for site in structure]
    symbols = [str(site.specie) for site in structure]
    if name == "a.xyz":
        lines = ["2", f'Lattice="{" ".join(lattice)}"', *(f"{at} {row}" for at, row in zip(symbols, rows, strict=True))]
    else:
        lines = ["CRYSTAL", "PRIMVEC", *lattice, "PRIMCOORD", "2 1"]
        lines += [f"{at} {row}" for at, row in zip(symbols, rows, strict=True)]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    same(read_structure(tmp_path / name)[0], structure)


def test_folders_are_walked_and_what_is_no_structure_named(tmp_path, structure):
    for name in ("a/POSCAR", "b.cif", "c.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        structure.to(filename=str(tmp_path / name), fmt="poscar" if "POSCAR" in name else "")
    for name in ("notes.txt", "a/POTCAR", "a/LOCPOT", ".hidden.cif"):
        (tmp_path / name).write_text("x")
    files, ignored = find_structures([str(tmp_path)])
    assert [file.name for file in files] == ["a", "b", "c"] and all(file.in_folder for file in files)
    assert sorted(each.removeprefix(f"{tmp_path}/") for each in ignored) == ["a/LOCPOT", "a/POTCAR", "notes.txt"]
    assert find_structures([str(tmp_path), str(tmp_path / "b.cif")])[0] == files
    (tmp_path / "r.json").write_text('{"a": 1}')
    with pytest.raises(NoStructureError, match="r.json holds no structure"):
        read_structure(tmp_path / "r.json")
    structure.to(filename=str(tmp_path / "a" / "CONTCAR"), fmt="poscar")
    with pytest.raises(TomatError, match="a/CONTCAR and .*a/POSCAR would both be called a"):
        find_structures([str(tmp_path)])
    (tmp_path / "d").mkdir()
    for place, message in (("nowhere", "no file or folder"), ("notes.txt", "no known kind"), ("d", "no structure")):
        with pytest.raises(TomatError, match=message):
            find_structures([str(tmp_path / place)])


SALT = Structure.from_spacegroup("Fm-3m", Lattice.cubic(5.64), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]])
SYMMETRY = "loop_\n_symmetry_equiv_pos_as_xyz\n'x,y,z'"


def many_sites(count: int, symmetry: str = SYMMETRY) -> str:
    head = "data_x\n" + "".join(f"_cell_length_{axis} 60\n" for axis in "abc")
    head += "".join(f"_cell_angle_{angle} 90\n" for angle in ("alpha", "beta", "gamma"))
    names = "loop_\n _atom_site_label\n _atom_site_fract_x\n _atom_site_fract_y\n _atom_site_fract_z\n"
    return f"{head}{symmetry}\n{names}" + "Na 0.1 0.2 0.3\n" * count


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
        (many_sites(20_000), "20,000 atoms"),
        (many_sites(101, SYMMETRY + "\n'x,y,z'" * 199), f"200 operations.*at most {MOST_IMAGES:,}"),
        (many_sites(200, "_space_group_name_H-M_alt 'F m -3 m'"), "200 sites and 192 operations"),
        (many_sites(200, "_symmetry_space_group_name_H-M 'F m -3 m'"), "200 sites and 192 operations"),
        (many_sites(1) + "'x" * 100_000, "thousands of quotes"),
    ],
    ids=["sites", "images", "group", "old name", "quotes"],
)
def test_what_would_take_pymatgen_minutes_is_refused(text, message):
    with pytest.raises(TomatError, match=message):
        bounded_cif(text, "a.cif")


@pytest.mark.parametrize("filler", ["\n", "loop_\n_atom_site_fract_x\n"])
def test_the_look_takes_time_in_proportion(filler):
    """Blank lines and loops without end were searched again from each of them."""
    started = time.process_time()
    bounded_cif(many_sites(4) + filler * (2_000_000 // len(filler)), "a.cif")
    assert time.process_time() - started < 10


BRUCITE = """data_1-ICSD
_cell_length_a 3.142
_cell_length_b 3.142
_cell_length_c 4.766
_cell_angle_alpha 90
_cell_angle_beta 90
_cell_angle_gamma 120
loop_
_symmetry_equiv_pos_as_xyz
'x, y, z'
'-x, -y, -z'
loop_
_atom_site_label
_atom_site_type_symbol
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
_atom_site_attached_hydrogens
Mg1 Mg2+ 0 0 0 0
O1 O2- 0.3333 0.6667 0.2203 1
"""


@pytest.mark.parametrize("site", ["O1 O2-", "O1 O-H", "Wat1 Wat", "OH1 OH"])
def test_hydrogens_of_a_cif_are_not_lost(tmp_path, site):
    text = BRUCITE.replace("O1 O2-", site)
    (tmp_path / "a.cif").write_text(text if site == "O1 O2-" else text.replace("0.2203 1", "0.2203 0"))
    with pytest.raises(TomatError, match="expected a site for each"):
        read_structure(tmp_path / "a.cif")


@pytest.mark.parametrize("occupancy", ["0", "0.0", "0.000(5)", "."])
def test_a_site_of_a_cif_without_an_occupancy_is_not_lost(tmp_path, occupancy):
    text = BRUCITE.replace("attached_hydrogens", "occupancy").replace("0 0 0 0", "0 0 0 1")
    (tmp_path / "a.cif").write_text(text)
    assert len(read_structure(tmp_path / "a.cif")[0].atomic_numbers) == 3
    (tmp_path / "a.cif").write_text(text.replace("0.2203 1", f"0.2203 {occupancy}"))
    with pytest.raises(TomatError, match="occupancy"):
        read_structure(tmp_path / "a.cif", rules=ReadRules(accept=("distances",)))


def test_a_block_of_a_journal_is_passed_over(tmp_path):
    text = BRUCITE.replace("0.2203 1", "0.2203 0")
    (tmp_path / "a.cif").write_text("data_global\n_journal_name_full 'Acta Cryst. B'\n" + text)
    assert len(read_structure(tmp_path / "a.cif")[0].atomic_numbers) == 3


def test_what_is_no_full_crystal_is_refused(tmp_path):
    sites = "PRIMVEC\n4.2 0 0\n0 4.2 0\n0 0 9\nPRIMCOORD\n2 1\nMg 0 0 0\nO 2.1 0 0\n"
    head, atoms = 'Lattice="4.2 0 0 0 4.2 0 0 0 4.2" pbc=', "\nMg 0 0 0\nO 2.1 0 0\n"
    for name, text in {
        "slab.xsf": f"SLAB\n{sites}",
        "wire.xsf": f"POLYMER\n{sites}",
        "slab.xyz": f"2\n{head}[T, T, F]{atoms}",
        "half.res": "TITL x\nCELL 1.0 4.2 4.2 4.2 90 90 90\nLATT -1\nSFAC Mg O\nMg 1 0 0 0 0.5\nO 2 0.5 0 0 1.0\nEND\n",
    }.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(TomatError, match="expected"):
            read_structure(tmp_path / name)
    for name, text in {"a.xsf": f"CRYSTAL\n{sites}", "a.xyz": f'2\n{head}"T T T"{atoms}'}.items():
        (tmp_path / name).write_text(text)
        read_structure(tmp_path / name)


def test_atoms_by_symmetry_or_unread_are_not_lost(tmp_path):
    res = "TITL x\nCELL 1.0 4.2 4.2 4.2 90 90 90\nLATT {}\nSFAC Mg O\nMg 1 0 0 0 1.0\nO 2 0.5 0 0 1.0\nEND\n"
    cssr = "4.2 4.2 4.2\n90 90 90 SPGR = {} OPT = 1\n2 {}\n0 MgO\n1 Mg 0 0 0\n2 O {} 0 0\n"
    for name, text, words in (
        ("centred.res", res.format(1), "LATT 1"),
        ("cubic.cssr", cssr.format("225 F m -3 m", 0, 0.5), "SPGR = 225 F m -3 m"),
        ("orthogonal.cssr", cssr.format("1 P 1", 1, 2.1), "orthogonal coordinates"),
        ("exponent.cssr", cssr.format("1 P 1", 0, "5.0E-01"), "2 atoms, and 1 can be read"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(TomatError, match=words):
            read_structure(tmp_path / name)
    for name, text in {"a.res": res.format(-1), "a.cssr": cssr.format("1 P 1", 0, 0.5)}.items():
        (tmp_path / name).write_text(text)
        assert len(read_structure(tmp_path / name)[0].atomic_numbers) == 2


@pytest.mark.parametrize(
    ("group", "atoms"),
    [
        ("_symmetry_space_group_name_H-M 'P 21/n'", None),  # pymatgen takes P1
        ("_symmetry_space_group_name_H-M 'P 21/n'\n_symmetry_Int_Tables_number 14", None),  # pymatgen takes P21/c
        ("_symmetry_space_group_name_H-M 'P 21/c'\n_symmetry_Int_Tables_number 14", 4),
        ("_symmetry_space_group_name_H-M 'P 1 21/n 1'", 4),
        ("_symmetry_space_group_name_H-M 'P 1'", 1),
        ("_symmetry_Int_Tables_number 0\nloop_\n_symmetry_equiv_pos_as_xyz\n'x, y, z'\n'-x, -y, -z'", 2),
        ("loop_\n_Symmetry_Equiv_Pos_As_XYZ\n'x, y, z'\n'-x, -y, -z'", None),
        ("_symmetry_space_group_name_H-M 'P 21/n'\n_symmetry_equiv_pos_as_xyz 'x, y, z'", 1),
    ],
)
def test_a_group_of_a_cif_that_pymatgen_does_not_know_is_not_taken_for_another(tmp_path, group, atoms):
    head = BRUCITE[: BRUCITE.index("loop_")].replace("120", "90").replace("3.142", "5.7")
    site = "loop_\n_atom_site_label\n_atom_site_fract_x\n_atom_site_fract_y\n_atom_site_fract_z\nZr1 0.25 0.02 0.11\n"
    (tmp_path / "a.cif").write_text(f"{head}{group}\n{site}")
    if atoms is None:
        with pytest.raises(TomatError, match="operations of symmetry that cannot be told"):
            read_structure(tmp_path / "a.cif")
    else:
        crystal, _ = read_structure(tmp_path / "a.cif", rules=ReadRules(accept=("distances",)))
        assert len(crystal.atomic_numbers) == atoms


def test_what_an_xyz_says_of_occupancies_moments_and_charges_is_heeded(tmp_path, structure):
    def notes_of(atoms: Atoms) -> list[str]:
        atoms.write(tmp_path / "a.xyz", format="extxyz")
        return [note.partition(" are")[0] for note in read_structure(tmp_path / "a.xyz")[1]]

    atoms = structure.to_ase_atoms()
    atoms.info["occupancy"] = {"0": {"Na": 1}, "1": {"F": 1.0}}
    atoms.info["charge"] = 0
    assert notes_of(atoms) == []
    atoms.info["charge"] = -1
    atoms.set_initial_magnetic_moments([[0, 0, 1], [0, 0, 0]])
    assert notes_of(atoms) == ["magnetic moments", "charges"]
    atoms.info["occupancy"]["1"] = {"F": 0.5}
    with pytest.raises(TomatError, match="occupancy of 0.5"):
        notes_of(atoms)


def test_another_lattice_beside_that_of_an_xyz_is_left_alone(tmp_path):
    cell = "4.2 0 0 0 4.2 0 0 0 4.2"
    for head in (f'prim_lattice="8 0 0 0 8 0 0 0 8" Lattice="{cell}"', f"Lattice={{{cell}}}", f"Lattice='{cell}'"):
        (tmp_path / "a.xyz").write_text(f"2\n{head}\nMg 0 0 0\nO 2.1 0 0\n")
        assert read_structure(tmp_path / "a.xyz")[0].volume_a3 == pytest.approx(4.2**3)


def test_the_spin_of_a_species_is_flagged():
    cell = Structure(Lattice.cubic(4.2), ["Fe", "O"], [[0, 0, 0], [0.5, 0.5, 0.5]])
    cell.add_spin_by_element({"Fe": 5})
    assert any("magnetic moments" in note for note in crystal_of(cell)[1])


def test_logicals_as_fortran_reads_them(tmp_path):
    rows = "0 0 0 .TRUE. .FALSE. t\n.5 0 0 T T f\n"
    text = f"x\n1\n4.2 0 0\n0 4.2 0\n0 0 4.2\nMg O\n1 1\nselective\ndirect\n{rows}"
    (tmp_path / "POSCAR").write_text(text)
    assert read_structure(tmp_path / "POSCAR")[0].atomic_numbers.tolist() == [12, 8]
