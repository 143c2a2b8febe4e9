"""The shard sets a configuration names; for the embedded densities, made on first use."""

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from tomat.base.errors import TomatError
from tomat.codec.base import DensityCodec
from tomat.codec.histogram import DensityHistogram
from tomat.codec.lloyd_max import fit_lloyd_max
from tomat.density.demo.embedded import SPLITS, demo_materials, load_demo
from tomat.tokens.shards import ShardSet, open_shards
from tomat.tokens.writer import write_shards
from tomat.training.config import DataConfig, TrainConfig

EMBEDDED_SEED = 0
"""Seeds the anchors of the embedded densities' patches: the demo's data are the same in every run."""


@dataclass(frozen=True)
class Datasets:
    """The training set and, where there is one, the validation set; both have the same codec and layout."""

    train: ShardSet
    validation: ShardSet | None

    @property
    def codec(self) -> DensityCodec:
        """The codec both sets were tokenised with."""
        return self.train.codec


def open_datasets(config: TrainConfig, local_dir: Path) -> Datasets:
    """Open the data a run reads, tokenising the embedded densities into `local_dir` first where they are the source.

    Raises:
        TomatError: A set that is missing, incomplete or corrupt, or that does not match the configuration.
    """
    data = config.data
    if data.source == "embedded":
        train_url, validation_url = (str(local_dir / "data" / split) for split in ("train", "validation"))
        # Hosts may share a disk, where two that write one set at a time break each other's. So the first writes, and
        # the others, once it has, what their own disk still lacks: nothing, where they share it.
        if jax.process_index() == 0:
            _tokenise_embedded(data, train_url, validation_url)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("tomat: the embedded densities are tokenised")
        if jax.process_index() > 0:
            _tokenise_embedded(data, train_url, validation_url)
    else:
        if data.train is None:
            raise TomatError("data.train is not set; give the folder or gs:// URL of a shard set.")
        train_url, validation_url = data.train, data.validation
    train = _checked(open_shards(train_url), data, "data.train")
    validation = None if validation_url is None else _checked(open_shards(validation_url), data, "data.validation")
    if validation is not None and validation.codec.sha256 != train.codec.sha256:
        raise TomatError(
            f"the codecs of the training and validation sets differ ({train.codec.sha256[:12]} and "
            f"{validation.codec.sha256[:12]}); tokenise both with the same codec."
        )
    if train.rows < config.batch_size:
        raise TomatError(
            f"the training set has {train.rows} rows, fewer than one batch of {config.batch_size}; "
            "lower trainer.train_batch_size or tokenise more patches."
        )
    return Datasets(train, validation)


def value_table(codec: DensityCodec) -> np.ndarray | None:
    """The density that each density id stands for, float32 `[n_density_tokens]`, in e/A^3 (the codec's medians).

    None where a voxel takes more than one token, so that no single id has a density.
    """
    if codec.tokens_per_voxel > 1:
        return None
    return codec.decode(np.arange(codec.n_density_tokens, dtype=np.uint16), decoder="median")


def _checked(shards: ShardSet, data: DataConfig, key: str) -> ShardSet:
    """`shards`, if its layout and codec are the ones that the configuration compiles a step for."""
    if shards.layout.name != data.layout:
        raise TomatError(
            f"{key} holds layout {shards.layout.name}, the configuration says data.layout={data.layout}; "
            "set data.layout or use another set."
        )
    if shards.codec.n_density_tokens != data.n_density_tokens:
        raise TomatError(
            f"{key} was tokenised with {shards.codec.n_density_tokens} density ids, the configuration says "
            f"data.n_density_tokens={data.n_density_tokens}; set it or use another set."
        )
    return shards


def _tokenise_embedded(data: DataConfig, train_url: str, validation_url: str) -> None:
    """Fit a codec to the embedded training densities and write both shard sets, unless they are there already."""
    histogram = DensityHistogram()
    for material in demo_materials("train"):
        histogram.add(load_demo(material.material_id).rho)
    codec = fit_lloyd_max(histogram, n_bins=data.n_density_tokens, objective=data.codec_objective)
    for split, url in zip(SPLITS, (train_url, validation_url), strict=True):
        write_shards(
            url,
            [material.material_id for material in demo_materials(split)],
            load_demo,
            layout=data.sequence_layout,
            codec=codec,
            patches_per_material=data.patches_per_material,
            seed=EMBEDDED_SEED,
        )
