"""What pw.x is told and what it says. What it makes of a density: `tests/profiling/test_scf_savings.py`."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from embedded_set_gth import gth_text
from pwscf import PwCalculation, PwX, parse_output

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
NO_ROOM = """
     Error in routine write_rhog (1):
     error writing the density
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
        (CONVERGED.partition("     PWSCF")[0], "the output ends early"),
        (CONVERGED.partition("     PWSCF")[0] + NO_ROOM, "write_rhog: error writing the density"),
    ):
        found = parse_output(text)
        assert found.iterations is None and found.reason == reason


def test_the_input_says_all_that_decides_the_result(calculation):
    lines = calculation.input_text(from_file=True).splitlines()
    assert "nat=2, ntyp=2, ecutwfc=30.000000, input_dft='PBE', nosym=.true. /" in lines[1]
    assert "conv_thr=1.000e-08" in lines[2] and lines[4] == "Na 1.0 Na.gth" and lines[-1] == "2 2 1 1 0 0"
    own, given = (calculation.input_text(from_file=each) for each in (False, True))
    assert own == given.replace("startingpot='file'", "startingpot='atomic'") != given


def test_a_run_that_was_ended_for_its_time_is_run_again_with_more_of_it(calculation, tmp_path):
    """And with no more it is not."""
    program, quick = tmp_path / "pw", tmp_path / "quick"
    program.write_text(f"#!/bin/sh\ntest -e {quick} || exec sleep 60\ncat <<END{CONVERGED}END\n")
    program.chmod(0o755)

    def run(limit_seconds: float):
        return PwX(tmp_path / "work", str(program), limit_seconds).run(calculation, "own", None).said

    assert run(0.5).reason == "tomat: ended after 0.5 s"
    quick.touch()
    assert run(0.5).iterations is None
    assert run(60).iterations == 3
    quick.unlink()
    assert run(90).iterations == 3


@pytest.mark.skipif(shutil.which("pw.x") is None, reason="no pw.x (Debian's quantum-espresso)")
def test_the_guide_starts_a_calculation_by_ase_from_a_prediction(tmp_path, monkeypatch):
    from ase.calculators.espresso import Espresso

    monkeypatch.chdir(tmp_path)
    # Open MPI refuses to start as root without them.
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }.items():
        monkeypatch.setenv(name, value)
    Path("pseudo").mkdir()
    for symbol, valence in {"Ga": 3, "P": 5}.items():
        Path("pseudo", f"{symbol}.gth").write_text(gth_text(symbol, valence))
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "predicting.md").read_text(encoding="utf-8")
    [block] = [each for each in re.findall(r"^```python\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE) if "ase" in each]
    found: dict = {}
    exec(block, found)
    text = Path("gap", "espresso.pwo").read_text()
    assert "initial density is read from file" in text
    atoms, own = found["atoms"], found["atoms"].copy()
    own.calc = Espresso(directory="own", **found["settings"])
    own.calc.parameters["input_data"]["electrons"] = {"conv_thr": 1e-8}
    # Another start, the same end; the first guess is a hundred times nearer to it.
    assert own.get_potential_energy() == pytest.approx(atoms.get_potential_energy(), abs=1e-5)
    predicted, atomic = parse_output(text), parse_output(Path("own", "espresso.pwo").read_text())
    assert predicted.accuracy_ry[0] < 0.01 * atomic.accuracy_ry[0]
    assert None not in (predicted.iterations, atomic.iterations) and predicted.iterations <= atomic.iterations
