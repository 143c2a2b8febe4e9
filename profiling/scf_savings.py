"""Measures what a predicted density saves in a self-consistent calculation.

pw.x computes cells of the embedded set that a run was not trained on, with the pseudopotentials, cut-off and k-points
of their references, from several starting densities. A prediction reads only the structure; its electron count follows
from learnt valences.
"""

import argparse
import datetime
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from embedded_set_gth import FUNCTIONAL, gth_text, require_eminus
from pwscf import CHARGE_DENSITY, DIAGO_THR_INIT, THREADS, KeptRun, PwCalculation, PwX, Start, density_of_run
from scf_savings_page import savings, table, write_page

from tomat.app.cli import main
from tomat.base.arguments import (
    Parser,
    add_flag,
    iso_date,
    output_file,
    positive_float,
    positive_int,
    report_file,
    run_folder,
)
from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.report.terminal import show
from tomat.base.reporting import console, counted, write_report
from tomat.data.density.crystal import Crystal
from tomat.data.density.demo.embedded import CRYSTALS, compounds_of, demo_index, demo_materials, load_stored
from tomat.data.density.elements import symbol_of
from tomat.data.density.espresso import read_coefficients, write_charge_density
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.grid import DensityGrid
from tomat.predict.evaluation.metrics import nmae
from tomat.predict.inference.interface import Predictor, electron_count
from tomat.predict.inference.predictor import load
from tomat.predict.inference.sum_of_atoms import PromoleculePredictor
from tomat.train.settings.schema import DataConfig

CONV_THR_RY = 1e-8
OWN, ATOMS, PROMOLECULE, PREDICTION, CONVERGED = "own", "free-atoms", "promolecule", "prediction", "converged"
STARTS = (OWN, ATOMS, PROMOLECULE, PREDICTION, CONVERGED)
RY_PER_HARTREE = 2.0
BOX_A = 8.0
"""Side of the cube in which a free atom is computed."""
ATOM_DEGAUSS_RY = 0.02
"""Smearing that fills the orbitals of an open shell equally, like the atoms in a pseudopotential's file."""
DRAWN_FROM = (CRYSTALS, "further-crystals")
MOST_ATOMS = 3
"""Most atoms of a drawn cell, so that a run of pw.x takes seconds."""
LEAST_COMPOUNDS = 2
"""Other compounds that contain each element of a drawn one: without any, it has no promolecule atom and no valence."""


@dataclass(frozen=True)
class Cell:
    """A cell of the embedded set."""

    recipe: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.recipe["material_id"]

    def calculation(self) -> PwCalculation:
        """The calculation with the settings of the cell's reference."""
        recipe = self.recipe
        valences = dict(zip(recipe["symbols"], recipe["valence"], strict=True))
        return PwCalculation(
            crystal=Crystal.of(load_stored(self.name)),
            e_cut_ry=RY_PER_HARTREE * recipe["e_cut_hartree"],
            k_mesh=tuple(recipe["k_mesh"]),
            k_shift=tuple(recipe["k_shift"]),
            pseudopotentials={symbol: gth_text(symbol, valence) for symbol, valence in valences.items()},
            functional=FUNCTIONAL.upper(),
            conv_thr_ry=CONV_THR_RY,
            degauss_ry=RY_PER_HARTREE * recipe["smearing_hartree"],
            symmetry=recipe["engine"] == "pw.x",
        )


def build_parser() -> Parser:
    """The argument parser of this script."""
    parser = Parser(
        description="Computes cells of the embedded set with pw.x from its own start, from free atoms, the "
        "promolecule, a run's prediction and the converged density. Needs pw.x and `uv sync --extra demo-data`. "
        "Started again, it does what --work lacks.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    text = "folder of the run that predicts"
    what.add_argument("--run", dest="run_dir", type=run_folder, metavar="RUN", help=text)
    text = "print N training compounds, drawn by hash, for the `--data.left_out` of a run, and end"
    what.add_argument("--draw", type=positive_int, metavar="N", help=text)
    text = "cells (default: the first of each compound that the run has not seen)"
    parser.add_argument("--materials", nargs="+", metavar="ID", help=text)
    add_flag(parser, "--rounds", 3, "runs of each start, in turn, for their times", type=positive_int)
    add_flag(parser, "--work", Path("runs/scf-savings"), "folder that keeps the runs of pw.x", type=Path)
    add_flag(parser, "--pw", "pw.x", "program")
    add_flag(parser, "--limit_seconds", 3600.0, "of one run of pw.x", type=positive_float)
    parser.add_argument("--page", type=output_file, metavar="FILE", help="page to write or bring up to date")
    today = datetime.date.today().isoformat()
    parser.add_argument("--date", type=iso_date, default=today, help="of the page (default: today)")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Compute what is missing, print, and write the figures and the page.

    Raises:
        TomatError: No pw.x, no eminus, no such cell, a cell that the run was trained on, or a run that cannot predict.
    """
    if args.draw:
        drawn = drawn_compounds(args.draw)
        print(json.dumps(drawn))
        write_report(args.json, {"left_out": drawn})
        return 0
    pw = PwX(args.work, args.pw, args.limit_seconds)
    require_eminus()
    console.print(f"{pw.path}, runs are kept in {args.work}; loading {args.run_dir}.")
    predictor = load(args.run_dir)
    data = predictor.run.config.data
    cells = chosen_cells(args.materials, data)
    console.print(counted(len(cells), "cell"))
    rows: list[dict[str, Any]] = []
    with progress() as bar:
        task = bar.add_task("pw.x", total=len(cells) * len(STARTS) * args.rounds)
        for cell in cells:

            def on_run(start: str, name: str = cell.name) -> None:
                bar.update(task, description=f"{name}, {start}")

            def on_done(runs: int) -> None:
                bar.advance(task, runs)

            rows.append(study(cell, pw, predictor, args.rounds, on_run, on_done))
            console.print(f"{cell.name}: {in_words(rows[-1])}", soft_wrap=True)
    report = {
        "settings": {
            "program": f"pw.x {rows[0]['version']}", "program_sha256": pw.sha256, "threads": THREADS,
            "functional": FUNCTIONAL.upper(), "pseudopotentials": "GTH-PBE of eminus", "conv_thr_ry": CONV_THR_RY,
            "diago_thr_init": DIAGO_THR_INIT, "rounds": args.rounds, "predictor": predictor.identity,
            "left_out": list(data.left_out), "box_a": BOX_A, "atom_degauss_ry": ATOM_DEGAUSS_RY, "date": args.date,
        },
        "over_cells": over_cells(rows),
        "cells": rows,
    }  # fmt: skip
    show(table(report), *savings(report))
    write_report(args.json, report)
    if args.page is not None:
        write_page(report, args.page)
    return 0


def drawn_compounds(count: int) -> list[str]:
    """Training compounds for a run to leave out, by a rule that does not depend on any result.

    The candidates are compounds whose first crystal has at most `MOST_ATOMS` atoms and was computed by pw.x with fixed
    occupations, in the order of the SHA-256 of their names. A compound is skipped if one of its elements would stay in
    fewer than `LEAST_COMPOUNDS` compounds of crystals.

    Raises:
        TomatError: The rule finds fewer compounds.
    """
    cells, left = _cells(), compounds_of(DRAWN_FROM)
    elements = {name: set(cells[ids[0]].recipe["symbols"]) for name, ids in left.items()}
    drawn: list[str] = []
    for name in sorted(left, key=lambda each: hashlib.sha256(each.encode()).hexdigest()):
        recipe = cells[left[name][0]].recipe
        by_pw = recipe["engine"] == "pw.x" and not recipe["smearing_hartree"]
        others = [its for other, its in elements.items() if other != name]
        stays = all(sum(one in its for its in others) >= LEAST_COMPOUNDS for one in elements[name])
        if len(drawn) < count and by_pw and len(recipe["symbols"]) <= MOST_ATOMS and stays:
            drawn.append(name)
            del elements[name]
    if len(drawn) < count:
        raise TomatError(f"--draw is {count}; the rule finds {len(drawn)} compounds.")
    return drawn


def chosen_cells(materials: Sequence[str] | None, data: DataConfig) -> list[Cell]:
    """The named cells, or without names the first cell of each compound that is held out or was left out.

    Raises:
        TomatError: No cell has a name, or a run on this data was trained on a named cell.
    """
    cells = _cells()
    if missing := [name for name in materials or () if name not in cells]:
        raise TomatError(
            f"no embedded density {missing[0]!r}; `tomat demo-data show` lists the {len(cells)} there are."
        )
    embedded = data.source == "embedded"
    if not embedded:
        said = f"the run's data are of source {data.source}: that it has seen none of these cells is taken for granted"
        console.print(f"note: {said}", soft_wrap=True)
    trained = demo_materials("train", data.groups, data.left_out) if embedded else []
    seen = {each.material_id for each in trained}
    if known := [name for name in materials or () if name in seen]:
        said = f"the run was trained on {known[0]}, which shows nothing of what it saves on others"
        raise TomatError(f"{said}. Train one with --data.left_out, or leave out --materials.")
    first: dict[str, str] = {}
    for each in (*demo_materials("validation"), *demo_materials("train", data.groups)):
        if each.material_id not in seen:
            first.setdefault(cells[each.material_id].recipe["compound"], each.material_id)
    return [cells[name] for name in materials or first.values()]


def _cells() -> dict[str, Cell]:
    return {entry["recipe"]["material_id"]: Cell(entry["recipe"]) for entry in demo_index()["cells"]}


def study(
    cell: Cell,
    pw: PwX,
    predictor: Any,
    rounds: int,
    on_run: Callable[[str], None],
    on_done: Callable[[int], None],
) -> dict[str, Any]:
    """Compute one cell from every start, `rounds` times in turn. If a run fails, its start has the reason.

    Raises:
        TomatError: The valences are not known, or the predictor cannot predict the cell.
    """
    calculation = cell.calculation()
    crystal = calculation.crystal
    electrons, _ = electron_count(crystal, None, predictor.valences)
    if electrons is None:
        raise TomatError(f"{cell.name}: the training set has taught no valences, so its electrons are not known.")
    row: dict[str, Any] = {
        "material_id": cell.name,
        "atoms": len(crystal.atomic_numbers),
        "electrons": electrons,
        "e_cut_ry": calculation.e_cut_ry,
        "k_mesh": list(calculation.k_mesh),
    }
    on_run(OWN)
    own = pw.run(calculation, OWN, None)
    row |= {"version": own.said.version, "k_points": own.said.k_points}
    if own.said.iterations is None:
        on_done(len(STARTS) * rounds)
        rest = not_run("not run: pw.x did not converge from its own start")
        return row | {
            "converged_from_embedded_nmae": None,
            "starts": dict.fromkeys(STARTS, rest) | {OWN: figures([own])},
        }
    assert own.said.fft_shape is not None
    shape = own.said.fft_shape
    vectors, _ = read_coefficients(own.folder / CHARGE_DENSITY)
    truth = density_of_run(own.folder / CHARGE_DENSITY, crystal, shape)

    def predicted(by: Predictor) -> Start:
        def write(path: Path) -> dict[str, Any]:
            found = by.predict(crystal, shape, electrons=electrons)
            write_charge_density(found, path, vectors)
            return {"nmae": nmae(found.rho, truth.rho), "prediction_seconds": found.seconds}

        return Start(f"{by.identity}, {electrons} electrons on {shape}", write)

    on_run("free atoms")
    atoms = {symbol: free_atom(symbol, calculation, pw) for symbol in calculation.pseudopotentials}

    def of_atoms() -> Start:
        def write(path: Path) -> dict[str, Any]:
            grid = superposition(atoms, crystal, shape)
            write_charge_density(grid, path, vectors)
            return {"nmae": nmae(grid.rho, truth.rho)}

        return Start(", ".join(str(atom.folder.name) for atom in atoms.values()), write)

    def converged() -> Start:
        def write(path: Path) -> dict[str, Any]:
            path.write_bytes((own.folder / CHARGE_DENSITY).read_bytes())
            return {"nmae": 0.0}

        return Start(own.folder.name, write)

    starts: dict[str, Start | None] = {
        OWN: None,
        ATOMS: of_atoms(),
        PROMOLECULE: predicted(PromoleculePredictor(predictor.promolecule)),
        PREDICTION: predicted(predictor),
        CONVERGED: converged(),
    }
    lost = [symbol for symbol, atom in atoms.items() if atom.said.iterations is None]
    runs: dict[str, list[KeptRun]] = {name: [] for name in STARTS if name != ATOMS or not lost}
    for turn in range(rounds):
        for name, found in runs.items():
            on_run(name)
            found.append(pw.run(calculation, name, starts[name], turn))
            on_done(1)
    told = {name: figures(found) for name, found in runs.items()}
    if lost:
        on_done(rounds)
        told[ATOMS] = not_run(f"not run: the free atom of {', '.join(lost)} did not converge")
    reference = load_stored(cell.name)
    same = density_of_run(own.folder / CHARGE_DENSITY, crystal, reference.grid_shape)
    return row | {
        "fft_shape": list(shape),
        "converged_from_embedded_nmae": nmae(same.rho, reference.rho),
        "starts": {name: told[name] for name in STARTS},
    }


def not_run(reason: str) -> dict[str, Any]:
    """Figures of a start that was not tried."""
    return {"iterations": None, "reason": reason, "cpu_seconds": None, "wall_seconds": None}


def figures(runs: Sequence[KeptRun]) -> dict[str, Any]:
    """The figures of equal runs: the values that they share, and the medians of their times."""
    said = runs[0].said
    times = {
        name: [value for each in runs if (value := getattr(each.said, name)) is not None]
        for name in ("wall_seconds", "cpu_seconds")
    }
    return {
        "iterations": said.iterations,
        "reason": said.reason,
        "first_accuracy_ry": said.accuracy_ry[0] if said.accuracy_ry else None,
        "energy_ry": said.energy_ry,
        **{name: float(np.median(values)) if values else None for name, values in times.items()},
        **runs[0].facts,
    }


def in_words(row: Mapping[str, Any]) -> str:
    """The iterations of a cell's starts, in words."""
    return ", ".join(f"{name} {each['iterations'] or each['reason']}" for name, each in row["starts"].items())


def over_cells(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The share of iterations and CPU time that each start saves against each other start, over cells and by compound.

    A cell counts if both starts converged.
    """
    found: dict[str, Any] = {}
    for start in STARTS:
        for base in STARTS:
            if start == base:
                continue
            for what in ("iterations", "cpu_seconds"):
                shares: list[float] = []
                of_compounds: dict[str, list[float]] = {}
                for row in rows:
                    one, other = row["starts"][start][what], row["starts"][base][what]
                    if one is not None and other:
                        shares.append(1 - one / other)
                        of_compounds.setdefault(row["material_id"].partition("-")[0], []).append(shares[-1])
                if shares:
                    told = found.setdefault(start, {}).setdefault(f"against_{base}", {})
                    told[f"{what}_saved"] = {
                        "median": float(np.median(shares)),
                        "min": min(shares),
                        "max": max(shares),
                        "cells": len(shares),
                    }
                    told[f"{what}_saved_by_compound"] = by_compound(of_compounds)
    return found


def by_compound(shares: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Statistics over compounds.

    The mean over a compound's cells is one observation, because strained cells of one crystal give nearly the same.

    Args:
        shares: Compound -> shares of its cells.

    Returns:
        `mean` and `median` over the compounds, the mean's 95 % interval by Student's t (`ci95`; None for a single one),
        the numbers of compounds above and below zero, and the two-sided `sign_test_p_value`, without ties.
    """
    from scipy.stats import binomtest, t

    means = np.array([np.mean(each) for each in shares.values()])
    half = float(t.ppf(0.975, means.size - 1) * means.std(ddof=1) / np.sqrt(means.size)) if means.size > 1 else None
    mean, better, worse = float(means.mean()), int((means > 0).sum()), int((means < 0).sum())
    return {
        "compounds": means.size,
        "mean": mean,
        "median": float(np.median(means)),
        "ci95": None if half is None else [mean - half, mean + half],
        "better": better,
        "worse": worse,
        "sign_test_p_value": float(binomtest(better, better + worse).pvalue) if better + worse else 1.0,
    }


def free_atom(symbol: str, calculation: PwCalculation, pw: PwX) -> KeptRun:
    """An atom in a box, with the pseudopotential and cut-off of a calculation."""
    numbers = calculation.crystal.atomic_numbers
    number = next(z for z in numbers.tolist() if symbol_of(z) == symbol)
    box = Crystal(BOX_A * np.eye(3), np.array([number]), np.zeros((1, 3)), f"{symbol}-atom")
    atom = PwCalculation(
        crystal=box,
        e_cut_ry=calculation.e_cut_ry,
        k_mesh=(1, 1, 1),
        k_shift=(0, 0, 0),
        pseudopotentials={symbol: calculation.pseudopotentials[symbol]},
        functional=calculation.functional,
        conv_thr_ry=calculation.conv_thr_ry,
        degauss_ry=ATOM_DEGAUSS_RY,
    )
    return pw.run(atom, "atom", None)


def superposition(atoms: Mapping[str, KeptRun], crystal: Crystal, shape: tuple[int, int, int]) -> DensityGrid:
    """The sum of free atoms on a grid of a cell: rho(G) = sum over atoms of f(|G|) exp(-i G R) / volume.

    The form factor f comes from the atom's box, whose reciprocal vectors are 2 pi / `BOX_A` apart. It is averaged over
    the vectors of each length, which leaves the spherical part, and interpolated between lengths. Beyond the largest
    length it is 0.
    """
    from scipy.interpolate import CubicSpline

    axes = [np.fft.fftfreq(side, 1 / side).round().astype(int) for side in shape]
    miller = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    lengths = np.linalg.norm(miller @ (2 * np.pi * np.linalg.inv(crystal.lattice).T), axis=-1)
    spectrum = np.zeros(shape, np.complex128)
    for symbol, atom in atoms.items():
        squares, values = form_factor(atom)
        known = 2 * np.pi / BOX_A * np.sqrt(squares)
        # f is an even function; with values on both sides the spline is smooth at 0.
        radial = CubicSpline(np.concatenate([-known[:0:-1], known]), np.concatenate([values[:0:-1], values]))
        factor = np.where(lengths <= known[-1], radial(lengths), 0.0)
        for z, site in zip(crystal.atomic_numbers.tolist(), crystal.frac_coords, strict=True):
            if symbol_of(z) == symbol:
                spectrum += factor * np.exp(-2j * np.pi * (miller @ site))
    rho = np.fft.ifftn(spectrum).real * (spectrum.size / crystal.volume_a3)
    return DensityGrid(rho, crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name)


def form_factor(atom: KeptRun) -> tuple[np.ndarray, np.ndarray]:
    """Squared lengths of reciprocal vectors in units of (2 pi / `BOX_A`)^2, and the form factor (electrons) at each."""
    vectors, coefficients = read_coefficients(atom.folder / CHARGE_DENSITY)
    squares, place = np.unique((vectors.miller.astype(np.int64) ** 2).sum(axis=1), return_inverse=True)
    sums = np.bincount(place, weights=np.real(coefficients))
    return squares, sums / np.bincount(place) * (BOX_A / BOHR_A) ** 3


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
