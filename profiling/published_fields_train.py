"""Trains one published network, in an environment with its packages and without tomat; `published_fields.py` starts it.

Run as `python published_fields_train.py JOB.json`. The job names the checkouts, the cells, the network, its target and
the CPU seconds. Networks, graphs and batches are those of the checkouts; the training settings are in `SETTINGS`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

CUTOFF_A = 4.0
"""Cut-off of neighbours in both publications."""
SETTINGS: dict[str, dict[str, Any]] = {
    "deepdft": {
        "loss": "L1Loss",
        "learning_rate": 1e-3,
        "max_grad_norm": 1.0,
        "cells": 2,
        "probes": 250,
        "size": {"node_size": 64},
    },
    "charge3net": {"loss": "L1Loss", "learning_rate": 5e-3, "cells": 4, "probes": 100, "size": {"mul": 64, "lmax": 2}},
}
"""Loss (e/Å³) and settings of each network, as chosen here. ChargE3Net's loss is the published one. With DeepDFT's
published loss, the mean square, PaiNN's error was 41 % after 100 CPU seconds (rate 5e-4), with this one 11 %. PaiNN's
gradients, which its authors do not clip, diverged after 930 steps at a rate of 2e-3."""
CURVE_POINTS = 30
PREDICTED_AT_ONCE = 1000
"""Voxels of a batch in prediction."""


@dataclass(frozen=True)
class Cell:
    """A cell in the form that both networks read. Densities are `[nx, ny, nz]`, e/Å³."""

    atoms: Any
    places: np.ndarray
    """Positions of the voxels, `[nx, ny, nz, 3]`, Å."""
    sum_of_atoms: np.ndarray
    rho: Any
    """Density with the shape of `sum_of_atoms`; None for a held-out cell, whose density stays on tomat's side."""


def read_cells(file: Path) -> dict[str, dict[str, Cell]]:
    """Part (`train`, `curve`, `held_out`) -> name -> cell, from the file of `published_fields.write_cells`."""
    ase = import_module("ase")
    found: dict[str, dict[str, Cell]] = {}
    with np.load(file) as stored:
        for key in stored["keys"].tolist():
            part, name = key.split("/")
            lattice, frac = stored[f"{key}/lattice"], stored[f"{key}/frac"]
            # Atoms are moved into the cell: for others, ChargE3Net's neighbour search does not reach far enough.
            atoms = ase.Atoms(stored[f"{key}/numbers"], cell=lattice, scaled_positions=frac % 1.0, pbc=True)
            of_atoms = stored[f"{key}/sum_of_atoms"]
            axes = np.meshgrid(*(np.arange(n) / n for n in of_atoms.shape), indexing="ij")
            rho = stored[f"{key}/rho"] if f"{key}/rho" in stored else None
            found.setdefault(part, {})[name] = Cell(atoms, np.stack(axes, -1) @ lattice, of_atoms, rho)
    return found


def build(job: dict[str, Any], size: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The network, its last layer, and the module that builds graphs."""
    # The checkouts are not packages, so each is imported from its own folder.
    sys.path[:0] = [job["deepdft"], job["charge3net"]]
    if job["model"] == "deepdft":
        net = import_module("densitymodel").PainnDensityModel(3, size["node_size"], CUTOFF_A)
        return net, net.probe_model.readout_function[-1], import_module("src.charge3net.data.graph_construction")
    e3 = import_module("src.charge3net.models.e3")
    net = e3.E3DensityModel(cutoff=CUTOFF_A, num_basis=20, **size)
    # Its first layer gets integers (a one for the element, and zeros), which e3nn 0.6 does not multiply with weights.
    net.atom_model.convolutions[0].register_forward_pre_hook(
        lambda _, given: (given[0].float(), given[1].float(), *given[2:])
    )
    return net, net.probe_model.readout, import_module("src.charge3net.data.graph_construction")


class Training:
    """One network, its optimizer, and a running mean of its weights over about the last ninth of the steps. The mean is
    evaluated, because neither publication lowers its learning rate within so few steps."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.torch = import_module("torch")
        self.torch.set_num_threads(job["threads"])
        self.torch.manual_seed(job["seed"])
        np.random.seed(job["seed"])  # the published sampling of probes draws from it
        self.settings = SETTINGS[job["model"]] | job.get("settings", {})
        self.relative = job["target"] == "promolecule"
        self.net, last, graphs = build(job, self.settings["size"])
        if self.relative:
            # So the first prediction is the sum of atoms.
            for parameter in last.parameters():
                self.torch.nn.init.zeros_(parameter)
        self.graph: Callable[..., Any] = partial(graphs.KdTreeGraphConstructor, CUTOFF_A)
        self.collate: Callable[..., Any] = import_module("src.charge3net.data.collate").collate_list_of_dicts
        self.loss = getattr(self.torch.nn, self.settings["loss"])()
        self.optimizer = self.torch.optim.Adam(self.net.parameters(), lr=self.settings["learning_rate"])
        self.mean = {name: value.detach().clone() for name, value in self.net.named_parameters()}
        self.step, self.cpu_seconds, self.curve = 0, 0.0, []
        self.draw = np.random.default_rng(job["seed"])

    def sampled(self, cells: list[Cell], probes: int) -> tuple[Any, Any, Any]:
        """A batch of probes, drawn as published, and their densities and sums of atoms, `[cells, probes]`."""
        graph = self.graph(num_probes=probes)
        pairs = ((cell, np.stack([cell.rho, cell.sum_of_atoms], -1)) for cell in cells)
        batch = self.collate([graph(pair, cell.atoms, cell.places) for cell, pair in pairs])
        rho, of_atoms = batch.pop("probe_target").unbind(-1)
        return batch, rho, of_atoms

    def density(self, batch: Any, of_atoms: Any) -> Any:
        """The network's output, or the sum of atoms times (1 + output). With the exponential of the output as the
        factor, PaiNN's weights were not finite after 550 steps at twice the rate."""
        said = self.net(batch).reshape(of_atoms.shape)
        return of_atoms * (1 + said) if self.relative else said

    def learn(self, cells: list[Cell]) -> None:
        """Take one step on randomly drawn cells, all with the same probability."""
        before = time.process_time()
        chosen = self.draw.integers(len(cells), size=self.settings["cells"])
        batch, rho, of_atoms = self.sampled([cells[i] for i in chosen], self.settings["probes"])
        loss = self.loss(self.density(batch, of_atoms), rho)
        if not loss.isfinite():
            sys.exit(f"the loss is {loss.item()} in step {self.step}; a lower learning rate may mend it.")
        self.optimizer.zero_grad()
        loss.backward()
        if "max_grad_norm" in self.settings:
            self.torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.settings["max_grad_norm"])
        self.optimizer.step()
        self.step += 1
        with self.torch.no_grad():
            for name, value in self.net.named_parameters():
                self.mean[name].lerp_(value, 9 / (9 + self.step))
        self.cpu_seconds += time.process_time() - before

    def swap(self) -> None:
        """Exchange the weights and their running mean."""
        for name, value in self.net.named_parameters():
            value.data, self.mean[name] = self.mean[name], value.data

    def error(self, batches: list[tuple[Any, Any, Any]]) -> float:
        """sum |difference| / sum of the density over the voxels of `batches`, without scaling to electrons."""
        self.swap()
        with self.torch.no_grad():
            off = sum((self.density(batch, of_atoms) - rho).abs().sum().item() for batch, rho, of_atoms in batches)
        self.swap()
        return off / sum(rho.sum().item() for _, rho, _ in batches)

    def predict(self, cell: Cell) -> np.ndarray:
        """The predicted density of the whole cell, e/Å³, not scaled to electrons."""
        graph, said = self.graph(), []
        places, of_atoms = cell.places.reshape(-1, 3), cell.sum_of_atoms.ravel()
        self.swap()
        for start in range(0, len(places), PREDICTED_AT_ONCE):
            here = slice(start, start + PREDICTED_AT_ONCE)
            batch = self.collate([graph(of_atoms[here], cell.atoms, places[here])])
            with self.torch.no_grad():
                said.append(self.density(batch, batch.pop("probe_target")).numpy().ravel())
        self.swap()
        return np.concatenate(said).reshape(cell.sum_of_atoms.shape)

    def state(self) -> dict[str, Any]:
        kept = {"net": self.net.state_dict(), "mean": self.mean, "optimizer": self.optimizer.state_dict()}
        counts = {"step": self.step, "cpu_seconds": self.cpu_seconds, "curve": self.curve}
        return kept | counts | {"draw": self.draw.bit_generator.state, "probes": np.random.get_state()}

    def resume(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.mean, self.step, self.curve = state["mean"], state["step"], state["curve"]
        self.cpu_seconds, self.draw.bit_generator.state = state["cpu_seconds"], state["draw"]
        np.random.set_state(state["probes"])


def save(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}")
    write(part)
    os.replace(part, path)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    folder, name = Path(job["output"]), f"{job['model']}-{job['target']}"
    cells = read_cells(Path(job["cells"]))
    training = Training(job)
    checkpoint = folder / f"{name}.pt"
    fixed = [training.sampled([cell], 100) for cell in cells["curve"].values()]
    if checkpoint.exists():
        training.resume(training.torch.load(checkpoint, weights_only=False))
    every = max(job["cpu_seconds"]) / CURVE_POINTS
    train = list(cells["train"].values())
    results = {at: folder / f"{name}-{at:g}.npz" for at in job["cpu_seconds"]}
    while waiting := [at for at, path in results.items() if not path.exists()]:
        if training.cpu_seconds < min(waiting):
            training.learn(train)
        reached, last = training.cpu_seconds >= min(waiting), training.curve[-1][0] if training.curve else -every
        if training.cpu_seconds >= last + (0.01 if reached else every):
            training.curve.append([training.cpu_seconds, training.step, training.error(fixed)])
            said = f"step {training.step}, {training.curve[-1][2]:.2%}"
            print(f"{name}: {training.cpu_seconds:.0f} CPU s, {said}", flush=True)
            about = {
                "settings": training.settings,
                "parameters": sum(value.numel() for value in training.mean.values()),
                "packages": {each: import_module(each).__version__ for each in ("torch", "e3nn", "ase", "numpy")},
                "curve": training.curve,
            }
            # Saved before the cells are predicted, which takes minutes, so that a stop then loses no step.
            save(checkpoint, partial(training.torch.save, training.state()))
            save(folder / f"{name}.json", lambda part, about=about: part.write_text(json.dumps(about)))
        if reached:
            found = {each: training.predict(cell) for each, cell in cells["held_out"].items()}
            found["counts"] = np.array([training.cpu_seconds, training.step])
            save(results[min(waiting)], partial(_npz, arrays=found))


def _npz(part: Path, arrays: dict[str, np.ndarray]) -> None:
    with part.open("wb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
