"""Searches by compiling: the nearest change with which a step fits into memory, and the largest batch that fits.

Nothing is guessed. An estimate only chooses what to compile next, and every answer is a program whose buffers the
compiler has assigned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.perf.plan.compile.topology import data_axis_size
from tomat.perf.tuning.batch_search import Tried, next_size
from tomat.perf.tuning.changes import changed, override_words

if TYPE_CHECKING:
    from tomat.hardware.chips import Slice
    from tomat.perf.cost.memory import MemoryReport
    from tomat.perf.plan.compile.compiler import CompiledStep
    from tomat.train.settings.config import TrainConfig

Compile = Callable[..., "CompiledStep"]
"""`compile_step`, with its cache and limits."""

MICROBATCH, CHECKPOINTING, SHARDING, TILES, BATCH, TOGETHER = (
    "microbatch", "checkpointing", "sharding", "attention tiles", "batch", "together"
)  # fmt: skip
"""Dimensions of a search. All but `BATCH` leave the training result as it is, up to rounding."""

POLICIES_BY_RECOMPUTATION = (
    "off", "save_matmuls", "save_attention_mlp", "save_qkv_attention", "save_attention", "save_qkv", "full", "offload",
    "nested",
)  # fmt: skip
"""`NAMED_POLICIES` from the lightest recomputation to the heaviest. `offload` recomputes as much as `full`, and moves
each layer's input to the host and back."""

NEVER_NEAREST = frozenset({"save_qkv"})
"""It keeps three arrays a layer where `save_attention` keeps one, and recomputes the attention kernel."""

SHARDINGS = ("replicated", "zero1", "fsdp")
"""From whole on every chip to sharded as far as possible."""

HOPELESS = 1.05
"""A change is not tried if the step is still 5 % too large with temporaries in proportion to the batch. Half the batch
(200M, v6e-16, context 4608, no checkpointing) reduced required memory from 71.39 to 35.83 GiB, 0.4 % above half."""

MAX_COMPILES = 10
"""Most compiles of `nearest_fits`. The configuration's own compile and answers from the cache do not count."""
MAX_BATCH_COMPILES = 12
"""Most compiles of `largest_batch` for each policy."""
BATCH_CAP_FACTOR = 64
"""`largest_batch` tries at most this many times the configured batch."""


@dataclass(frozen=True)
class Trial:
    dimension: str
    overrides: Mapping[str, Any]
    """Dotted keys and values that override the given configuration."""
    fits: bool | None
    """None: it could not be compiled (see `error`)."""
    required_bytes: int | None = None
    capacity_bytes: int | None = None
    compile_seconds: float = 0.0
    cached: bool = False
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON with units in the keys. `words` holds the overrides as on a command line."""
        return {**asdict(self), "words": " ".join(override_words(self.overrides))}


@dataclass
class _Compiler:
    """Compiles changed configurations and records each trial."""

    config: TrainConfig
    slice_: Slice
    compile: Compile
    show: Callable[[str], None]
    trials: list[Trial] = field(default_factory=list)

    @property
    def compiles(self) -> int:
        """The number of compiles so far. Answers from the cache do not count."""
        return sum(not trial.cached for trial in self.trials)

    def attempt(self, dimension: str, overrides: Mapping[str, Any]) -> Trial:
        self.show(" ".join(f"{key}={value}" for key, value in overrides.items()))
        try:
            # Whether tiles fit into VMEM is only known after code generation.
            step = self.compile(changed(self.config, overrides), self.slice_, memory_only=dimension != TILES)
        except TomatError as error:
            trial = Trial(dimension, overrides, None, error=str(error))
        else:
            trial = Trial(
                dimension,
                overrides,
                step.fits,
                step.memory.required_bytes,
                step.memory.capacity_bytes,
                float(step.result.get("compile_seconds", 0.0)),
                step.cached,
            )
        self.trials.append(trial)
        return trial


def nearest_fits(
    config: TrainConfig, slice_: Slice, compile: Compile, show: Callable[[str], None] = lambda words: None
) -> list[Trial]:
    """The nearest changes that make a step fit that does not fit, each found by compiling it.

    One dimension is searched at a time, first those that leave the training result unchanged: a smaller microbatch,
    heavier checkpointing, finer sharding, then a smaller batch. Each search stops at its first fit. If no dimension
    suffices alone, the ends of the first three are tried together. Returns the trials; none if `config` fits. `show` is
    called with what is compiled next.
    """
    base = compile(config, slice_, memory_only=True)
    if base.fits:
        return []
    compiler = _Compiler(config, slice_, compile, show)
    dimensions = [(name, found) for name, found in _dimensions(config, slice_, base.memory) if found]
    for place, (dimension, candidates) in enumerate(dimensions):
        # One compile is reserved for each later dimension, so that a long search does not use up the compiles.
        reserve = len(dimensions) - place - 1
        for overrides in candidates:
            if compiler.compiles >= MAX_COMPILES - reserve:
                break
            if compiler.attempt(dimension, overrides).fits:
                break
    ends = [candidates[-1] for dimension, candidates in dimensions if dimension != BATCH]
    if len(ends) > 1 and compiler.compiles < MAX_COMPILES and not any(trial.fits for trial in compiler.trials):
        compiler.attempt(TOGETHER, {key: value for overrides in ends for key, value in overrides.items()})
    return compiler.trials


def _dimensions(config: TrainConfig, slice_: Slice, memory: MemoryReport) -> list[tuple[str, list[dict[str, Any]]]]:
    """Each dimension's changes, the nearest first."""
    if memory.memory_space != "hbm":
        # A kernel's tiles are too large for the on-chip memory (VMEM). The batch does not change that.
        return [(TILES, _smaller_tiles(config))]
    shards = data_axis_size(config, slice_.n_devices)
    whole = config.batch_size // shards
    microbatch = config.trainer.per_device_parallelism

    def could_fit(scale: float) -> bool:
        """Whether the step might fit with temporaries `scale` times as large (see `HOPELESS`)."""
        fixed = memory.argument_bytes or 0
        return fixed + (memory.required_bytes - fixed) * scale <= HOPELESS * memory.capacity_bytes

    now = microbatch if microbatch > 0 else whole
    smaller = [now]
    while smaller[-1] > 1:  # the largest divisor of `whole` that is at most half of the one before
        smaller.append(next(n for n in range(smaller[-1] // 2, 0, -1) if whole % n == 0))
    batches = []
    if microbatch <= 0:  # otherwise the microbatch determines the memory, whatever the batch
        batches = [shards * (whole >> n) for n in range(1, whole.bit_length())]
    finer = SHARDINGS[SHARDINGS.index(config.sharding) + 1 :]
    return [
        (MICROBATCH, [{"trainer.per_device_parallelism": size} for size in smaller[1:] if could_fit(size / now)]),
        (CHECKPOINTING, [{"model.gradient_checkpointing": name} for name in _heavier_policies(config)]),
        (SHARDING, [{"sharding": name} for name in finer] if shards > 1 else []),
        (BATCH, [{"trainer.train_batch_size": s} for s in batches if could_fit(s / config.batch_size)]),
    ]


def _heavier_policies(config: TrainConfig) -> list[Any]:
    """Values of `model.gradient_checkpointing` that keep less than the configured one."""
    from tomat.model.decoder import DensityDecoderConfig

    now = getattr(config.model, "gradient_checkpointing", None)
    if not isinstance(config.model, DensityDecoderConfig):
        return [True] if now is False else []
    # A policy given by Haliax's fields counts as "full": the policies after "full" keep less than any of them.
    name = now if isinstance(now, str) else "full" if now else "off"
    place = POLICIES_BY_RECOMPUTATION.index(name)
    return [policy for policy in POLICIES_BY_RECOMPUTATION[place + 1 :] if policy not in NEVER_NEAREST]


def _smaller_tiles(config: TrainConfig) -> list[dict[str, Any]]:
    """All set tiles of the attention kernel, halved until one would be smaller than a vector register's lanes."""
    from tomat.model.tiles import LANES

    tiles = getattr(config.model, "splash", None)
    if tiles is None:
        return []
    names = [f.name for f in fields(tiles) if f.name.startswith("block_")]
    sizes = {f"model.splash.{name}": getattr(tiles, name) for name in names if getattr(tiles, name)}
    found = []
    while sizes and all(size % (2 * LANES) == 0 for size in sizes.values()):
        sizes = {name: size // 2 for name, size in sizes.items()}
        found.append(sizes)
    return found


@dataclass(frozen=True)
class LargestBatch:
    policy: Any
    unit_sequences: int
    """Batches are multiples of this: devices of the data axis times the microbatch."""
    fits: Trial | None
    """The largest batch that was compiled and fits; None: none that was tried fits."""
    next_up: Trial | None
    """One unit more, which was compiled and does not fit; None: `fits` is the cap, or the search ended before."""
    trials: tuple[Trial, ...]
    stopped_by: str = ""
    """Why a larger batch may fit: the cap, the number of compiles, or an error."""

    @property
    def batch_sequences(self) -> int | None:
        return None if self.fits is None else int(self.fits.overrides["trainer.train_batch_size"])

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy if isinstance(self.policy, str | bool) else str(self.policy),
            "unit_sequences": self.unit_sequences,
            "batch_sequences": self.batch_sequences,
            "fits": self.fits.to_dict() if self.fits else None,
            "next_up": self.next_up.to_dict() if self.next_up else None,
            "trials": [trial.to_dict() for trial in self.trials],
            "stopped_by": self.stopped_by,
        }


def largest_batch(
    config: TrainConfig,
    slice_: Slice,
    compile: Compile,
    policies: Iterable[Any] | None = None,
    show: Callable[[str], None] = lambda words: None,
) -> list[LargestBatch]:
    """The largest batch that fits, for each of `policies`, values of `model.gradient_checkpointing` (default: only the
    configured one). The search (`batch_search.py`) ends with a batch that fits and the next multiple, both compiled."""
    unit = data_axis_size(config, slice_.n_devices) * max(config.trainer.per_device_parallelism, 1)
    cap = BATCH_CAP_FACTOR * config.batch_size // unit
    if cap < 1:
        most = f"{BATCH_CAP_FACTOR * config.batch_size}, {BATCH_CAP_FACTOR} times trainer.train_batch_size"
        places = f"{unit}, one sequence for each microbatch place of {slice_.name}"
        raise TomatError(
            f"the largest batch to try is {most}; expected at least {places}. Raise trainer.train_batch_size."
        )
    now = getattr(config.model, "gradient_checkpointing", None)
    found = []
    for policy in [now] if policies is None else policies:
        # No override for the present policy: the model may not have the key.
        overrides = {} if policy == now else {"model.gradient_checkpointing": policy}
        compiler = _Compiler(config, slice_, compile, show)
        known: dict[int, Trial] = {}  # by the number of units
        stopped_by = ""
        units: int | None = min(max(config.batch_size // unit, 1), cap)
        while units is not None:
            if compiler.compiles >= MAX_BATCH_COMPILES:
                stopped_by = f"{MAX_BATCH_COMPILES} compiles"
                break
            trial = compiler.attempt(BATCH, {**overrides, "trainer.train_batch_size": units * unit})
            if trial.fits is None:
                stopped_by = f"an error at batch {units * unit}: {trial.error}"
                break
            known[units] = trial
            tried = {size: Tried(bool(one.fits), one.required_bytes) for size, one in known.items()}
            units = next_size(tried, units, cap, trial.capacity_bytes)
        fit = max((n for n, trial in known.items() if trial.fits), default=0)
        if fit == cap:
            stopped_by = f"the cap of {cap * unit} sequences"
        trials = tuple(compiler.trials)
        found.append(LargestBatch(policy, unit, known.get(fit), known.get(fit + 1), trials, stopped_by))
    return found
