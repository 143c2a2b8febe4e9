"""Leave-one-out: predicts each training compound by a run of the recipe that was not trained on it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tomat.app.workflow.held_out import predict_with_bar
from tomat.base.documents import parse_checked, read_bytes, with_checksum
from tomat.base.errors import TomatError
from tomat.base.report.formats import number
from tomat.base.report.model import Column, Table
from tomat.base.reporting import console, tell, to_jsonable, write_json
from tomat.base.storage import is_remote
from tomat.data.density.demo.embedded import check_compounds, compounds_of, groups_of, load_stored
from tomat.data.density.elements import symbol_of
from tomat.predict.inference.predictor import RunPredictor
from tomat.predict.inference.trained import load_trained
from tomat.train.run import train
from tomat.train.settings.config import TrainConfig, config_hash

EVALUATION = "leave-one-out.json"
"""File in a run's folder with its figures on the compounds that were left out. If it exists, the run is done."""


def leave_one_out(
    load: Callable[[Sequence[str]], TrainConfig], asked: Sequence[str] | None = None, folds: int | None = None
) -> dict[str, dict[str, Any]]:
    """Train and evaluate a run without each compound in turn, in this process. A finished run is read, an interrupted
    run continues. Returns the free-running figures (`FreeRunningResult.to_dict`) by compound.

    `load` gives the configuration of the recipe with further words. `asked` are some of its training compounds (None:
    all). `folds`: divide the compounds into that many groups and leave out one group at a time. Such a run learns from
    fewer compounds than one without a single compound, so its error should not be smaller.
    """
    recipe = load([])
    if recipe.data.source != "embedded" or recipe.data.left_out:
        raise TomatError(
            "--leave_one_out takes a recipe on the embedded densities (data.source), without data.left_out."
        )
    if is_remote(recipe.output_dir):
        raise TomatError(f"--leave_one_out keeps its runs in a local folder; output_dir is {recipe.output_dir}.")
    compounds = compounds_of(recipe.data.groups)
    check_compounds(asked or (), recipe.data.groups)
    chosen = list(dict.fromkeys(asked or compounds))
    if folds is not None and not 2 <= folds <= len(chosen):
        raise TomatError(f"--folds is {folds}; expected 2 to {len(chosen)}, the number of compounds to leave out.")
    groups = {name: [name] for name in chosen}
    if folds is not None:
        # Every n-th compound, because compounds of the same element are next to each other.
        groups = {f"fold-{k + 1}-of-{folds}": chosen[k::folds] for k in range(folds)}
    found: dict[str, dict[str, Any]] = {}
    for index, (label, names) in enumerate(groups.items(), 1):
        words = ["--data.left_out", json.dumps(names), "--run_name", f"{recipe.run_name}-without-{label}"]
        config = load(words)
        report = Path(config.run_dir) / EVALUATION
        cells = {name: compounds[name] for name in names}
        n_cells = sum(map(len, cells.values()))
        tell(f"{index} of {len(groups)}: without {', '.join(names)} ({n_cells} cells)", highlight=False)
        if report.exists():
            kept, _ = parse_checked(read_bytes(report), str(report), "an evaluation", "Delete it.")
            kept = kept if "settings" not in kept else {label: kept}  # older files have the figures of one compound
            if any(one["settings"].get("config") != config_hash(config) for one in kept.values()):
                raise TomatError(f"{report} is from a recipe with other settings; name another --output_dir.")
            found |= kept
            continue
        result = train(config)
        if result.preempted:
            raise TomatError(f"stopped in the run without {label}; the same command goes on.")
        run = load_trained(result.run_dir)
        predictor = RunPredictor(run)
        its: dict[str, dict[str, Any]] = {}
        for name, materials in cells.items():
            settings = run.settings(f"embedded train, {name}, stored grids") | {"config": config_hash(config)}
            present = {int(number) for each in materials for number in load_stored(each).atomic_numbers}
            if unseen := [symbol_of(number) for number in sorted(present - set(predictor.promolecule.elements))]:
                console.print(f"{name} is not judged: no compound that this run trained on has {', '.join(unseen)}")
                its[name] = {"settings": settings, "unseen_elements": unseen}
                continue
            its[name] = predict_with_bar(predictor, materials, load_stored, settings, groups_of(materials)).to_dict()
        write_json(report, with_checksum(to_jsonable(its)))
        found |= its
    return found


def over_compounds(found: dict[str, dict[str, Any]]) -> tuple[Table, dict[str, float]]:
    """A row for each compound (mean over its cells, worst first); median and mean over the compounds, as fractions."""
    keys = ("free_running_nmae", "promolecule_nmae")
    judged = {name: figures["over_materials"] for name, figures in found.items() if "over_materials" in figures}
    if not judged:
        raise TomatError("none of the compounds was judged: each has an element that no other training compound has.")
    rows = [[name, *(over[key]["mean"] for key in keys)] for name, over in judged.items()]
    rows.sort(key=lambda row: -row[1])
    values = np.array([row[1:] for row in rows], np.float64)
    median, mean = np.median(values, axis=0), values.mean(axis=0)
    columns = [Column("left out"), *(Column(f"{name} %", number(2, 100), True) for name in ("model", "promolecule"))]
    table = Table(
        "", columns, [*rows, ["mean over compounds", *mean.tolist()]], ["median over compounds", *median.tolist()]
    )
    return table, {"compounds": len(rows), "median": float(median[0]), "mean": float(mean[0])}
