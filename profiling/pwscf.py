"""Self-consistent calculations by pw.x of Quantum ESPRESSO: writes its input and reads its output.

Each finished run has its own folder, whose name is a hash of everything that determines the run.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.documents import parse_checked, read_bytes, with_checksum
from tomat.base.errors import TomatError
from tomat.base.records import Amount, Positive, typed
from tomat.base.reporting import to_jsonable, write_json
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import symbol_of
from tomat.data.density.espresso import read_coefficients
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.grid import DensityGrid

CHARGE_DENSITY = Path("pw.save") / "charge-density.dat"
"""Density file of pw.x for the prefix `pw`."""
START = "start.dat"
RECORD = "result.json"
ENDS_EARLY = "the output ends early"
"""Reason of a run that was killed. This says nothing about the calculation, so it is run again."""
ENDED_AFTER = "ended after"
"""Begins the reason of a run that reached its time limit. It is run again with a larger limit."""
THREADS = 1
"""Threads of each run; cells have few atoms."""
DIAGO_THR_INIT = 1e-5
"""Convergence threshold of the first diagonalisation, the same for every start. By default pw.x 6.7 takes 1e-5 if it
gets a density and 1e-2 if it adds up atoms (INPUT_PW, `diago_thr_init`): then its own start would spend iterations on
orbitals that other starts have from the beginning."""


@dataclass(frozen=True, eq=False)
class PwCalculation:
    """What pw.x solves, independent of the starting density."""

    crystal: Crystal
    e_cut_ry: float
    """Cut-off of the wave functions; that of the density is four times as large."""
    k_mesh: tuple[int, int, int]
    k_shift: tuple[int, int, int]
    """For each axis 0, or 1 if the mesh is moved by half a step."""
    pseudopotentials: Mapping[str, str]
    """Chemical symbol -> text of the `.gth` file."""
    functional: str
    conv_thr_ry: float
    """The iterations end at this estimated error of the energy."""
    degauss_ry: float = 0.0
    """Width of a Gaussian smearing of the occupations; 0: fixed occupations."""
    symmetry: bool = False
    """Whether pw.x may use the crystal's symmetry, besides that of k and -k. If a mesh has less symmetry than its
    crystal, pw.x adds the missing points, which changes the density (GaP on a former shifted mesh: 0.67 % NMAE)."""

    def input_text(self, from_file: bool) -> str:
        """The input file, to start from the density in `CHARGE_DENSITY` or from pw.x's own superposition of atoms."""
        symbols = [symbol_of(z) for z in self.crystal.atomic_numbers.tolist()]
        rows = [" ".join(f"{value:.10f}" for value in row) for row in self.crystal.lattice.tolist()]
        atoms = (
            f"{symbol} " + " ".join(f"{value:.10f}" for value in site)
            for symbol, site in zip(symbols, self.crystal.frac_coords.tolist(), strict=True)
        )
        start = "file" if from_file else "atomic"
        more = "" if self.symmetry else ", nosym=.true."
        more += f", occupations='smearing', degauss={self.degauss_ry:.6f}" if self.degauss_ry else ""
        # The masses are required but not used without motion. `low` keeps the wave functions in memory until the end.
        return "\n".join([
            "&control calculation='scf', prefix='pw', outdir='.', pseudo_dir='.', disk_io='low' /",
            f"&system ibrav=0, nat={len(symbols)}, ntyp={len(self.pseudopotentials)}, ecutwfc={self.e_cut_ry:.6f}, "
            f"input_dft='{self.functional}'{more} /",
            f"&electrons conv_thr={self.conv_thr_ry:.3e}, diago_thr_init={DIAGO_THR_INIT:.0e}, startingpot='{start}' /",
            "ATOMIC_SPECIES", *(f"{symbol} 1.0 {symbol}.gth" for symbol in self.pseudopotentials),
            "CELL_PARAMETERS angstrom", *rows,
            "ATOMIC_POSITIONS crystal", *atoms,
            "K_POINTS automatic", " ".join(map(str, (*self.k_mesh, *self.k_shift))), "",
        ])  # fmt: skip


@dataclass(frozen=True)
class PwRun:
    """The output of one run of pw.x."""

    version: str
    iterations: Positive | None
    """Number of iterations; None if the run did not converge (see `reason`)."""
    reason: str
    accuracy_ry: tuple[Amount, ...]
    """Estimated error of the energy after each iteration."""
    energy_ry: float | None
    wall_seconds: Amount | None
    """Time of the whole program by its own clock."""
    cpu_seconds: Amount | None
    fft_shape: tuple[Positive, Positive, Positive] | None
    k_points: Positive | None
    """Number of k-points after reduction by symmetry."""


def parse_output(text: str) -> PwRun:
    """Parse the standard output of pw.x 6.x, complete or cut off."""

    def number(pattern: str) -> float | None:
        found = re.findall(pattern, text, re.MULTILINE)
        return float(found[-1]) if found else None

    version = re.search(r"Program PWSCF v\.(\S+)", text)
    converged = re.search(r"convergence has been achieved in\s+(\d+) iterations", text)
    shape = re.search(r"FFT dimensions:\s*\(\s*(\d+),\s*(\d+),\s*(\d+)\)", text)
    times = re.search(r"^\s+PWSCF\s+:\s+(.+?) CPU\s+(.+?) WALL", text, re.MULTILINE)
    k_points = number(r"number of k points=\s*(\d+)")
    reason = ""
    # After the iterations it still writes the density, for which a disk may have no room.
    if converged is None or "JOB DONE." not in text:
        error = re.search(r"Error in routine\s+(\S+)\s*\(.*?\):\s*\n\s*(.+)", text)
        gave_up = re.search(r"convergence NOT achieved after\s+\d+ iterations", text)
        reason = f"{error[1]}: {error[2].strip()}" if error else gave_up[0] if gave_up else ENDS_EARLY
    return PwRun(
        version=version[1] if version else "",
        iterations=int(converged[1]) if converged and not reason else None,
        reason=reason,
        accuracy_ry=tuple(float(x) for x in re.findall(r"^ +estimated scf accuracy +< +(\S+) Ry", text, re.MULTILINE)),
        energy_ry=number(r"^!\s+total energy\s+=\s+(\S+) Ry"),
        wall_seconds=_seconds(times[2]) if times else None,
        cpu_seconds=_seconds(times[1]) if times else None,
        fft_shape=(int(shape[1]), int(shape[2]), int(shape[3])) if shape else None,
        k_points=None if k_points is None else int(k_points),
    )


def _seconds(text: str) -> float:
    """Seconds of a time such as `0.85s`, `1m23.45s` or `2h 3m`."""
    units = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
    return sum(float(value) * units[unit] for value, unit in re.findall(r"([\d.]+)\s*([dhms])", text))


@dataclass(frozen=True, eq=False)
class Start:
    """A density to start from."""

    identity: str
    """A hash or text of everything that determines the density."""
    write: Callable[[Path], dict[str, Any]]
    """Computes the density and writes it as a `charge-density.dat`. Returns facts about it for the JSON record."""


@dataclass(frozen=True, eq=False)
class KeptRun:
    """A finished run and its folder."""

    said: PwRun
    folder: Path
    """Has `pw.in`, `pw.out` and, if the run converged, its density in `CHARGE_DENSITY`."""
    facts: Mapping[str, Any]
    """The result of `Start.write`."""


class PwX:
    """The installed pw.x, and the folder that keeps its runs.

    Args:
        work: Gets a folder for each run.
        program: Name or path of pw.x.
        limit_seconds: A run that takes longer is ended and counts as not converged.

    Raises:
        TomatError: There is no such program.
    """

    def __init__(self, work: Path, program: str = "pw.x", limit_seconds: float = 3600.0) -> None:
        found = shutil.which(program)
        if found is None:
            raise TomatError(
                f"{program} is not installed. On Debian or Ubuntu it comes with `apt-get install quantum-espresso`."
            )
        self.path, self.work, self.limit_seconds = Path(found), work, limit_seconds
        self.sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()

    def folder(self, calculation: PwCalculation, name: str, start: Start | None, turn: int) -> Path:
        """The folder of a run, named by a hash of its input, its pseudopotentials, its start and the program."""
        digest = hashlib.sha256(self.sha256.encode())
        for part in (
            calculation.input_text(start is not None),
            *calculation.pseudopotentials.values(),
            start.identity if start else "",
        ):
            digest.update(hashlib.sha256(part.encode()).digest())
        return self.work / calculation.crystal.name / f"{name}-{digest.hexdigest()[:16]}-{turn}"

    def run(self, calculation: PwCalculation, name: str, start: Start | None, turn: int = 0) -> KeptRun:
        """Run pw.x, unless the same run is on disk already.

        Args:
            calculation: What to solve.
            name: Name of the start, for the folder's name.
            start: A starting density; None for pw.x's own start.
            turn: Number of this run among equal runs, which differ in time only. The first makes the starting density.

        Raises:
            TomatError: pw.x does not read the density that it is given.
        """
        target = self.folder(calculation, name, start, turn)
        if (target / RECORD).exists() and not self._may_say_more(kept := _kept(target)):
            return kept
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".running-") as place:
            folder, facts = Path(place) / target.name, {}
            (folder / CHARGE_DENSITY).parent.mkdir(parents=True)
            for symbol, text in calculation.pseudopotentials.items():
                (folder / f"{symbol}.gth").write_text(text)
            (folder / "pw.in").write_text(calculation.input_text(start is not None))
            if start is not None:
                if turn:
                    shutil.copy(self.folder(calculation, name, start, 0) / START, folder / START)
                else:
                    facts = start.write(folder / START)
                shutil.copy(folder / START, folder / CHARGE_DENSITY)
            text = self._call(folder)
            (folder / "pw.out").write_text(text)
            found = parse_output(text)
            if start is not None and found.iterations and "initial density is read from file" not in text:
                raise TomatError(f"{target.name}: pw.x did not read the density that it was given:\n{text[-2000:]}")
            for each in (*folder.glob("pw.save/wfc*.dat"), *folder.glob("pw.save/*.gth"), *folder.glob("pw.*xml")):
                each.unlink()
            write_json(folder / RECORD, with_checksum(to_jsonable({"said": asdict(found), "facts": facts})))
            if target.exists():
                shutil.rmtree(target)
            os.replace(folder, target)
        return _kept(target)

    def _may_say_more(self, kept: KeptRun) -> bool:
        """Whether a run was killed, or ended sooner than one would be now."""
        ended = re.search(rf"{ENDED_AFTER} (\S+) s$", kept.said.reason)
        return kept.said.reason == ENDS_EARLY or (ended is not None and float(ended[1]) < self.limit_seconds)

    def _call(self, folder: Path) -> str:
        """Standard output of one run. If it passed the time limit, a message about that is added."""
        # The last two variables are needed because Open MPI otherwise refuses to start as root.
        settings = {
            "OMP_NUM_THREADS": str(THREADS),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        try:
            done = subprocess.run(
                [self.path, "-i", "pw.in"], cwd=folder, env={**os.environ, **settings}, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=self.limit_seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"").decode(errors="replace")
            return f"{said}\nError in routine tomat (1):\n{ENDED_AFTER} {self.limit_seconds:g} s\n"
        return done.stdout.decode(errors="replace")


@dataclass(frozen=True)
class _Record:
    said: PwRun
    facts: Mapping[str, Any]


def density_of_run(path: Path, crystal: Crystal, grid_shape: tuple[int, int, int]) -> DensityGrid:
    """The density of a `charge-density.dat`, e/Å³, on a grid of the crystal's cell that holds all of its vectors."""
    vectors, coefficients = read_coefficients(path)
    spectrum = np.zeros(grid_shape, np.complex128)
    if vectors.gamma_only:
        spectrum[tuple(-vectors.miller.T)] = coefficients.conj()
    spectrum[tuple(vectors.miller.T)] = coefficients
    rho = np.fft.ifftn(spectrum).real * (spectrum.size / BOHR_A**3)
    return DensityGrid(rho, crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name)


def _kept(folder: Path) -> KeptRun:
    place, how = folder / RECORD, f"Delete {folder}, and the run is made again."
    content, _ = parse_checked(read_bytes(place), str(place), "a run of pw.x", how)
    record = typed(content, _Record, place, how)
    return KeptRun(record.said, folder, record.facts)
