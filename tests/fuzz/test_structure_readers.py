"""Files of structures, damaged: the reader gives a crystal or one `TomatError`, soon and in little memory."""

import resource
import warnings

import numpy as np
import pytest
from fuzz_damage import BYTE_DAMAGE, SEEDS, damage_lines, damaged_bytes, fuzz
from hypothesis import strategies as st
from pymatgen.core import Lattice, Structure
from pymatgen.io.cif import CifWriter
from pymatgen.io.vasp import Poscar

from tomat.base.errors import TomatError
from tomat.predict.inference.structures import read_structure

SALT = Structure.from_spacegroup("Fm-3m", Lattice.cubic(5.64), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]])
XYZ = f'8\nLattice="{" ".join(map(str, SALT.lattice.matrix.ravel()))}" Properties=species:S:1:pos:R:3\n' + "".join(
    f"{site.specie} {site.x:.6f} {site.y:.6f} {site.z:.6f}\n" for site in SALT
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    WHOLE = {
        "POSCAR": Poscar(SALT).get_str(),
        "a.cif": str(CifWriter(SALT, symprec=0.01)),
        "b.cif": str(CifWriter(SALT)),
        "a.json": SALT.to_json(),
        "a.xsf": SALT.to(fmt="xsf") + "\n",
        "a.xyz": XYZ,
    }
ODD = ("nan", "inf", "1e999", "-1", "0", "10001", "99999999", "1e300", "****", "x", "1_000", "²", "'", '"', "loop_", "")
WAYS = st.sampled_from(["remove", "repeat", "cut", "number", "many", "storage"])


@pytest.mark.parametrize("name", WHOLE)
def test_structures_of_every_kind(tmp_path, name):
    path = tmp_path / name

    def damaged(how, storage, seed):
        if how == "storage":
            return damaged_bytes(WHOLE[name].encode(), storage)
        rng = np.random.default_rng(seed)
        lines = WHOLE[name].replace(",", ",\n").split("\n")  # a JSON is one line
        if not damage_lines(lines, how, 0, len(lines) - 1, rng, ODD):
            place = int(rng.integers(len(lines)))
            lines[place:place] = [lines[place]] * int(rng.choice([1_000, 30_000]))
        return "\n".join(lines).encode()

    def read(content):
        path.write_bytes(content)
        try:
            read_structure(path)
        except TomatError as error:
            assert name in str(error) and len(str(error)) < 2000
            raise

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inputs = st.builds(damaged, WAYS, BYTE_DAMAGE, SEEDS)
    fuzz(WHOLE[name].encode(), inputs, read, 150)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB on Linux
