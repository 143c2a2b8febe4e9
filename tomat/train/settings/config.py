"""The configuration of a training run, and how YAML, presets and `--a.b value` overrides become one.

Four layers, each over the last: tomat's defaults for Levanter's `TrainerConfig`, the model preset, the YAML file,
the overrides. The result is one frozen `TrainConfig` that alone decides the compiled training step.
"""

import copy
import dataclasses
import enum
import hashlib
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import draccus
import levanter.config  # noqa: F401  (registers draccus codecs for jmp policies, time deltas and checkpoint policies)
import mergedeep
from levanter.models.lm_model import LmConfig
from levanter.optim.config import AdamConfig, OptimizerConfig
from levanter.tracker.wandb import WandbConfig
from levanter.trainer import TrainerConfig

from tomat.base.errors import TomatError
from tomat.base.layout import CHECKPOINT_FOLDER
from tomat.base.overrides import parse_overrides, read_yaml, tomat_cause
from tomat.base.reporting import console, dump_json
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.loss.config import LossConfig
from tomat.model.presets import preset_model
from tomat.train.settings import adafactor as adafactor  # registers its name among Levanter's optimizers
from tomat.train.settings.checks import (
    check_distillation,
    check_effect,
    check_finite,
    check_int8,
    check_loading,
    check_scales,
    check_values,
    check_wandb,
    drop_without_effect,
)
from tomat.train.settings.data import DataConfig
from tomat.train.settings.distillation import DistillationConfig
from tomat.train.settings.guards import GuardsConfig
from tomat.train.settings.pause import PauseConfig
from tomat.train.settings.preemption import PreemptionConfig

TRAINER_DEFAULTS: dict[str, Any] = {
    # Levanter would stop on a CPU; whether a run belongs there is the user's `slice`, checked in `startup.py`.
    "require_accelerator": False,
    # `guards` judge the loss inside the step, and name step and materials.
    "crash_on_nan": False,
    "crash_on_inf": False,
    # Both write the step's text on every start (tens of MB for 1B); the planner gives the same and more.
    "log_jaxprs": False,
    "log_xla_hlo": False,
    # Levanter's default watches gradients, which compiles a second step.
    "watch": {"watch_targets": []},
    # With these options a CPU trace of the demo is 2.7 MB instead of 44 MB, and holds the HLO that the parser needs.
    "profiler": {
        "profile_options": {"enable_hlo_proto": True, "python_tracer_level": 0, "host_tracer_level": 2},
        "upload": {"enabled": False},
    },
    "mp": "compute=bfloat16,params=float32,output=bfloat16",
}
"""What tomat sets in Levanter's `TrainerConfig` where Levanter's own default does not fit."""

OWNED_BY_TOMAT = {
    "trainer.id": "run_name",
    "trainer.log_dir": "output_dir",
    "trainer.checkpointer.base_path": "output_dir",
    "trainer.tracker": "trackers",
    "trainer.wandb": "trackers.wandb",
    "trainer.mesh.param_mapping": "sharding",
    "model.max_seq_len": "data.seq_len",
}
"""Levanter keys that follow from a tomat key, which is the one to set."""


@dataclass(frozen=True)
class TrackersConfig:
    """Where metrics go besides `metrics.jsonl`, which every run writes."""

    wandb: WandbConfig | None = None
    """Weights & Biases; None: not used."""
    tensorboard: bool = False
    """Write TensorBoard event files under the run's folder (needs the `tensorboard` extra)."""


@dataclass(frozen=True)
class CompilerConfig:
    """Flags of the XLA compilers, set before the first device is touched. Each belongs in a YAML with its reason."""

    xla_flags: list[str] = field(default_factory=list)
    """Flags of XLA itself (CPU and GPU), `--xla_...`."""
    libtpu_args: list[str] = field(default_factory=list)
    """Flags of the TPU compiler, `--xla_tpu_...`."""

    def __post_init__(self) -> None:
        for flag in (*self.xla_flags, *self.libtpu_args):
            if not flag.startswith("--") or " " in flag:
                raise TomatError(f"compiler flag '{flag}' is not of the form --name=value.")


@dataclass(frozen=True)
class EvaluationConfig:
    """The evaluation after the last step."""

    patches_per_material: int = 8
    """Patches drawn from each held-out material for the teacher-forced evaluation; 0: none."""
    free_running: bool = True
    """Predict each held-out material from its structure alone, whole cells on their stored grids, where the model can:
    it has `model.environment`, and `density_dropout` is above 0."""
    materials: int = 16
    """Held-out materials that are evaluated, at most: the first of them."""
    picture: bool = True
    """Draw a slice of one held-out material for each evaluation: reference, prediction, difference."""
    seed: int = 0
    """Seeds the anchors of the patches."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run, whole."""

    run_name: str = "run"
    """Names the run and its folder; the same name continues the same run."""
    output_dir: str = "runs"
    """Folder or `gs://` URL that holds run folders."""
    purpose: str = ""
    """What the run is for or which run it reproduces; copied to the run's page."""
    slice: str | None = None
    """The slice the run is meant for, such as v6e-16; on other devices it does not start. None: whatever is there."""
    run_elsewhere: bool = False
    """Start on other devices than those of `slice`. What the run records, and every figure of it, is of what ran."""
    preset: str | None = None
    """Model preset whose keys lie beneath `model` (`tomat/model/presets.py`)."""
    data: DataConfig = field(default_factory=lambda: DataConfig(source="embedded"))
    """The tokens."""
    model: LmConfig = field(default_factory=lambda: DensityDecoderConfig())
    """Any Levanter decoder; `type: density_decoder` (Qwen3 with tomat's knobs) by default."""
    loss: LossConfig = LossConfig()
    """The loss."""
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    """Levanter's optimizers and schedules: `lr_schedule` cosine, linear, constant; `warmup`, `decay` (constant with a
    decay at the end is WSD)."""
    optimizer_state_dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the optimizer's moments between steps; None: that of the parameters (`trainer.mp`)."""
    sharding: Literal["replicated", "zero1", "fsdp"] = "replicated"
    """`replicated`: parameters and optimizer state whole on every chip. `zero1`: float32 parameters and optimizer
    state split over the data axis, the compute-precision parameters gathered once per step. `fsdp`: split, and gathered
    by XLA operation by operation (Levanter's default)."""
    trackers: TrackersConfig = TrackersConfig()
    """Metrics beyond `metrics.jsonl`."""
    compiler: CompilerConfig = CompilerConfig()
    """XLA flags."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """The evaluation after the last step."""
    guards: GuardsConfig = GuardsConfig()
    """What a run watches for while it trains, and what it does about it."""
    preemption: PreemptionConfig = PreemptionConfig()
    """What happens when the machine is taken away."""
    density_dropout: float = 0.0
    """Share of the rows whose density the model does not read (ids of padding stand in its place): their every voxel is
    predicted from the structure alone. With it the same weights decode a patch in one pass, and voxel after voxel."""
    distillation: DistillationConfig | None = None
    """Train a model in few bits on the distributions of a teacher; None: train the model itself on the data."""
    dispatch_ahead: int = 1
    """Steps that the devices are given before the loss of an earlier one is read, so that they do not wait for the
    host; 0: none. No number of the training changes with it (`docs/guides/raising-mfu.md`)."""
    pause: PauseConfig = PauseConfig()
    """When the run leaves its devices to others."""
    keep_freed_memory: bool = False
    """Memory that is freed stays with the process (`tomat/base/memory.py`; glibc alone). For CPUs, whose steps get
    their buffers from the kernel anew without it; the process stays as large as it ever was."""
    tracking_dir: str = "docs/tracking"
    """Where the page of a profiled run is written."""
    baseline: str | None = None
    """Name of a run in `tracking_dir` that the page shows the configuration against."""
    trainer: TrainerConfig = field(default_factory=lambda: draccus.decode(TrainerConfig, TRAINER_DEFAULTS))
    """Levanter's trainer: steps, batch, microbatch (`per_device_parallelism`), mesh, checkpoints, profiler window."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run_name):
            raise TomatError(f"run_name is '{self.run_name}'; expected letters, digits, '.', '_' and '-'.")
        if not 0 <= self.dispatch_ahead <= 8:
            raise TomatError(f"dispatch_ahead is {self.dispatch_ahead}; expected 0 to 8: a stop has to wait for them.")
        if not 0 <= self.density_dropout <= 1:
            raise TomatError(f"density_dropout is {self.density_dropout}; expected a share, 0 to 1.")
        self.loss.check_layout(self.data.sequence_layout.tokens_per_voxel)
        if self.distillation is not None:
            check_distillation(self.sharding, self.trainer)
        check_finite(self)
        check_values(self.trainer, self.optimizer)
        check_loading(self.trainer)
        check_effect(self.trainer, self.model, self.optimizer)
        check_int8(self.model, self.trainer, distils=self.distillation is not None)
        check_scales(self.model, self.trainer)
        check_wandb(self.trackers.wandb, self.run_name)

    @property
    def run_dir(self) -> str:
        """The run's folder or URL."""
        return f"{self.output_dir.rstrip('/')}/{self.run_name}"

    @property
    def temporary_checkpoints(self) -> str | None:
        """Where `trainer.checkpointer.temporary_base_path` sends this run's temporary checkpoints; None: beside the
        permanent ones."""
        base = self.trainer.checkpointer.temporary_base_path
        return None if base is None else f"{base.rstrip('/')}/{self.run_name}"

    @property
    def seq_len(self) -> int:
        """Tokens per sequence: `data.seq_len`, or the layout's context where that is not set."""
        return self.data.seq_len if self.data.seq_len is not None else self.data.sequence_layout.context

    @property
    def batch_size(self) -> int:
        """Sequences per step."""
        size = self.trainer.train_batch_size
        if not isinstance(size, int):
            raise TomatError("trainer.train_batch_size is a schedule; tomat expects one integer.")
        return size

    def check_batch(self, data_axis_size: int, where: str = "") -> None:
        """Refuse a batch that devices cannot share evenly.

        Args:
            data_axis_size: Devices on the data axis.
            where: The slice they are of, such as " on v6e-16".

        Raises:
            TomatError: With the unit of which the batch must be a multiple.
        """
        microbatch = max(self.trainer.per_device_parallelism, 1)
        unit = data_axis_size * microbatch
        if self.batch_size < 1 or self.batch_size % unit:
            raise TomatError(
                f"trainer.train_batch_size is {self.batch_size}; expected a multiple of {unit}{where}, which is "
                f"{data_axis_size} device(s) on the data axis times a microbatch of {microbatch} per device. Change "
                "the batch, trainer.per_device_parallelism or the slice."
            )

    def check_step(self) -> None:
        """Refuse a run whose step cannot be built from its configuration alone.

        Raises:
            TomatError: It has `distillation`: its step also needs a folder of weights and a teacher.
        """
        if self.distillation is not None:
            raise TomatError(
                f"run '{self.run_name}' has distillation, whose step also needs the folder "
                f"{self.distillation.quantised} and the teacher {self.distillation.teacher}: only `tomat train` "
                "builds it. Give --distillation null for the step of the model alone."
            )

    def model_config(self) -> LmConfig:
        """The model's configuration with the run's sequence length."""
        return dataclasses.replace(self.model, max_seq_len=self.seq_len)

    def trainer_config(self) -> TrainerConfig:
        """Levanter's trainer configuration with everything that follows from tomat's own keys."""
        param_mapping = {} if self.sharding == "replicated" else {"embed": "data"}
        checkpointer = dataclasses.replace(
            self.trainer.checkpointer,
            base_path=f"{self.run_dir}/{CHECKPOINT_FOLDER}",
            temporary_base_path=self.temporary_checkpoints,
            append_run_id_to_base_path=False,
        )
        return dataclasses.replace(
            self.trainer,
            id=self.run_name,
            log_dir=Path(self.output_dir),
            checkpointer=checkpointer,
            mesh=dataclasses.replace(self.trainer.mesh, param_mapping=param_mapping),
        )

    def to_dict(self) -> dict[str, Any]:
        """The whole configuration as plain values that `config_from_dict` reads back as an equal configuration."""
        values = _plain(draccus.encode(self))
        for key in OWNED_BY_TOMAT:
            _pop(values, key)
        return values


def _leave_out_nulls_of_another_optimizer(values: MutableMapping[str, Any]) -> None:
    """Take a null out of the optimizer that is a field of another kind alone: words for another `optimizer.type` unset
    what a file has for its own, as in `--optimizer.type lion --optimizer.adam_lr null`."""
    optimizer = values.get("optimizer")
    fields = {
        kind: {each.name for each in dataclasses.fields(cast(Any, cls))}
        for kind, cls in OptimizerConfig.get_known_choices().items()
    }
    if isinstance(optimizer, dict) and (kind := str(optimizer.get("type", "adam"))) in fields:
        elsewhere = set().union(*fields.values()) - fields[kind]
        values["optimizer"] = {k: value for k, value in optimizer.items() if value is not None or k not in elsewhere}


def load_config(config_path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a training configuration.

    Args:
        config_path: A YAML file; None for the defaults alone.
        overrides: Words from a command line, such as `["--optimizer.learning_rate", "1e-3"]`.

    Raises:
        TomatError: A missing or malformed file, an unknown key or preset, a value of the wrong type, or a combination
            of values that cannot work.
    """
    from_file: dict[str, Any] = {}
    if config_path is not None:
        from_file = read_yaml(config_path, "train")
    return config_from_dict(mergedeep.merge({}, from_file, parse_overrides(overrides)), source=str(config_path))


def recorded_config(config_path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration that a run left.

    What an earlier version took and never read is left out, with a word: a run that was trained can still be used.

    Args:
        config_path: The run's `config.yaml`.
        overrides: As for `load_config`.

    Raises:
        TomatError: As for `load_config`.
    """
    values = read_yaml(config_path)
    for key in drop_without_effect(values):
        console.print(f"note: {config_path} sets {key}, which did nothing when the run was trained; it is left out.")
    return config_from_dict(mergedeep.merge({}, values, parse_overrides(overrides)), source=str(config_path))


def config_from_dict(values: Mapping[str, Any], source: str = "the configuration") -> TrainConfig:
    """`TrainConfig` from plain values, with tomat's defaults and the preset beneath them.

    Raises:
        TomatError: As for `load_config`.
    """
    for key, own_key in OWNED_BY_TOMAT.items():
        if _pop(copy.deepcopy(dict(values)), key):
            raise TomatError(f"{source} sets {key}, which follows from {own_key}; set {own_key} instead.")
    preset = values.get("preset")
    # `density_decoder` is the default type; a preset's keys are fields that every Llama-like decoder has.
    model: dict[str, Any] = {"type": "density_decoder", **(preset_model(preset) if preset is not None else {})}
    merged = mergedeep.merge({}, {"trainer": TRAINER_DEFAULTS, "model": model}, dict(values))
    _leave_out_nulls_of_another_optimizer(merged)
    # draccus 0.11.6 decodes a bool of this field's `str | int | float | bool | None` as the text "True".
    jax_config = (merged.get("trainer") or {}).pop("jax_config", {})
    try:
        config = draccus.decode(TrainConfig, merged)
        trainer = dataclasses.replace(config.trainer, jax_config={**config.trainer.jax_config, **jax_config})
        return dataclasses.replace(config, trainer=trainer)
    except Exception as error:  # draccus wraps what a dataclass raises, by version and by depth, in several classes
        cause = tomat_cause(error)
        if cause is not None:
            raise cause from None
        said = " ".join(str(error).split())
        if foreign := re.search(r"`optimizer`: The fields `(\w+)`", said):
            said += f"; a field of another optimizer is unset by null: --optimizer.{foreign[1]} null"
        raise TomatError(f"{source} cannot be read: {said}") from error


def config_hash(config: TrainConfig) -> str:
    """Twelve hexadecimal digits that name the configuration's content."""
    # Read back once: decoding settles 500000 against 500000.0, which are the same setting.
    config = config_from_dict(config.to_dict())
    return hashlib.sha256(dump_json(config.to_dict()).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """`value` with what draccus 0.11.6 and Levanter leave unencoded (enums, checkpoint policies) as YAML has it."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    return value


def _pop(values: dict[str, Any], dotted: str) -> bool:
    """Remove the key `a.b` from nested `values`; say whether it was there."""
    *parents, leaf = dotted.split(".")
    node: Any = values
    for part in parents:
        node = node.get(part)
        if not isinstance(node, dict):
            return False
    if leaf not in node:
        return False
    del node[leaf]
    return True
