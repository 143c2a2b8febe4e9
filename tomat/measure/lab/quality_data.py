"""What a study of quality trains on and is judged by: training compounds alone, some of them set aside."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.base.reporting import writing

if TYPE_CHECKING:
    from tomat.train.settings.config import TrainConfig

DATA_FOLDER = "data"
"""Of a run's folder."""
MADE_FILE = "folder.json"
"""In it, once it is known what the data are (`data/dataset/folder.py`)."""


def training_compounds(folder: Path) -> Path:
    """A folder with the embedded densities of the training compounds, as links; the held-out ones are not in it."""
    from tomat.data.density.demo.embedded import DATA_DIR, demo_materials

    with writing(folder, "Make room, or give another --work_dir."):
        folder.mkdir(parents=True, exist_ok=True)
        for material in demo_materials("train"):
            link, target = folder / f"{material.material_id}.zarr", DATA_DIR / f"{material.material_id}.zarr"
            if not link.is_symlink() or link.readlink() != target:
                link.unlink(missing_ok=True)
                link.symlink_to(target)
    return folder


def check_judged(config: TrainConfig, sources: Sequence[str]) -> None:
    """Hold a configuration to data with densities to be judged by, from one of these sources.

    Raises:
        TomatError: It reads others, such as shard sets, which hold none; or its evaluation is turned off.
    """
    asked = config.evaluation
    if config.data.source not in sources or asked.patches_per_material < 1:
        raise TomatError(
            f"data.source is {config.data.source} and evaluation.patches_per_material {asked.patches_per_material}; "
            f"expected {' or '.join(sources)}, and at least 1: settings are compared by what they say of materials."
        )


def tuning_overrides(config: TrainConfig, work_dir: Path, share: float, split_seed: int) -> dict[str, Any]:
    """Settings by which a configuration is judged on compounds of its training set that are set aside.

    Args:
        config: Of a row.
        work_dir: Gets the folder of the training compounds.
        share: Of the densities that is set aside, whole compositions.
        split_seed: Decides which.
    """
    if config.data.source == "folder":
        return {}
    return {
        "data.source": "folder",
        "data.input": str(training_compounds(work_dir / "training-compounds")),
        "data.validation_share": share,
        "data.split_seed": split_seed,
    }


def share_data(made: Path, run: Path, config: TrainConfig, other: TrainConfig) -> None:
    """Give a run the data that another has made, as links, where both ask for the same.

    Args:
        made: Folder of the run that has them.
        run: Folder of the run that is to have them.
        config, other: Their configurations.
    """
    same = dataclasses.asdict(config.data) == dataclasses.asdict(other.data)
    source, target = made / DATA_FOLDER, run / DATA_FOLDER
    if same and not target.exists() and (source / MADE_FILE).exists():
        # Files are replaced, not written to, once they are whole; a link to one is as good as a copy.
        with writing(target):
            shutil.copytree(source, target, copy_function=os.link, ignore=shutil.ignore_patterns("*.lock"))
