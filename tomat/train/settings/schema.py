"""Every key of a training configuration: type, default, meaning. Without JAX, so that words are checked at once.

`config.TrainConfig` is this with Levanter's classes for model, optimizer and W&B.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from tomat.base.config_keys import key
from tomat.base.errors import TomatError
from tomat.model.loss.config import LossConfig
from tomat.train.settings.data import DataConfig
from tomat.train.settings.distillation import DistillationConfig
from tomat.train.settings.guards import GuardsConfig
from tomat.train.settings.pause import PauseConfig
from tomat.train.settings.preemption import PreemptionConfig
from tomat.train.settings.trainer import TrainerSettings


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
    """Flags of the TPU compiler, `--xla_tpu_...`. Hosts compare flags one by one, with those of their environment."""

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
    it has `model.environment`, and `density_dropout` is above 0."""
    materials: int = key(16, free="watching")
    """Held-out materials that are evaluated, at most: the first of them."""
    picture: bool = key(True, free="watching")
    """Draw a slice of one held-out material for each evaluation: reference, prediction, difference."""
    seed: int = key(0, free="watching")
    """Seeds the anchors of the patches."""


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
    """Start on other devices than those of `slice`. What the run records, and every figure of it, is of what ran."""
    preset: str | None = key(None, free="label")
    """Model preset whose keys lie beneath `model` (`tomat/model/presets.py`), which are what decides."""
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
    """Share of the rows whose density the model does not read (ids of padding stand in its place): their every voxel is
    predicted from the structure alone. With it the same weights decode a patch in one pass, and voxel after voxel."""
    distillation: DistillationConfig | None = None
    """Train a model in few bits on the distributions of a teacher; None: train the model itself on the data."""
    dispatch_ahead: int = key(1, free="speed")
    """Steps that the devices are given before the loss of an earlier one is read, so that they do not wait for the
    host; 0: none. No number of the training changes with it (`docs/guides/raising-mfu.md`)."""
    pause: PauseConfig = key(PauseConfig(), step=False)
    """When the run leaves its devices to others."""
    keep_freed_memory: bool = key(False, free="speed")
    """Memory that is freed stays with the process (`tomat/base/memory.py`; glibc alone). For CPUs, whose steps get
    their buffers from the kernel anew without it; the process stays as large as it ever was."""
    tracking_dir: str = key("docs/tracking", free="label", step=False)
    """Where the page of a profiled run is written."""
    baseline: str | None = key(None, free="label", step=False)
    """Name of a run in `tracking_dir` that the page shows the configuration against."""
    trainer: TrainerSettings = TrainerSettings()
    """Steps, batch, microbatch (`per_device_parallelism`), mesh, checkpoints, profiler window."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run_name):
            raise TomatError(f"run_name is '{self.run_name}'; expected letters, digits, '.', '_' and '-'.")
        if not 0 <= self.dispatch_ahead <= 8:
            raise TomatError(f"dispatch_ahead is {self.dispatch_ahead}; expected 0 to 8: a stop has to wait for them.")
        if not 0 <= self.density_dropout <= 1:
            raise TomatError(f"density_dropout is {self.density_dropout}; expected a share, 0 to 1.")
        self.loss.check_layout(self.data.sequence_layout.tokens_per_voxel)
