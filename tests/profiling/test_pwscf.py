"""What pw.x is told and what it says. What it makes of a density: `tests/profiling/test_scf_savings.py`."""

import numpy as np
import pytest
from pwscf import PwCalculation, parse_output

from tomat.data.density.crystal import Crystal

# Lines that pw.x 6.7 wrote for GaP, 36 Ry, 4 x 4 x 4 k-points; those between them are left out.
CONVERGED = """
     Program PWSCF v.6.7MaX starts on 23Nov2026 at  1:23:21
     number of k points=    10
     Dense  grid:     7943 G-vectors     FFT dimensions: (  27,  27,  27)
     iteration #  1     ecut=    36.00 Ry     beta= 0.70
     estimated scf accuracy    <       1.87602855 Ry
     iteration #  2     ecut=    36.00 Ry     beta= 0.70
     estimated scf accuracy    <       0.11749178 Ry
     iteration #  3     ecut=    36.00 Ry     beta= 0.70
     End of self-consistent calculation
!    total energy              =     -17.65029797 Ry
     estimated scf accuracy    <          6.8E-09 Ry
     convergence has been achieved in   3 iterations
     PWSCF        :      0.85s CPU   1m 2.50s WALL
   JOB DONE.
"""
GAVE_UP = "Program PWSCF v.6.7MaX starts\n     convergence NOT achieved after 100 iterations: stopping\n"
REFUSED = """
     Program PWSCF v.6.7MaX starts on 23Nov2026 at  1:23:21
     Error in routine readpp (1):
     file ./Ga.gth not found
"""


@pytest.fixture
def calculation() -> PwCalculation:
    crystal = Crystal(2.0 * np.eye(3), np.array([11, 9]), np.array([[0, 0, 0], [0.5, 0.5, 0.5]]), "NaF")
    return PwCalculation(crystal, 30.0, (2, 2, 1), (1, 0, 0), {"Na": "text of Na", "F": "text of F"}, "PBE", 1e-8)


def test_a_run_that_converged_has_its_figures_and_another_its_reason():
    found = parse_output(CONVERGED)
    assert (found.version, found.iterations, found.reason) == ("6.7MaX", 3, "")
    assert found.accuracy_ry == (1.87602855, 0.11749178, 6.8e-9)
    assert (found.energy_ry, found.cpu_seconds, found.wall_seconds) == (-17.65029797, 0.85, 62.5)
    assert (found.fft_shape, found.k_points) == ((27, 27, 27), 10)
    for text, reason in (
        (GAVE_UP, "convergence NOT achieved after 100 iterations"),
        (REFUSED, "readpp: file ./Ga.gth not found"),
        (CONVERGED.partition("End of self")[0], "the output ends early"),
    ):
        found = parse_output(text)
        assert found.iterations is None and found.reason == reason


def test_the_input_says_all_that_decides_the_result(calculation):
    lines = calculation.input_text(from_file=True).splitlines()
    assert "nat=2, ntyp=2, ecutwfc=30.000000, input_dft='PBE', nosym=.true. /" in lines[1]
    assert "conv_thr=1.000e-08" in lines[2] and lines[4] == "Na 1.0 Na.gth" and lines[-1] == "2 2 1 1 0 0"
    own, given = (calculation.input_text(from_file=each) for each in (False, True))
    assert own == given.replace("startingpot='file'", "startingpot='atomic'") != given
