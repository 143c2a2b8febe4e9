"""Which loss a run minimises. No JAX here: configurations are read where nothing is trained."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from tomat.base.config_keys import key
from tomat.base.errors import TomatError
from tomat.model.tiles import LossTiles

BinLossKind = Literal["cross_entropy", "soft_cross_entropy", "ce_emd", "emd", "l1_mean", "crps"]
LossKind = Literal[BinLossKind, "nmae"]
TargetSpace = Literal["bin", "rho"]
LossVocabulary = Literal["density", "full"]

LossKernel = Literal["xla", "pallas", "levanter"]

LOSS_KINDS: tuple[BinLossKind, ...] = get_args(BinLossKind)
"""Kinds over a distribution of bins."""

CROSS_ENTROPY_KINDS = frozenset({"cross_entropy", "soft_cross_entropy", "ce_emd"})


@dataclass(frozen=True)
class LossConfig:
    """The loss on density tokens, and what it does with the tokens before them.

    With the predicted distribution p over K density bins of values v_k (e/Å³), F its cumulative sum, and a target bin
    t of value r = v_t, one position costs

    ==================== ==================================================== ==========
    kind                 formula                                              unit
    ==================== ==================================================== ==========
    cross_entropy        -log p_t                                             nats
    soft_cross_entropy   -sum_k q_k log p_k, q a Gaussian around t            nats
    ce_emd               -log p_t + emd_weight * sum_k p_k |v_k - r|          nats
    emd                  sum_k p_k |v_k - r|                                  e/Å³
    l1_mean              |sum_k p_k v_k - r|                                  e/Å³
    crps                 sum_k (F_k - [k >= t])^2 (v_(k+1) - v_k)             e/Å³
    nmae                 |rho - r| / mean density of the cell                 share
    ==================== ==================================================== ==========

    `nmae` is the only loss of a field model (`model.type: field`), which gives one density rho and no distribution.
    `emd` is the 1-Wasserstein distance to a point mass; `crps` is the continuous ranked probability score (Gneiting and
    Raftery, J. Am. Stat. Assoc. 102, 359 (2007), eq. 20). `vocabulary: full` and `z_loss_weight` add to each of them.

    A sequence costs the weighted mean over its positions, density positions with weight 1; a batch costs the mean over
    its sequences. So the mean over equal microbatches is the loss of the whole batch, and padding costs nothing.
    """

    kind: LossKind = "soft_cross_entropy"
    """The formula, one of the table above."""
    target_space: TargetSpace = "bin"
    """Where the soft target is a Gaussian: in the `bin` index, or in `rho` (then each bin weighs its width). In both
    it is cut at the ends of the table and normalised over the bins that exist."""
    target_sigma: float = 2.0
    """Standard deviation of the soft target: bins if `target_space` is `bin`, e/Å³ if it is `rho`."""
    emd_weight: float = 1.0
    """Factor of the EMD in `ce_emd`, in nats per e/Å³."""
    preamble_weight: float = 0.0
    """Weight of a position whose target is neither a density token nor padding, relative to a density position. It
    costs the cross-entropy over the whole vocabulary. 0: density tokens only."""
    vocabulary: LossVocabulary = "density"
    """`density`: the softmax runs over the density bins only. `full`: over the whole vocabulary, which adds
    -log(probability of any density token) to each formula: for `cross_entropy` exactly -log p_t over all of it."""
    z_loss_weight: float = 0.0
    """Factor of z^2, in nats^-1, in a position's loss; z is the logarithm of the sum of exp(logit) over the ids of the
    position's softmax (those of `vocabulary`; for a preamble position all). It keeps the logits from drifting (ST-MoE,
    arXiv 2202.08906, eq. 5; PaLM, arXiv 2204.02311, has 1e-4). 0: none. Not with `kernel: pallas`."""
    block_positions: int = key(256, free="rounding")
    """Positions whose logits exist at one time: batch on a device x block_positions x ids float32 values. Compiled
    for a v6e chip with 8 sequences of 8,192 positions, 16,384 bins and a width of 1,024, `soft_cross_entropy` at 128
    and 256 takes an estimated 23.3 and 22.7 ms a step, and `emd` at 256 and 512 21.6 and 23.7 ms (three matmuls at
    the peak rate: 7.2 ms), with 0.10, 0.30, 0.17 and 0.57 GB of temporaries."""

    kernel: LossKernel = key("xla", free="rounding")
    """`xla`: a scan over blocks of `block_positions`, on any platform. `pallas`: two TPU kernels that keep the logits
    in VMEM (`pallas.py`), for every kind but `crps`. Values and gradients are the same up to rounding. `tomat
    bench loss-tiles` plans both for a chip. `levanter`: Levanter's own fused cross-entropy, to plan or
    time a step as its trainer makes it; `cross_entropy` over the `full` vocabulary alone, and top-1 accuracy and EMD
    are NaN."""
    tiles: LossTiles = LossTiles()
    """Tiles of the `pallas` kernel; what is not set comes from a table of tuned tiles."""
    interpret: bool = key(False, free="rounding")
    """As `model.splash.interpret`."""

    def __post_init__(self) -> None:
        kinds = {"kind": LossKind, "target_space": TargetSpace, "vocabulary": LossVocabulary, "kernel": LossKernel}
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                expected = ", ".join(get_args(kind))
                raise TomatError(f"loss.{name} is {getattr(self, name)!r}; expected one of {expected}.")
        use = "Use loss.kind: cross_entropy"
        for name, above, expected in (
            ("target_sigma", True, f"a positive number. {use} for a target without width"),
            ("emd_weight", True, f"a positive number (nats per e/Å³). {use} to leave the EMD out"),
            ("preamble_weight", False, "0 (density only) or more"),
            ("z_loss_weight", False, "0 (none) or more, such as 1e-4"),
            ("block_positions", True, "at least 1"),
        ):
            value = getattr(self, name)
            enough = value > 0 if above else value >= 0
            if not (math.isfinite(value) and enough):
                raise TomatError(f"loss.{name} is {value}; expected {expected}.")
        if self.kernel == "pallas" and (self.z_loss_weight > 0 or self.kind == "crps"):
            said = f"loss.kernel is pallas, loss.z_loss_weight {self.z_loss_weight} and loss.kind {self.kind}"
            raise TomatError(f"{said}; that kernel has no z-loss and no crps. Set loss.kernel: xla, or leave them out.")
        plain = self.kind == "cross_entropy" and self.vocabulary == "full"
        if self.kernel == "levanter" and not (plain and self.preamble_weight == self.z_loss_weight == 0):
            raise TomatError(
                "loss.kernel levanter is Levanter's cross-entropy over the whole vocabulary. Set loss.kind: "
                "cross_entropy, loss.vocabulary: full, no preamble_weight and no z_loss_weight, or loss.kernel: xla."
            )

    @property
    def unit(self) -> str:
        """Unit of the formula: `nats`, `e_per_A3` or `share`. `full` and a preamble add nats to either."""
        if self.kind == "nmae":
            return "share"
        return "nats" if self.kind in CROSS_ENTROPY_KINDS else "e_per_A3"

    def check_layout(self, tokens_per_voxel: int) -> None:
        """Refuse a loss that has no meaning for a layout: where a voxel is two tokens, one alone has no density, and
        only the plain cross-entropy over the whole vocabulary is defined."""
        if tokens_per_voxel != 1 and (self.kind != "cross_entropy" or self.vocabulary != "full"):
            said = f"loss.kind is {self.kind} over the {self.vocabulary} vocabulary, but the layout has "
            said += f"{tokens_per_voxel} tokens per voxel, none of which has a density alone"
            raise TomatError(f"{said}. Set loss.kind: cross_entropy and loss.vocabulary: full, or use another layout.")

    def warning(self) -> str | None:
        """What a user should know before training with this loss, or None."""
        if self.kind != "emd":
            return None
        return (
            "loss.kind emd has a gradient p_v (|v - r| - EMD) that vanishes once the prediction settles on a bin, "
            "right or wrong: 200M models stayed at 50-68 % NMAE. Use soft_cross_entropy, ce_emd or crps to train."
        )
