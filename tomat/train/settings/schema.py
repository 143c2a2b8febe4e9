"""Every key of a training configuration: type, default, meaning. Imports no JAX, so that words are checked at once.

`config.TrainConfig` is `RunSchema` with Levanter's classes for model, optimizer and W&B.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from tomat.base.config_keys import check_range, key
from tomat.base.errors import TomatError
from tomat.data.tokens.layouts import LAYOUTS, BlockShuffleConfig, SequenceLayout
from tomat.data.tokens.vocabulary import Vocabulary
from tomat.model.loss.config import LossConfig
from tomat.train.settings.trainer import TrainerSettings

BUFFERED_BATCHES, MOST_PREFETCHED = 8, 1024
"""Batches made ahead: the default, and the largest number allowed."""


@dataclass(frozen=True)
class DataConfig:
    """Which tokens a run reads."""

    source: Literal["embedded", "folder", "shards"] = "shards"
    """`embedded`: the densities that ship with tomat, tokenized into the run's folder on first use; `folder`: the
    densities below `input`, likewise; `shards`: data sets written by `tomat tokenize`."""
    input: str | None = key(None, free="label", host=True)
    """Folder or file of densities (`source: folder`). Their content identifies the run's data, not where they lie."""
    train: str | None = key(None, step=False, host=True)
    """Folder or `gs://` URL of the training shard set (`source: shards`)."""
    validation: str | None = key(None, step=False, host=True)
    """Folder or `gs://` URL of the validation shard set (`source: shards`)."""
    layout: str = "v3-p19"
    """The sequence layout (`tomat/data/tokens/patch.py`); a shard set with another one is refused."""
    n_density_tokens: int = 16384
    """Number of density ids: bins of the Lloyd-Max codec. A shard set with another number is refused. With `source:
    folder` this is the upper limit: the number follows from the densities and `codec_floor`."""
    vocabulary_rows: int | None = None
    """Rows of the model's embedding and of its logits; None: one for each id of the vocabulary. Further rows belong to
    no token: they pad to a round number, or stand for the vocabulary of another decoder whose step is planned."""
    seq_len: int | None = None
    """Tokens per sequence that the model reads; None: the layout's context. A smaller number cuts each row."""
    shuffle: BlockShuffleConfig = key(BlockShuffleConfig(), step=False)
    """How rows are shuffled; no cache is built."""
    verify_checksums: bool = key(True, free="speed", step=False)
    """Check the checksum of every block as it is read."""
    prefetch_batches: int = key(BUFFERED_BATCHES, free="speed", step=False)
    """Batches made ahead of the step that uses them; 0: each is made when it is asked for."""
    in_memory: bool = key(False, free="speed", step=False)
    """Keep every block that has been read, so that from the second epoch on nothing is read. Otherwise the blocks of
    two windows of the shuffle are kept."""
    groups: tuple[str, ...] = key(("crystals",), added=True, step=False)
    """Groups of the embedded densities that are trained on (`source: embedded`); `tomat demo-data show` lists them."""
    left_out: tuple[str, ...] = key((), added=True, step=False)
    """Compounds of the embedded training densities that are not trained on, in any form (`source: embedded`)."""
    patches_per_material: int = key(64, step=False)
    """Patches, or rows of scattered voxels, drawn from each cell (`source: embedded`, `folder`)."""
    embedded_grid: Literal["refined", "stored"] = key("refined", added=True, step=False)
    """Grid of the embedded densities: `refined` to a spacing of 0.065 A, or as `stored`, 0.13 to 0.2 A apart. Scattered
    voxels say as much on either grid; a patch on the stored grid is wider by the ratio of the spacings."""
    codec_objective: Literal["absolute", "squared"] = key("absolute", step=False)
    """What the codec fitted to the densities minimises (`source: embedded`, `folder`)."""
    codec_relative: bool = key(False, added=True)
    """Whether density ids are bins of the density's ratio to the sum of atoms (`tomat/data/codec/relative.py`). Field
    models and models with `model.environment` can read them; a shard set with the other kind of codec is refused."""
    codec_floor: float = key(0.01, added=True)
    """Limit of the NMAE from rounding to the codec's bins (`source: folder`); the fewest bins below it are taken."""
    validation_share: float = key(0.1, added=True)
    """Share of the densities that is held out, by whole compositions (`source: folder`); 0: none."""
    split_seed: int = key(0, added=True)
    """Decides which compositions are held out (`source: folder`)."""
    species: tuple[str, ...] = key((), added=True)
    """Elements of CHGCARs that name none (VASP 4), in the order of their counts (`source: folder`)."""
    accept: tuple[str, ...] = key((), added=True)
    """Refusals of densities that are lifted (`source: folder`): names of `tomat/data/density/rules.py`."""

    def __post_init__(self) -> None:
        from tomat.data.density.rules import ReadRules

        if self.groups != ("crystals",):
            # Imported only where it is needed: a prediction reads a configuration, and no embedded density.
            from tomat.data.density.demo.embedded import check_groups

            check_groups(self.groups)
        if self.left_out:
            from tomat.data.density.demo.embedded import check_compounds

            check_compounds(self.left_out, self.groups)
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
        if self.codec_relative and self.sequence_layout.tokens_per_voxel > 1:
            said = f"data.codec_relative is true; layout {self.layout} takes no such codec"
            raise TomatError(f"{said}. Leave it out.")
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
    def sequence_layout(self) -> SequenceLayout:
        return LAYOUTS[self.layout]

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.n_density_tokens)

    @property
    def model_vocabulary(self) -> int:
        return self.vocabulary.size if self.vocabulary_rows is None else self.vocabulary_rows


@dataclass(frozen=True)
class TrackersSchema:
    """Where metrics go besides `metrics.jsonl`, which every run writes."""

    wandb: Any = None
    """Weights & Biases, the keys of Levanter's `WandbConfig`; None: not used."""
    tensorboard: bool = key(False, free="watching")
    """Write TensorBoard event files under the run's folder (needs the `tensorboard` extra)."""


@dataclass(frozen=True)
class CompilerConfig:
    """Flags of the XLA compilers, set before the first device is touched. Each belongs in a YAML with its reason."""

    xla_flags: list[str] = key(factory=list, free="speed", host=True)
    """Flags of XLA itself (CPU and GPU), `--xla_...`."""
    libtpu_args: list[str] = key(factory=list, free="speed", host=True)
    """Flags of the TPU compiler, `--xla_tpu_...`. Hosts compare flags, with those of their environment, one by one."""

    def __post_init__(self) -> None:
        for flag in (*self.xla_flags, *self.libtpu_args):
            if not flag.startswith("--") or " " in flag:
                raise TomatError(f"compiler flag '{flag}' is not of the form --name=value.")


@dataclass(frozen=True)
class EvaluationConfig:
    """The evaluation after the last step."""

    patches_per_material: int = key(8, free="watching")
    """Patches drawn from each held-out material for the teacher-forced evaluation; 0: none."""
    free_running: bool = key(True, free="watching")
    """Predict each held-out material from its structure alone, whole cells on their stored grids, where the model can:
    a field model, or one with `model.environment` and `density_dropout` above 0."""
    materials: int = key(16, free="watching")
    """Most held-out materials that are evaluated; the first ones are taken."""
    picture: bool = key(True, free="watching")
    """Draw a slice of one held-out material for each evaluation: reference, prediction, difference."""
    seed: int = key(0, free="watching")
    """Seeds the anchors of the patches."""

    def __post_init__(self) -> None:
        check_range("evaluation.", self, patches_per_material=0, materials=0)


SPIKE_HISTORY = 128
"""Losses that a run's state keeps for judging the next one; the upper limit of `spike_window`. A constant, so that
every other setting may change when a run is resumed: the state has the same shape under all of them."""


@dataclass(frozen=True)
class GuardsConfig:
    """The guards of a run (`docs/guides/preemption.md`); all of it may differ when a run is resumed."""

    on_bad_loss: Literal["stop", "skip"] = key("stop", free="watching")
    """What happens at a loss or an update that is not finite, or at a spike of the loss. `stop`: end the run before the
    state after it is saved. `skip`: leave model and optimizer as before that batch, and go on with the next."""
    max_skips: int = key(10, free="watching")
    """Batches in a row that `skip` passes over before the run stops after all."""
    spike_factor: float = key(20.0, free="watching")
    """A loss is a spike if it is more than this many standard deviations above the median of the last `spike_window`
    good losses, the deviation estimated from the median absolute deviation; 0: no loss is a spike. In 1,200 steps of
    `demo-decoder` with batches of two sequences, a loss as noisy as any, the largest excess was 9.8."""
    spike_window: int = key(64, free="watching")
    """Number of good losses that the next one is compared with; no loss is judged before there are as many."""
    allow_cross_region: bool = key(False, free="watching")
    """Read data and write checkpoints in another region than the machine's."""
    max_clock_skew_seconds: float = key(30.0, free="watching")
    """Difference between the clocks of hosts, or of a host and Cloud Storage, above which the run warns."""
    hang_seconds: float = key(1800.0, free="watching")
    """Without any progress for so long after the first step, the process writes the stacks of its threads next to the
    run and exits with status 124; 0: never. An evaluation and a save must each fit in it."""
    startup_hang_seconds: float = key(7200.0, free="watching")
    """The same until the first step is done, which includes loading the checkpoint and compiling; 0: never."""

    def __post_init__(self) -> None:
        check_range("guards.", self, max_skips=0, spike_window=(8, SPIKE_HISTORY), spike_factor=0)
        check_range("guards.", self, max_clock_skew_seconds=0, hang_seconds=0, startup_hang_seconds=0)


@dataclass(frozen=True)
class PreemptionConfig:
    """How a run reacts to losing its machine."""

    grace_seconds: float = key(25.0, free="speed")
    """Longest time from SIGTERM to the end of the process, for the step, the checkpoint with its commit, and the
    trackers. A v6e that is taken away leaves 30 s."""
    maintenance_notice: bool = key(True, free="speed")
    """On a TPU VM, stop as on SIGTERM when its metadata server announces a preemption or a maintenance that ends it."""
    poll_seconds: float = key(2.0, free="speed")
    """How often the metadata server is asked."""

    def __post_init__(self) -> None:
        for name in ("grace_seconds", "poll_seconds"):
            if not getattr(self, name) > 0:
                raise TomatError(f"preemption.{name} is {getattr(self, name)}; expected a number of seconds above 0.")


LONGEST_SECONDS = 60.0
"""Longest pause. A request to stop is seen only after it, and the watchdog must not take it for a hang."""


@dataclass(frozen=True)
class PauseConfig:
    """When a run leaves its devices to others."""

    seconds: float = key(0.0, free="speed")
    """Seconds after a step in which nothing is dispatched; 0: there is no pause."""
    every: int = key(1, free="speed")
    """Steps from one pause to the next."""

    def __post_init__(self) -> None:
        check_range("pause.", self, seconds=(0, LONGEST_SECONDS), every=1)

    def is_after(self, done: int) -> bool:
        return self.seconds > 0 and done % self.every == 0


@dataclass(frozen=True)
class DistillationConfig:
    """Training of a model in few bits on the distributions of its teacher (`tomat train --teacher`).

    The loss of a density position is temperature^2 times the Kullback-Leibler divergence of the student's distribution
    over the density bins from the teacher's, both from logits over the temperature (Hinton et al., arXiv 1503.02531),
    plus `data_weight` times the loss on the data that `loss` sets. The teacher reads what the student reads, and is
    computed in the same step.
    """

    teacher: str
    """Run, or folder of weights, of the same vocabulary, codec and layout."""
    quantised: str
    """Folder of weights that `tomat compress` wrote, with which the training begins."""
    train: Literal["mlp", "all"] = "all"
    """`mlp`: only codes, scales and tables of the MLPs; `all`: those of every matrix in few bits, and the arrays that
    are not quantised. Arrays that are not trained have no optimizer state and are not in the checkpoints."""
    top_k: int = 256
    """Number of the teacher's most probable bins that are told apart; the other bins count as one mass."""
    temperature: float = 1.0
    """Divisor of the logits of student and teacher."""
    data_weight: float = 1.0
    """Weight of the loss on the data; 0: the teacher alone."""

    def __post_init__(self) -> None:
        for name in ("teacher", "quantised"):
            if not getattr(self, name):
                raise TomatError(f"distillation.{name} is empty; give a folder.")
        check_range("distillation.", self, top_k=1, data_weight=0)
        if not self.temperature > 0:
            raise TomatError(f"distillation.temperature is {self.temperature}; expected a positive number.")


@dataclass(frozen=True)
class RunSchema:
    """One training run, whole."""

    run_name: str = key("run", free="label", step=False)
    """Names the run and its folder; the same name continues the same run."""
    output_dir: str = key("runs", free="label", step=False)
    """Folder or `gs://` URL that holds run folders."""
    purpose: str = key("", free="label", step=False)
    """What the run is for or which run it reproduces; copied to the run's page."""
    slice: str | None = key(None, free="speed", step=False)
    """The slice the run is meant for, such as v6e-16; on other devices it does not start. None: whatever is there."""
    run_elsewhere: bool = key(False, free="speed", step=False)
    """Start on other devices than those of `slice`. The records and figures are then those of the devices that ran."""
    preset: str | None = key(None, free="label")
    """Model preset (`tomat/model/decoder.py`) for keys that `model` leaves out; the resulting `model` decides."""
    data: DataConfig = key(factory=lambda: DataConfig(source="embedded"))
    """The tokens."""
    model: Any = None
    """Any Levanter decoder; `type: density_decoder` (Qwen3 with tomat's knobs) by default."""
    loss: LossConfig = LossConfig()
    """The loss."""
    optimizer: Any = None
    """Levanter's optimizers and schedules: `lr_schedule` cosine, linear, constant; `warmup`, `decay` (constant with a
    decay at the end is WSD)."""
    optimizer_state_dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the optimizer's moments between steps; None: that of the parameters (`trainer.mp`)."""
    sharding: Literal["replicated", "zero1", "fsdp"] = key("replicated", free="speed")
    """`replicated`: parameters and optimizer state whole on every chip. `zero1`: float32 parameters and optimizer
    state split over the data axis, the compute-precision parameters gathered once per step. `fsdp`: split, and gathered
    by XLA operation by operation (Levanter's default)."""
    trackers: TrackersSchema = key(TrackersSchema(), step=False)
    """Metrics beyond `metrics.jsonl`."""
    compiler: CompilerConfig = CompilerConfig()
    """XLA flags."""
    evaluation: EvaluationConfig = key(EvaluationConfig(), step=False)
    """The evaluation after the last step."""
    guards: GuardsConfig = GuardsConfig()
    """What a run watches for while it trains, and what it does about it."""
    preemption: PreemptionConfig = PreemptionConfig()
    """What happens when the machine is taken away."""
    density_dropout: float = key(0.0, added=True)
    """Share of the rows whose density the model does not read (padding ids take its place): each voxel of them is
    predicted from the structure alone. The same weights then decode a patch in one pass, or voxel after voxel."""
    distillation: DistillationConfig | None = None
    """Train a model in few bits on the distributions of a teacher; None: train the model itself on the data."""
    dispatch_ahead: int = key(1, free="speed")
    """Steps that the devices are given before the loss of an earlier one is read, so that they do not wait for the
    host; a stop waits for them. 0: none. No number of the training changes with it (`docs/guides/raising-mfu.md`)."""
    pause: PauseConfig = key(PauseConfig(), step=False)
    """When the run leaves its devices to others."""
    keep_freed_memory: bool = key(False, free="speed")
    """Freed memory stays with the process (`tomat/base/memory.py`; glibc alone). For CPUs, where each step otherwise
    gets its buffers from the kernel anew; the process stays as large as it ever was."""
    tracking_dir: str = key("docs/tracking", free="label", step=False)
    """Where the page of a profiled run is written."""
    baseline: str | None = key(None, free="label", step=False)
    """Name of a run in `tracking_dir` whose configuration the page compares with this one."""
    trainer: TrainerSettings = TrainerSettings()
    """Steps, batch, microbatch (`per_device_parallelism`), mesh, checkpoints, profiler window."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run_name):
            raise TomatError(f"run_name is '{self.run_name}'; expected letters, digits, '.', '_' and '-'.")
        check_range("", self, dispatch_ahead=(0, 8), density_dropout=(0, 1))
        self.loss.check_layout(self.data.sequence_layout.tokens_per_voxel)
