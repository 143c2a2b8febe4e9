"""Trains DeepDFT (PaiNN) and ChargE3Net on the demo's cells for the demo's processor time. Each predicts the density
itself or a factor of the sum of atoms. tomat scores the predictions and puts them on a page beside the demo."""

import argparse
import json
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from published_fields_train import SETTINGS

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, count, existing_file, positive_float, positive_int, report_file
from tomat.base.documents import content_checksum, parse_checked, read_bytes, read_json
from tomat.base.errors import TomatError
from tomat.base.records import Amount, typed
from tomat.base.report.formats import number, share
from tomat.base.report.markdown import update_page
from tomat.base.report.model import VERDICT, Column, Report, Section, Table, columns
from tomat.base.report.terminal import show
from tomat.base.reporting import console, replacing, to_jsonable, write_json, write_report, write_text
from tomat.data.density.crystal import Crystal
from tomat.data.density.demo.embedded import demo_index, demo_materials, load_stored
from tomat.data.density.promolecule import Promolecule
from tomat.data.tokens.demo import fit_demo_promolecule
from tomat.predict.evaluation.metrics import nmae
from tomat.predict.inference.interface import electron_count, normalised
from tomat.train.settings.config import load_config

NETWORKS = {"deepdft": "DeepDFT, PaiNN", "charge3net": "ChargE3Net"}
TARGETS = {"density": "density", "promolecule": "sum of atoms x (1 + output)"}
MODELS = tuple(f"{network}-{target}" for target in TARGETS for network in NETWORKS)
CURVE_GROUP = "large"
"""Group of the embedded set for the curves: large cells, on which neither the demo nor these networks are trained."""


def build_parser() -> Parser:
    """The argument parser of this script."""
    parser = Parser(
        prog="python profiling/published_fields.py",
        description="Train DeepDFT's PaiNN and ChargE3Net, from checkouts of their authors' code and in an environment "
        "that has their packages, on the demo's cells for the demo's processor time and three times that; score what "
        "they predict of the ten held-out cells. What is there is not trained again, and what was stopped goes on.",
    )
    parser.add_argument("--deepdft", type=Path, required=True, metavar="DIR", help="github.com/peterbjorgensen/DeepDFT")
    text = "github.com/AIforGreatGood/charge3net"
    parser.add_argument("--charge3net", type=Path, required=True, metavar="DIR", help=text)
    text = "python of an environment with torch, e3nn, ase, scipy, pandas and lz4"
    parser.add_argument("--python", type=existing_file, required=True, metavar="FILE", help=text)
    add_flag(
        parser, "--output", Path("runs/published-fields"), "folder of cells, checkpoints and predictions", type=Path
    )
    text = "processor seconds of the demo's training, of both cores together"
    add_flag(parser, "--cpu_seconds", 600.0, text, type=positive_float)
    add_flag(parser, "--times", [1.0, 3.0], "of these, when the cells are predicted", type=positive_float, nargs="+")
    add_flag(parser, "--models", list(MODELS), "which to train", nargs="+", choices=MODELS)
    add_flag(parser, "--threads", 1, "of a training", type=positive_int)
    add_flag(parser, "--seed", 0, "of weights and voxels", type=count)
    text = "evaluation.json of the demo's run, for its row"
    parser.add_argument("--demo", type=existing_file, metavar="FILE", help=text)
    parser.add_argument("--page", type=Path, metavar="FILE", help="page to write, docs/tracking/published-fields.md")
    parser.add_argument("--about", default="", metavar="TEXT", help="where it was measured, for the page")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the cells, train the missing networks, score, print, and write the requested outputs."""
    commits = {network: commit_of(getattr(args, network)) for network in NETWORKS}
    groups = tuple(load_config("demo").data.groups)
    settings = {"commits": commits, "threads": args.threads, "seed": args.seed, "groups": groups}
    keep_settings(args.output, {**settings, "embedded": content_checksum(demo_index()), "networks": SETTINGS})
    cells = args.output / "cells.npz"
    if not cells.exists():
        train, curve = demo_materials("train", groups), demo_materials("train", (CURVE_GROUP,))
        parts = {"train": train, "curve": curve, "held_out": demo_materials("validation")}
        names = {part: [material.material_id for material in materials] for part, materials in parts.items()}
        write_cells(cells, fit_demo_promolecule(groups), names)
    at = [args.cpu_seconds * times for times in args.times]
    for model in args.models:
        network, _, target = model.partition("-")
        job = {"model": network, "target": target, "cells": cells, "output": args.output, "cpu_seconds": at}
        job |= {
            "threads": args.threads,
            "seed": args.seed,
            **{each: getattr(args, each).resolve() for each in NETWORKS},
        }
        file = args.output / f"{model}-job.json"
        write_text(file, json.dumps(job, default=str))
        trainer = Path(__file__).with_name("published_fields_train.py")
        if subprocess.run([str(args.python), str(trainer), str(file)]).returncode:
            raise TomatError(f"{model} stopped, as is said above; the same command goes on from its last checkpoint.")
    report = collect(args.output, at)
    report["settings"] = settings
    if args.demo is not None:
        report["demo"] = {**of_the_demo(args.demo, report["sum_of_atoms"]["cells"]), "cpu_seconds": args.cpu_seconds}
    show(results_table(report))
    if args.page is not None:
        write_page(report, args.page, args.about)
        console.print(f"page: {args.page}")
    write_report(args.json, report)
    return 0


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, for the page."""
    found = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    if found.returncode:
        raise TomatError(f"{checkout} is no checkout of git; clone the repository that `--help` names.")
    return found.stdout.strip()


def keep_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Note what decides the trainings of a folder.

    Raises:
        TomatError: Those that are there had other settings, which no page can say of both.
    """
    place, given, how = folder / "settings.json", to_jsonable(settings), "Name another --output."
    before = read_json(place, how) if place.exists() else given
    if differ := [name for name in given if not isinstance(before, dict) or before.get(name) != given[name]]:
        raise TomatError(
            f"the trainings in {folder} had other {' and '.join(differ)} than are asked for ({place}). {how}"
        )
    write_json(place, given)


class _Material(TypedDict):
    material_id: str
    free_running_nmae: Amount


class _Evaluation(TypedDict):
    materials: list[_Material]


def of_the_demo(evaluation: Path, cells: Collection[str]) -> dict[str, Any]:
    """The demo's errors, on the same cells, of its `evaluation.json`."""
    how = "Give the evaluation.json of a run of the demo."
    report, _ = parse_checked(read_bytes(evaluation), str(evaluation), "an evaluation", how)
    found = typed(report.get("free_running"), _Evaluation, f"free_running of {evaluation}", how)["materials"]
    by_cell = {each["material_id"]: each["free_running_nmae"] for each in found}
    if by_cell.keys() != set(cells):
        raise TomatError(f"{evaluation} is of other cells than the {len(cells)} that are held out. {how}")
    return over(by_cell)


def write_cells(path: Path, promolecule: Promolecule, parts: Mapping[str, Sequence[str]]) -> None:
    """Write the embedded cells of `train`, `curve` and `held_out` as arrays that can be read without tomat: structures,
    sums of atoms and densities. A held-out cell has its electron count from learnt valences in place of its density."""
    arrays: dict[str, np.ndarray] = {"keys": np.array([f"{part}/{name}" for part in parts for name in parts[part]])}
    for part, name in (key.split("/") for key in arrays["keys"].tolist()):
        grid, key = load_stored(name), f"{part}/{name}"
        crystal = Crystal.of(grid)
        arrays[f"{key}/lattice"] = grid.lattice
        arrays[f"{key}/numbers"] = grid.atomic_numbers
        arrays[f"{key}/frac"] = grid.frac_coords
        arrays[f"{key}/sum_of_atoms"] = promolecule.density(crystal, grid.grid_shape)
        if part != "held_out":
            arrays[f"{key}/rho"] = grid.rho
        else:
            arrays[f"{key}/electrons"] = np.array(electron_count(crystal, None, promolecule.valences)[0])
    with replacing(path) as aside, aside.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]


def over(by_cell: Mapping[str, float]) -> dict[str, Any]:
    """Median, mean and worst NMAE over the cells, and the NMAE by cell."""
    values = list(by_cell.values())
    figures = {"median": float(np.median(values)), "mean": float(np.mean(values)), "worst": max(values)}
    return {**figures, "cells": dict(by_cell)}


def score(predicted: Mapping[str, np.ndarray], electrons: Mapping[str, float]) -> dict[str, Any]:
    """NMAE of whole cells, each scaled to its electron count, like tomat's own predictions."""
    truths = {name: load_stored(name) for name in electrons}
    scaled = {name: normalised(predicted[name], Crystal.of(truths[name]), electrons[name])[0] for name in truths}
    return over({name: nmae(scaled[name], truth.rho) for name, truth in truths.items()})


def collect(folder: Path, at: Sequence[float]) -> dict[str, Any]:
    """The scores of all saved predictions: every model at the times that it has reached."""
    with np.load(folder / "cells.npz") as cells:
        names = [key[len("held_out/") :] for key in cells["keys"].tolist() if key.startswith("held_out/")]
        electrons = {name: float(cells[f"held_out/{name}/electrons"]) for name in names}
        sum_of_atoms = score({name: cells[f"held_out/{name}/sum_of_atoms"] for name in names}, electrons)
    models = {}
    for model in MODELS:
        if not (folder / f"{model}.json").is_file():
            continue
        models[model] = json.loads((folder / f"{model}.json").read_bytes()) | {"results": []}
        for seconds in at:
            if (file := folder / f"{model}-{seconds:g}.npz").is_file():
                with np.load(file) as predicted:
                    spent, steps = predicted["counts"].tolist()
                    scores = score(predicted, electrons)
                models[model]["results"].append({"cpu_seconds": spent, "steps": int(steps), **scores})
    return {"sum_of_atoms": sum_of_atoms, "models": models}


def results_table(report: Mapping[str, Any]) -> Table:
    """A table of the sum of atoms, the demo, and every model at each time."""
    rows: list[tuple[Any, ...]] = [_row("sum of atoms", "", None, None, report["sum_of_atoms"], None)]
    mean = None
    if "demo" in report:
        mean = report["demo"]["mean"]
        rows.append(_row("the demo", "", None, None, report["demo"], mean))
    for model in (model for model in MODELS if model in report["models"]):
        network, _, target = model.partition("-")
        found = report["models"][model]
        for result in found["results"]:
            words = NETWORKS[network], TARGETS[target], found["parameters"], result["steps"]
            rows.append(_row(*words, result, mean))
    heads = [*columns("network", "it says"), *columns("parameters", "steps", show=number(0), right=True)]
    heads += [Column("CPU s", number(0)), *columns("median", "mean", "worst", show=share, right=True)]
    return Table("", [*heads, Column("mean, of the demo's", number(1))], rows)


def _row(name: str, target: str, parameters: Any, steps: Any, found: Mapping[str, Any], mean: Any) -> tuple[Any, ...]:
    figures = (found["median"], found["mean"], found["worst"])
    ratio = found["mean"] / mean if mean else None
    return (name, target, parameters, steps, found.get("cpu_seconds"), *figures, ratio)


def write_page(report: Mapping[str, Any], page: Path, about: str) -> None:
    """Write or update the page: versions, settings, results, cells and curves."""
    settings = report["settings"]
    models = {model: report["models"][model] for model in MODELS if model in report["models"]}
    versions = {name: version for each in models.values() for name, version in each["packages"].items()}
    said = (
        f"DeepDFT `{settings['commits']['deepdft'][:10]}`, ChargE3Net `{settings['commits']['charge3net'][:10]}`, "
        f"{', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}; training cells of the groups "
        f"{', '.join(settings['groups'])}, stored grids, seed {settings['seed']}. CPU seconds are those of the steps, "
        f"graphs included, predictions not. {about}"
    )
    used = [f"{model}: `{json.dumps(each['settings'], sort_keys=True)}`." for model, each in models.items()]
    cells = sorted(report["sum_of_atoms"]["cells"])
    by_cell = {"sum of atoms": report["sum_of_atoms"]} | ({"the demo": report["demo"]} if "demo" in report else {})
    by_cell |= {f"{model}, {each['cpu_seconds']:.0f} s": each for model in models for each in models[model]["results"]}
    rows = [(cell, *(each["cells"].get(cell) for each in by_cell.values())) for cell in cells]
    heads = [Column("cell"), *columns(*by_cell, show=share, right=True)]
    words = "sum |difference| / sum of the density, unscaled, over 100 voxels of each cell of the group "
    curves = Table("", [Column("CPU s", number(0)), *columns(*models, show=share, right=True)], curve_rows(models))
    sections = (
        Section("", [said, *used], "setting"),
        Section("Ten held-out cells, from their structures alone", [results_table(report)], "results"),
        Section("By cell", [Table("", heads, rows)], "cells"),
        Section(
            "Curves",
            [f"{words}`{CURVE_GROUP}`, which none of them learns from; of each the first point from then on.", curves],
            "curves",
        ),
        VERDICT,
    )
    update_page(page, Report("Published networks on the demo's cells", sections))


def curve_rows(models: Mapping[str, Any]) -> list[tuple[float | None, ...]]:
    """The error of each model at ten times: its first point from each tenth of the longest curve on."""
    longest = max((each["curve"][-1][0] for each in models.values()), default=0.0)
    rows = []
    for tenth in range(1, 11):
        place = longest * tenth / 10 - 1e-9
        rows.append((place, *(next((e for s, _, e in m["curve"] if s >= place), None) for m in models.values())))
    return rows


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
