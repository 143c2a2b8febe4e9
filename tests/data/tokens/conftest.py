from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from smooth_grid import smooth_grid

from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import LloydMaxCodec, fit_lloyd_max
from tomat.data.density.grid import DensityGrid
from tomat.data.density.zarr_store import write_zarr
from tomat.data.tokens.pipeline.config import RetokenizeConfig

MakeGrid = Callable[..., DensityGrid]


@pytest.fixture(scope="session")
def make_grid() -> MakeGrid:
    return smooth_grid


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
