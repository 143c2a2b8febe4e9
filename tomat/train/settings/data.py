"""Which tokens a run reads."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tomat.base.config_keys import check_range, key
from tomat.base.errors import TomatError
from tomat.data.tokens.shuffle import BlockShuffleConfig

if TYPE_CHECKING:  # the keys alone, to find a misspelt one, need neither
    from tomat.data.tokens.layouts import SequenceLayout
    from tomat.data.tokens.vocabulary import Vocabulary

BUFFERED_BATCHES, MOST_PREFETCHED = 8, 1024
"""Batches made ahead where nothing is set, and at most."""


@dataclass(frozen=True)
class DataConfig:
    """Which tokens a run reads."""

    source: Literal["embedded", "folder", "shards"] = "shards"
    """`embedded`: the densities that ship with tomat, tokenized into the run's folder on first use; `folder`: those
    below `input`, likewise; `shards`: data sets written by `tomat tokenize`."""
    input: str | None = key(None, free="label", host=True)
    """Folder or file of densities (`source: folder`); their content is what a run is known by, not where they lie."""
    train: str | None = key(None, step=False, host=True)
    """Folder or `gs://` URL of the training shard set (`source: shards`)."""
    validation: str | None = key(None, step=False, host=True)
    """Folder or `gs://` URL of the validation shard set (`source: shards`)."""
    layout: str = "v3-p19"
    """The sequence layout (`tomat/data/tokens/patch.py`); a shard set with another one is refused."""
    n_density_tokens: int = 16384
    """Number of density ids: bins of the Lloyd-Max codec. A shard set with another number is refused. With `source:
    folder` the most that are taken: how many follows from the densities and `codec_floor`."""
    vocabulary_rows: int | None = None
    """Rows of the model's embedding and of its logits; None: the ids of the vocabulary. Rows beyond those belong to no
    token: padding to a round number, or the vocabulary of another decoder, whose step is to be planned."""
    seq_len: int | None = None
    """Tokens per sequence that the model reads; None: the layout's context. Shorter cuts each row."""
    shuffle: BlockShuffleConfig = key(BlockShuffleConfig(), step=False)
    """How rows are shuffled; no cache is built."""
    verify_checksums: bool = key(True, free="speed", step=False)
    """Check the checksum of every block as it is read."""
    prefetch_batches: int = key(BUFFERED_BATCHES, free="speed", step=False)
    """Batches made ahead of the step that uses them; 0: each is made when it is asked for."""
    in_memory: bool = key(False, free="speed", step=False)
    """Keep every block that has been read; from the second epoch on nothing is read. Else those of two windows of the
    shuffle are kept."""
    patches_per_material: int = key(64, step=False)
    """Patches drawn from each cell (`source: embedded`, `folder`)."""
    codec_objective: Literal["absolute", "squared"] = key("absolute", step=False)
    """What the codec minimises that is fitted to the densities (`source: embedded`, `folder`)."""
    codec_floor: float = key(0.01, added=True)
    """NMAE that rounding to the codec's bins may cost (`source: folder`); the fewest bins below it are taken."""
    validation_share: float = key(0.1, added=True)
    """Share of the densities that is held out, whole compositions (`source: folder`); 0: none."""
    split_seed: int = key(0, added=True)
    """Decides which compositions are held out (`source: folder`)."""
    species: tuple[str, ...] = key((), added=True)
    """Elements of CHGCARs that name none, VASP 4 (`source: folder`), in the order of their counts."""
    accept: tuple[str, ...] = key((), added=True)
    """Refusals of densities that are lifted (`source: folder`): names of `tomat/data/density/rules.py`."""

    def __post_init__(self) -> None:
        from tomat.data.density.rules import ReadRules
        from tomat.data.tokens.layouts import LAYOUTS

        if self.layout not in LAYOUTS:
            raise TomatError(f"data.layout is '{self.layout}'; expected one of {', '.join(sorted(LAYOUTS))}.")
        if self.source == "shards" and self.train is None:
            raise TomatError(
                "data.source is 'shards' but data.train is not set; give the folder or gs:// URL of a shard set "
                "(`tomat tokenize` writes one), or set data.source=embedded."
            )
        source = f"data.source is '{self.source}'"
        if self.source != "shards" and (self.train or self.validation):
            raise TomatError(f"{source}, yet data.train or data.validation is set; set data.source=shards.")
        if (self.source == "folder") != (self.input is not None):
            needs = "data.source=folder needs the folder of densities as data.input, no other source takes one"
            raise TomatError(f"{source} and data.input {self.input!r}; {needs}.")
        check_range("data.", self, prefetch_batches=(0, MOST_PREFETCHED), n_density_tokens=2)
        check_range("data.", self, seq_len=(2, self.sequence_layout.context))
        if not 0 < self.codec_floor < 1 or not 0 <= self.validation_share < 1:
            raise TomatError(
                f"data.codec_floor is {self.codec_floor} and data.validation_share {self.validation_share}; expected "
                "shares, the first above 0."
            )
        ReadRules(self.species, self.accept)
        if self.model_vocabulary < self.vocabulary.size:
            raise TomatError(
                f"data.vocabulary_rows is {self.vocabulary_rows:,}; expected at least {self.vocabulary.size:,}, the "
                f"ids of a vocabulary with {self.n_density_tokens:,} density ids."
            )

    @property
    def sequence_layout(self) -> "SequenceLayout":
        """The layout named by `layout`."""
        from tomat.data.tokens.layouts import LAYOUTS

        return LAYOUTS[self.layout]

    @property
    def vocabulary(self) -> "Vocabulary":
        """The vocabulary with `n_density_tokens` density ids."""
        from tomat.data.tokens.vocabulary import Vocabulary

        return Vocabulary(self.n_density_tokens)

    @property
    def model_vocabulary(self) -> int:
        return self.vocabulary.size if self.vocabulary_rows is None else self.vocabulary_rows
