"""What pw.x makes of the file, where it is installed. What is in it: `tests/data/density/test_outputs.py`."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from scipy.io import FortranFile

from tomat.base.errors import TomatError
from tomat.data.density.espresso import read_reciprocal_list, write_charge_density
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.grid import DensityGrid

PSEUDOPOTENTIAL = Path("/usr/share/espresso/pseudo/Si.pz-vbc.UPF")
INPUT = """&control calculation='scf', prefix='{prefix}', outdir='.', pseudo_dir='{folder}' /
&system ibrav=2, celldm(1)=10.2, nat=2, ntyp=1, ecutwfc=12.0 /
&electrons conv_thr=1d-8, startingpot='{start}' /
ATOMIC_SPECIES
Si 28.086 Si.pz-vbc.UPF
ATOMIC_POSITIONS crystal
Si 0 0 0
Si .26 .25 .23
K_POINTS automatic
1 1 1 1 1 1
"""


def pw(prefix: str, start: str, place: Path) -> str:
    """What pw.x prints."""
    (place / "pw.in").write_text(INPUT.format(prefix=prefix, start=start, folder=PSEUDOPOTENTIAL.parent))
    words = ["env", "OMP_NUM_THREADS=1", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "pw.x"]
    done = subprocess.run([*words, "-i", "pw.in"], cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout


def iterations(told: str) -> int:
    found = re.search(r"convergence has been achieved in\s+(\d+) iterations", told)
    assert found, told[-2000:]
    return int(found[1])


@pytest.mark.skipif(shutil.which("pw.x") is None or not PSEUDOPOTENTIAL.exists(), reason="no Quantum ESPRESSO here")
def test_a_converged_density_that_was_read_and_written_converges_at_once(tmp_path):
    free = pw("free", "atomic", tmp_path)
    vectors = read_reciprocal_list(tmp_path / "free.save" / "charge-density.dat")
    with FortranFile(tmp_path / "free.save" / "charge-density.dat") as file:
        for kind in ("i4", "f8", "i4"):
            file.read_record(kind)
        coefficients = np.asarray(file.read_record("c16"))
    spectrum = np.zeros((24, 20, 27), np.complex128)  # another grid than pw.x has, with sides of no two alike
    spectrum[tuple(vectors.miller.T)] = coefficients
    rho = np.fft.ifftn(spectrum).real * spectrum.size / BOHR_A**3
    lattice = np.array([[-0.5, 0, 0.5], [0, 0.5, 0.5], [-0.5, 0.5, 0]]) * 10.2 * BOHR_A
    grid = DensityGrid(rho, lattice, np.array([14, 14]), np.array([[0, 0, 0], [0.26, 0.25, 0.23]]), "Si")
    assert grid.electron_count == pytest.approx(8, rel=1e-6)
    # Where the electrons are says that signs and axes are right: on the bond, not across from it.
    bond, across = (round(grid.rho.shape[0] * x) for x in (0.13, -0.13))
    assert grid.rho[bond, round(20 * 0.125), round(27 * 0.115)] > 2 * grid.rho[across, round(-20 * 0.125), -3]
    (tmp_path / "again.save").mkdir()
    write_charge_density(grid, tmp_path / "again.save" / "charge-density.dat", vectors)
    again = pw("again", "file", tmp_path)
    assert "The initial density is read from file" in again and "renormalised" not in again
    assert iterations(again) <= 2 < iterations(free)


def test_a_spin_polarised_run_is_refused(tmp_path):
    with FortranFile(tmp_path / "charge-density.dat", "w") as file:
        for record in (np.array([0, 1, 2], np.int32), np.eye(3), np.zeros((1, 3), np.int32)):
            file.write_record(record)
    with pytest.raises(TomatError, match="has 2 spin components"):
        read_reciprocal_list(tmp_path / "charge-density.dat")
