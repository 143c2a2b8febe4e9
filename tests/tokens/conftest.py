from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tomat.codec.histogram import DensityHistogram
from tomat.codec.lloyd_max import LloydMaxCodec, fit_lloyd_max
from tomat.density.grid import DensityGrid
from tomat.density.zarr_store import write_zarr
from tomat.tokens.pipeline.config import RetokenizeConfig

MakeGrid = Callable[..., DensityGrid]


def _make_grid(shape=(10, 12, 9), n_atoms=3, seed=0, material_id="", lattice=None) -> DensityGrid:
    """A smooth, periodic, positive density with a value of its own at every voxel, in a cell that is not orthogonal."""
    rng = np.random.default_rng(seed)
    x, y, z = (np.arange(n) / n for n in shape)
    phase = rng.uniform(0, 1, 3)
    log_rho = (
        np.cos(2 * np.pi * (x[:, None, None] + phase[0]))
        + np.cos(2 * np.pi * (y[None, :, None] + phase[1]))
        + np.cos(2 * np.pi * (z[None, None, :] + phase[2]))
    )
    rho = np.exp(log_rho + rng.normal(0, 0.05, shape))
    if lattice is None:
        lattice = [[3.1, 0, 0], [0.4, 4.2, 0], [-0.3, 0.2, 5.3]]
    numbers = rng.integers(1, 119, n_atoms)
    return DensityGrid(rho, np.array(lattice), numbers, rng.uniform(0, 1, (n_atoms, 3)), material_id=material_id)


@pytest.fixture(scope="session")
def make_grid() -> MakeGrid:
    return _make_grid


@pytest.fixture(scope="session")
def codec(make_grid) -> LloydMaxCodec:
    histogram = DensityHistogram()
    for seed in range(3):
        histogram.add(make_grid(seed=seed).rho)
    # The embedded densities, and others that tests make up, lie within this codec too.
    histogram.add(np.geomspace(1e-6, 100, 20_000, dtype=np.float32))
    return fit_lloyd_max(histogram, 256)


@pytest.fixture
def tree(tmp_path, make_grid) -> Path:
    """A `rho_gga` tree of six silicon cells: `label/<id>.zarr`, `mp_filelist.txt`, `split_limit_22M.json`."""
    root = tmp_path / "rho_gga"
    names = [f"mp-{k}" for k in range(6)]
    for k, name in enumerate(names):
        grid = make_grid((9, 10, 8 + k), n_atoms=2, seed=k, material_id=name)
        rho = grid.rho * np.float32(8 / grid.electron_count)
        coords = grid.frac_coords[:1] + np.array([[0.0], [0.4]])  # a bond of 2.6 to 2.9 A
        write_zarr(DensityGrid(rho, grid.lattice, np.array([14, 14]), coords), root / "label" / f"{name}.zarr")
    (root / "mp_filelist.txt").write_text("\n".join(names) + "\n")
    (root / "split_limit_22M.json").write_text('{"train": [4, 0, 1, 2, 5], "validation": [3], "test": []}')
    return root


@pytest.fixture
def retokenize_config(tree) -> Callable[..., RetokenizeConfig]:
    """A configuration for the tree: five materials of 20 rows, 13 chunks of 8."""

    def make(output: Path | str, **settings: Any) -> RetokenizeConfig:
        defaults: dict[str, Any] = {
            "input": str(tree),
            "output": str(output),
            "filelist": "mp_filelist.txt",
            "split_file": "split_limit_22M.json",
            "layout": "v3-p7",
            "bins": 200,
            "patches_per_material": 20,
            "block_rows": 8,
            "max_skipped": 0,
        }
        return RetokenizeConfig(**(defaults | settings))

    return make
