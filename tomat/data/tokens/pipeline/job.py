"""A shard set to write: all that decides its rows but the densities, with the codec and promolecule that are given."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tomat.base.retries import STORAGE_TRIES
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.files import codec_from_text
from tomat.data.codec.lloyd_max import Objective
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.density.promolecule import Promolecule
from tomat.data.tokens.clipping import MAX_CLIPPED_SHARE
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.manifest import DEFAULT_BLOCK_ROWS, ShardManifest, plan_rows
from tomat.data.tokens.pipeline.config import RetokenizeConfig
from tomat.data.tokens.pipeline.sources import read_text


@dataclass(frozen=True)
class ElectronRules:
    """How electron counts are compared, where the readers have not."""

    tolerance: float
    """Largest relative deviation."""
    valences: Mapping[str, float]
    accept: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """A shard set to write, as every worker needs it."""

    output: str
    layout: SequenceLayout
    codec: DensityCodec | None
    """None: one is fitted to the densities."""
    promolecule: Promolecule | None = None
    """Given, and laid beside the rows."""
    fits_promolecule: bool = False
    bins: int = 0
    objective: Objective = "absolute"
    patches_per_material: int
    seed: int
    split: str = ""
    block_rows: int = DEFAULT_BLOCK_ROWS
    max_clipped_share: float = MAX_CLIPPED_SHARE
    """A material that loses more of its electrons outside the codec is skipped."""
    read_rules: Mapping[str, Sequence[str]] | None = None
    """What is assumed of the densities; None: not recorded in the manifest."""
    electrons: ElectronRules | None = None
    """None: whoever reads the densities has compared their electron counts."""
    storage_tries: int = STORAGE_TRIES

    @classmethod
    def of(cls, config: RetokenizeConfig) -> "ShardJob":
        """That of a configuration, with the codec and the promolecule that it names."""
        codec = promolecule = None
        if config.codec is not None:
            codec = codec_from_text(read_text(config.codec, config.storage_tries), config.codec)
        elif not config.fits_codec:
            codec = TwoTokenCodec()
        if config.promolecule is not None:
            promolecule = Promolecule.from_text(read_text(config.promolecule, config.storage_tries), config.promolecule)
        return cls(
            output=config.output,
            layout=config.sequence_layout,
            codec=codec,
            promolecule=promolecule,
            fits_promolecule=config.fits_promolecule,
            bins=config.bins,
            objective=config.objective,
            patches_per_material=config.patches_per_material,
            seed=config.seed,
            split=config.split,
            block_rows=config.block_rows,
            max_clipped_share=config.max_clipped_share,
            electrons=ElectronRules(config.electron_tolerance, config.valences, config.accept),
            storage_tries=config.storage_tries,
        )

    def plan(self, materials: Iterable[tuple[str, Sequence[int]]], codec: DensityCodec, **found: Any) -> ShardManifest:
        """The rows of materials, by name and grid shape; `found` as for `plan_rows`."""
        return plan_rows(
            materials,
            layout=self.layout,
            codec=codec,
            patches_per_material=self.patches_per_material,
            seed=self.seed,
            split=self.split,
            block_rows=self.block_rows,
            max_clipped_share=self.max_clipped_share,
            read_rules=self.read_rules,
            **found,
        )
