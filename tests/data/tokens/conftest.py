import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fitted_codec import fitted_codec
from retokenized import files
from smooth_grid import smooth_grid

from tomat.data.codec.lloyd_max import LloydMaxCodec
from tomat.data.density.grid import DensityGrid
from tomat.data.density.zarr_store import write_zarr
from tomat.data.tokens.pipeline.config import RetokenizeConfig
from tomat.data.tokens.pipeline.driver import retokenize
from tomat.data.tokens.pipeline.runners import PoolRunner

MakeGrid = Callable[..., DensityGrid]


@pytest.fixture(scope="session")
def make_grid() -> MakeGrid:
    return smooth_grid


@pytest.fixture(scope="session")
def codec(make_grid) -> LloydMaxCodec:
    # The embedded densities, and others that tests make up, lie within this codec too.
    return fitted_codec(256, *(make_grid(seed=seed).rho for seed in range(3)), np.geomspace(1e-6, 100, 20_000))


@pytest.fixture(scope="session")
def kept_tree(tmp_path_factory, make_grid) -> Path:
    """A `rho_gga` tree of six silicon cells: `label/<id>.zarr`, `mp_filelist.txt`, `split_limit_22M.json`."""
    root = tmp_path_factory.mktemp("kept") / "rho_gga"
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
def tree(tmp_path, kept_tree) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(kept_tree, tmp_path / "rho_gga"))


def config_of(root: Path, output: Path | str, **settings: Any) -> RetokenizeConfig:
    """A configuration for the tree: five materials of 20 rows, 13 chunks of 8."""
    defaults: dict[str, Any] = {
        "input": str(root),
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


@pytest.fixture
def retokenize_config(tree) -> Callable[..., RetokenizeConfig]:
    return partial(config_of, tree)


@pytest.fixture(scope="session")
def kept_set(tmp_path_factory, kept_tree) -> Path:
    place = tmp_path_factory.mktemp("kept") / "set"
    retokenize(config_of(kept_tree, place), PoolRunner(1))
    return place


@pytest.fixture
def whole(tmp_path, kept_set) -> dict[str, bytes]:
    """The files of the whole set, of which a copy lies at `whole`."""
    shutil.copytree(kept_set, tmp_path / "whole")
    return files(kept_set)
