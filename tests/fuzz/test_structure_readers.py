"""Files of structures, damaged: the reader gives a crystal or one `TomatError`, soon and in little memory."""

import resource
import time
import warnings
from collections import Counter

import numpy as np
import pytest
from fuzz_damage import BYTE_DAMAGE, damaged_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from pymatgen.core import Lattice, Structure
from pymatgen.io.cif import CifWriter
from pymatgen.io.vasp import Poscar

from tomat.base.errors import TomatError
from tomat.predict.inference.structures import read_structure

LONGEST_SECONDS = 10.0
"""CPU time of one reading; a whole file takes a hundredth of one."""

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
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("name", WHOLE)
def test_structures_of_every_kind(tmp_path, tried, name):
    outcomes = Counter()
    path = tmp_path / name
    path.write_text(WHOLE[name])
    assert len(read_structure(path)[0].atomic_numbers) == 8

    @given(st.sampled_from(["remove", "repeat", "cut", "number", "many", "storage"]), BYTE_DAMAGE, SEEDS)
    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    def damage(how, storage, seed):
        rng = np.random.default_rng(seed)
        content = WHOLE[name].encode()
        # A JSON is one line.
        lines = WHOLE[name].replace(",", ",\n").split("\n")
        place = int(rng.integers(len(lines)))
        if how == "storage":
            content = damaged_bytes(content, storage)
        elif how == "cut":
            content = content[: rng.integers(len(content))]
        elif how == "remove":
            del lines[place]
        elif how == "number":
            words = lines[place].split(" ")
            words[rng.integers(len(words))] = str(rng.choice(ODD))
            lines[place] = " ".join(words)
        else:
            lines[place:place] = [lines[place]] * (1 if how == "repeat" else int(rng.choice([1_000, 30_000])))
        path.write_bytes(content if how in ("storage", "cut") else "\n".join(lines).encode())
        started = time.process_time()
        try:
            read_structure(path)
            outcomes["read"] += 1
        except TomatError as error:
            assert name in str(error) and len(str(error)) < 2000
            outcomes["refused"] += 1
        assert time.process_time() - started < LONGEST_SECONDS

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    damage()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB on Linux
    tried(f"structure {name}", outcomes.total(), outcomes["refused"])
