"""Opens the shard sets that a configuration names; those of the embedded densities are made on first use."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from tomat.base.errors import TomatError
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.relative import offset_of, relative_to
from tomat.data.density.demo.embedded import SPLITS
from tomat.data.density.promolecule import Promolecule
from tomat.data.tokens.demo import write_demo_shards
from tomat.data.tokens.shards import ShardSet, open_shards
from tomat.model.environment import EnvironmentTables, environment_tables
from tomat.model.nearby_atoms import AtomsRead
from tomat.train.runs.history import Contents
from tomat.train.settings.config import TrainConfig
from tomat.train.settings.schema import DataConfig


@dataclass(frozen=True)
class Datasets:
    """The training set and, where there is one, the validation set; both have the same codec and layout."""

    train: ShardSet
    validation: ShardSet | None

    @property
    def codec(self) -> DensityCodec:
        return self.train.codec

    @property
    def contents(self) -> Contents:
        validation = self.validation and self.validation.content_sha256
        return {"data.train": self.train.content_sha256, "data.validation": validation}


def open_datasets(config: TrainConfig, local_dir: Path, promolecule: Promolecule | None = None) -> Datasets:
    """Open the data that a run reads. If they are the embedded densities, tokenize these into `local_dir` first, with
    `promolecule` if it is given: two fits to the same densities differ in the last bits on machines with other numbers
    of threads."""
    data = config.data
    folder = local_dir / "data"
    if data.source == "embedded":
        train_url, validation_url = (str(folder / split) for split in SPLITS)
        # Hosts may share a disk, where two that write one set at the same time would break it. So the first host
        # writes; then the others write what their own disk still lacks (nothing, if it is shared).
        write = partial(
            write_demo_shards,
            folder,
            layout=data.sequence_layout,
            n_density_tokens=data.n_density_tokens,
            objective=data.codec_objective,
            patches_per_material=data.patches_per_material,
            relative=data.codec_relative,
            grid=data.embedded_grid,
            groups=data.groups,
            left_out=data.left_out,
            promolecule=promolecule,
        )
        if jax.process_index() == 0:
            write()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("tomat: the embedded densities are tokenized")
        if jax.process_index() > 0:
            write()
    elif data.source == "folder":
        # `tomat train` has prepared the sets and those settings that follow from them.
        train_url = str(folder / "train")
        validation_url = str(folder / "validation") if (folder / "validation").exists() else None
    else:
        assert data.train is not None  # or `DataConfig` would have refused it
        train_url, validation_url = data.train, data.validation
    train = _checked(open_shards(train_url), data, "data.train")
    validation = None if validation_url is None else _checked(open_shards(validation_url), data, "data.validation")
    if validation is not None and validation.codec.sha256 != train.codec.sha256:
        codecs = f"{train.codec.sha256[:12]} and {validation.codec.sha256[:12]}"
        raise TomatError(f"training and validation set have different codecs ({codecs}); tokenize both with one codec.")
    if train.rows < config.batch_size:
        said = f"the training set has {train.rows} rows, fewer than one batch of {config.batch_size}"
        raise TomatError(f"{said}; lower trainer.train_batch_size or tokenize more patches.")
    return Datasets(train, validation)


def run_tables(datasets: Datasets, environment: AtomsRead | None) -> EnvironmentTables | None:
    """The constants of a model with `environment`; None for others, and where the data have no promolecule."""
    promolecule, values = datasets.train.promolecule, value_table(datasets.codec)
    if environment is None or promolecule is None or values is None:
        return None
    if promolecule.basis != environment.basis:
        raise TomatError(
            f"the promolecule of {datasets.train.url} has the radial functions {promolecule.basis} and the model has "
            f"{environment.basis}; set model.environment.basis to the promolecule's."
        )
    return environment_tables(promolecule, values, offset_of(datasets.codec))


def value_table(codec: DensityCodec) -> np.ndarray | None:
    """The density that each density id stands for, float32 `[n_density_tokens]`, in e/Å³ (the codec's medians); for a
    relative codec its ratio to the promolecule. None where a voxel takes more than one token."""
    if codec.tokens_per_voxel > 1:
        return None
    return codec.decode(np.arange(codec.n_density_tokens, dtype=np.uint16), decoder="median")


def _checked(shards: ShardSet, data: DataConfig, key: str) -> ShardSet:
    """`shards`, if its layout and codec are the ones that the configuration compiles a step for."""
    found = {
        "layout": shards.layout.name,
        "n_density_tokens": shards.codec.n_density_tokens,
        "codec_relative": relative_to(shards.codec) is not None,
    }
    for name, value in found.items():
        if value != (expected := getattr(data, name)):
            raise TomatError(
                f"{key} has {name} {value}, the configuration says data.{name}={expected}; set data.{name} or use "
                "another set."
            )
    return shards
