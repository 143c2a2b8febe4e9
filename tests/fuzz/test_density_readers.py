"""Whole files of every kind, damaged: the reader gives the original's density or one `TomatError`, and soon.

What cannot be known from a file is left out, and only that: plain text has no checksum, so that a digit that became
another, two lines of values that changed places, or a value replaced by a plausible one read as another density. For
flipped bits and lost or added bytes in a plain CHGCAR, cube or JSON the property is only that nothing but a density or
a `TomatError` comes out. What is compressed has a checksum, and so has what tomat writes.
"""

import contextlib
import copy
import gzip
import io
import json
import re
import resource
import shutil

import numpy as np
import pytest
from chgcar_files import as_vasp_writes
from fuzz_damage import BYTE_DAMAGE, SEEDS, damage_lines, damaged_bytes, fuzz, limits
from hypothesis import strategies as st
from ionic_density import gaussians

from tomat.base.errors import TomatError
from tomat.data.density.cube import write_cube
from tomat.data.density.io import open_density
from tomat.data.density.zarr_store import write_zarr

LATTICE = [[2.9, 0.1, 0.0], [0.4, 3.0, 0.2], [-0.3, 0.5, 3.2]]
WHOLE = gaussians(LATTICE, [3, 9], [[0.1, 0.2, 0.3], [0.6, 0.7, 0.8]], {3: 3, 9: 7}, (9, 8, 7), "LiF")
FIRST_VALUE_LINE = 12
LAST_VALUE_LINE = FIRST_VALUE_LINE + -(-WHOLE.rho.size // 5) - 1


def cube_lines():
    """The lines of a cube, each row along z from a line of its own."""
    file = io.BytesIO()
    write_cube(WHOLE, file)
    return file.getvalue().decode().splitlines()


LINES = {
    "total": as_vasp_writes(WHOLE).splitlines(),
    "spin": as_vasp_writes(WHOLE, spin_blocks=1).splitlines(),
    "spin-orbit": as_vasp_writes(WHOLE, spin_blocks=3, complex_occupancies=True).splitlines(),
    "Fortran": re.sub(r"E([+-])", r"D\1", as_vasp_writes(WHOLE, spin_blocks=1, fill=" 0.00000000000E+00")).splitlines(),
}
CUBE = cube_lines()
CUBE_ATOMS, CUBE_VALUES = 6, 8
"""The first line of the atoms, and that of the values."""
TOTAL = {"@class": "array", "dtype": "float64", "data": WHOLE.rho_times_volume().tolist()}
STRUCTURE = json.loads(WHOLE.structure.to_json())
DOCUMENT = {"task_id": "mp-1", "fs_id": "7", "data": {"poscar": {"structure": STRUCTURE}, "data": {"total": TOTAL}}}


def read(path, comparable=True, must_refuse=False):
    """Read a damaged file: the original's density, or one `TomatError` that its reader foresaw."""
    try:
        found = open_density(path)
    except TomatError as error:
        assert len(str(error)) < 2000 and "cannot be read as a density" not in str(error)
        raise
    assert not must_refuse
    if comparable:
        np.testing.assert_allclose(found.rho, WHOLE.rho, rtol=1e-5)
        np.testing.assert_allclose(found.lattice, WHOLE.lattice, atol=1e-5)
        np.testing.assert_allclose(found.frac_coords, WHOLE.frac_coords, atol=1e-5)
        assert found.atomic_numbers.tolist() == WHOLE.atomic_numbers.tolist()


@pytest.mark.parametrize("kind", LINES)
def test_lines_and_numbers_of_a_chgcar(tmp_path, kind):
    def damaged(values):
        how, seed = values
        rng = np.random.default_rng(seed)
        lines = list(LINES[kind])
        if how == "grid":
            lines[FIRST_VALUE_LINE - 1] = " ".join(map(str, rng.choice([0, 1, 2, 6, 8, 10, 99_999, 99_999_999], 3)))
        elif how == "counts":
            lines[6] = " ".join(map(str, rng.choice([0, 2, 3, 99_999_999, -1], rng.integers(1, 4))))
        else:
            damage_lines(lines, how, FIRST_VALUE_LINE, LAST_VALUE_LINE - 1, rng)
        (tmp_path / "CHGCAR").write_text("\n".join(lines) + "\n")
        read(tmp_path / "CHGCAR", must_refuse=how in ("number", "grid", "counts"))

    ways = st.sampled_from(["remove", "repeat", "cut", "number", "grid", "counts"])
    fuzz(("whole", 0), st.tuples(ways, SEEDS), damaged, 150)


@pytest.mark.parametrize("largest", [3, 300, 30_000, 300_000])
def test_cells_of_any_skew(tmp_path, largest):
    """The same lattice by other vectors is read or refused, and soon; the values stay, so it is another density."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        whole = np.eye(3, dtype=int)
        i, j, k = rng.permutation(3)
        whole[i, j], whole[k, j] = rng.integers(-largest, largest + 1), rng.integers(-3, 4)
        lines = list(LINES["total"])
        lines[2:5] = [" ".join(f"{x:.9f}" for x in row) for row in whole @ WHOLE.lattice]
        coords = WHOLE.frac_coords @ np.round(np.linalg.inv(whole)) % 1
        lines[8:10] = [" ".join(f"{x:.9f}" for x in row) for row in coords]
        (tmp_path / "CHGCAR").write_text("\n".join(lines) + "\n")
        with limits(), contextlib.suppress(TomatError):
            read(tmp_path / "CHGCAR", comparable=False)


COUNTS = ("0", "-0", "1", "-1", "2", "-2", "3", "7.5", "8", "-8", "10", "645", "10000", "10001", "16385", "99999999")
COUNTS += ("2147483648", "9223372036854775808", "1e18", "1e308", "nan", "inf", "")


def test_lines_and_numbers_of_a_cube(tmp_path):
    path = tmp_path / "a.cube"

    def damaged(values):
        how, seed = values
        rng = np.random.default_rng(seed)
        lines = list(CUBE)
        if damage_lines(lines, how, CUBE_VALUES, len(lines) - 1, rng) or how == "whole":
            pass
        elif how == "header":
            damage_lines(lines, "number", 2, CUBE_VALUES - 1, rng)
        elif how == "counts":
            for each in rng.choice([2, 3, 4, 5], rng.integers(1, 4), replace=False):
                lines[each] = " ".join([str(rng.choice(COUNTS)), *lines[each].split()[1:]])
        elif how == "bohr":  # lengths said to be in another unit, on one axis or on all
            for each in rng.choice([3, 4, 5], rng.integers(1, 4), replace=False):
                lines[each] = lines[each].replace(lines[each].split()[0], f"-{lines[each].split()[0]}", 1)
        elif how == "sets":  # data sets by a negative number of atoms
            lines[2] = lines[2].replace("2", "-2", 1)
            lines.insert(CUBE_VALUES, " ".join(rng.choice(COUNTS, rng.integers(0, 4))))
        elif how == "ghosts":  # said or not
            number = int(rng.integers(0, 4))
            lines[2] = lines[2].replace("2", str(2 + rng.integers(0, 4)), 1)
            lines[CUBE_ATOMS:CUBE_ATOMS] = ["0 0.0 " + " ".join(map(str, rng.normal(size=3)))] * number
        else:  # orbitals, values for each voxel, words too many
            lines[2] += " " + " ".join(rng.choice(COUNTS, rng.integers(1, 4)))
        path.write_text("\n".join(lines) + "\n")
        # What a title says is not read; nor is the nuclear charge of an atom, and zero may be written in many ways.
        comparable = how in ("whole", "number", "cut", "more", "sets", "ghosts")
        read(path, comparable, must_refuse=how in ("bohr", "number"))

    ways = ["remove", "repeat", "cut", "number", "header", "counts", "bohr", "more", "sets", "ghosts"]
    inputs = st.tuples(st.sampled_from(ways), SEEDS)
    fuzz(("whole", 0), inputs, damaged, 800)


HUGE = 80 * 2**20
"""Above the 64 MiB of a line that are read at a time."""


@pytest.mark.parametrize(
    "edit",
    [
        lambda: [CUBE[0], CUBE[1], "10000" + CUBE[2][5:], *CUBE[3:]],
        lambda: [*CUBE[:3], "268435456" + CUBE[3][5:], "1" + CUBE[4][5:], "1" + CUBE[5][5:], *CUBE[6:]],
        lambda: ["x" * HUGE],
        lambda: [*CUBE[:CUBE_VALUES], "0 " * (HUGE // 2)],
        lambda: [*CUBE[:CUBE_VALUES], *[""] * 2**22],
    ],
    ids=["atoms", "one side", "title", "one line", "no values"],
)
def test_a_cube_that_claims_much_takes_little(tmp_path, edit):
    path = tmp_path / "a.cube.gz"
    path.write_bytes(gzip.compress("\n".join(edit()).encode(), 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TomatError):
        read(path)
    # KiB on Linux. A line of 64 MiB is read at a time, and its words are counted.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20


def places(node, path=()):
    """Every place in nested lists and dictionaries."""
    yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


ALL_PLACES = [path for path in places(DOCUMENT) if path]
STRUCTURE_PLACES = [path for path in ALL_PLACES if "total" not in path]
WRONG = [None, "x", "", {}, {"a": 1}, [], [[]], [[[]]], True, 10**400, -(10**400), float("nan"), float("inf"), 1e300]


def damage_json(content, chosen, how, rng):
    """Change a document at one of `chosen` places."""
    *parents, last = chosen[rng.integers(len(chosen))]
    node = content
    for key in parents:
        node = node[key]
    if how == "replace":
        node[last] = WRONG[rng.integers(len(WRONG))]
    elif how == "remove" or isinstance(node, dict):
        del node[last]
    else:
        node.insert(last, node[last])


def test_types_and_numbers_of_a_document(tmp_path):
    def damaged(values):
        anywhere, how, seed = values
        content = copy.deepcopy(DOCUMENT)
        if how != "whole":
            damage_json(content, ALL_PLACES if anywhere else STRUCTURE_PLACES, how, np.random.default_rng(seed))
        (tmp_path / "mp-1.json").write_text(json.dumps(content))
        read(tmp_path / "mp-1.json")

    inputs = st.tuples(st.booleans(), st.sampled_from(["replace", "remove", "repeat"]), SEEDS)
    fuzz((True, "whole", 0), inputs, damaged, 400)


@pytest.mark.parametrize(
    ("name", "lines", "comparable"),
    [
        ("CHGCAR", LINES["spin"], ("cut", "zero")),
        ("a.cube", CUBE, ()),
        ("mp-1.json", [json.dumps(DOCUMENT)], ("cut",)),
        ("CHGCAR.gz", LINES["total"], None),
        ("a.cube.gz", CUBE, None),
        ("mp-1.json.gz", [json.dumps(DOCUMENT)], None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_storage(tmp_path, name, lines, comparable):
    """`comparable`: damage that shows in a plain file; None: all does."""
    content = ("\n".join(lines) + "\n").encode()
    content = gzip.compress(content) if name.endswith(".gz") else content

    def damaged(steps):
        (tmp_path / name).write_bytes(damaged_bytes(content, steps))
        read(tmp_path / name, comparable is None or {kind for kind, *_ in steps} <= set(comparable))

    fuzz((), BYTE_DAMAGE, damaged, 200)


@pytest.mark.parametrize(("chunks", "count"), [(None, 150), (4, 80)])
def test_stores(tmp_path, chunks, count):
    whole, path = tmp_path / "whole.zarr", tmp_path / "a.zarr"
    write_zarr(WHOLE, whole, chunks=chunks)

    def damaged(values):
        how, steps, seed = values
        rng = np.random.default_rng(seed)
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        victim, other = files[rng.integers(len(files))], files[rng.integers(len(files))]
        if how == "empty":
            victim.write_bytes(b"")
        elif how == "lost":
            victim.unlink()
        elif how == "swapped":
            first, second = victim.read_bytes(), other.read_bytes()
            victim.write_bytes(second)
            other.write_bytes(first)
        elif how == "bytes":
            victim.write_bytes(damaged_bytes(victim.read_bytes(), steps))
        else:
            victim = [file for file in files if file.name == "zarr.json"][rng.integers(2)]
            content = json.loads(victim.read_text())
            damage_json(content, [place for place in places(content) if place], how, rng)
            victim.write_text(json.dumps(content))
        read(path)

    ways = st.sampled_from(["bytes", "bytes", "bytes", "empty", "lost", "swapped", "remove", "replace"])
    fuzz(("bytes", (), 0), st.tuples(ways, BYTE_DAMAGE, SEEDS), damaged, count)
