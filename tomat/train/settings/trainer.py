"""The `trainer` block of a configuration: steps, batch, devices, checkpoints, profiles. Without JAX.

`TrainConfig.trainer_config` makes Levanter's `TrainerConfig` from it. Levanter's other keys follow from other keys of
tomat, or are refused by name (`runs/former_keys.py`).
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from tomat.base.config_keys import check_range, key
from tomat.base.errors import TomatError

MP_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "f16"), "float16"),
    **dict.fromkeys(("float32", "f32", "full"), "float32"),
    **dict.fromkeys(("float64", "f64"), "float64"),
}
"""Names of number types that jmp 0.0.4 takes, each with the name that is recorded."""
MP_PARTS = {"p": "params", "params": "params", "c": "compute", "compute": "compute", "o": "output", "output": "output"}

FREE_JAX_OPTIONS = (
    "jax_compilation_cache_dir", "jax_enable_compilation_cache", "jax_log_compiles",
    "jax_persistent_cache_enable_xla_caches", "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes", "jax_traceback_filtering",
)  # fmt: skip
"""Options of JAX that change no number of the training."""


@dataclass(frozen=True)
class QuantizationSettings:
    """Products of linear layers in few bits; each product keeps its own scales (Haliax)."""

    targets: list[str] | str | None = None
    """Names of the layers, or a regular expression that begins as their path does (`.*q_proj`); None: all."""
    amax_history_length: int = 1024
    """Steps whose largest values decide the scales of fp8."""
    fp8: bool = False
    """Products in float8."""
    int8: bool = False
    """Products in int8."""

    def __post_init__(self) -> None:
        if self.fp8 == self.int8:
            both = f"trainer.quantization.fp8 and trainer.quantization.int8 are both {str(self.fp8).lower()}"
            raise TomatError(f"{both}; set one, or trainer.quantization: null for unquantised products.")
        check_range("trainer.quantization.", self, amax_history_length=1)


@dataclass(frozen=True)
class AveragingSettings:
    """An average of the weights, which everything but training uses."""

    type: Literal["ema"] = "ema"
    """Exponential moving average."""
    beta: float = 0.999
    """Weight of the average before each step."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            said = f"trainer.model_averaging.beta is {self.beta}; expected at least 0 and below 1"
            raise TomatError(f"{said}: with 1 the average stays what the run began with.")


@dataclass(frozen=True)
class ProfilerSettings:
    """A window of steps that is traced (`tomat profile`)."""

    enabled: bool = key(False, free="watching")
    """Trace at all."""
    start_step: int = key(5, free="watching")
    """Steps that are done when the trace begins."""
    num_steps: int = key(25, free="watching")
    """Steps of the trace."""
    create_perfetto_trace: bool = key(False, free="watching")
    """Also write a trace for ui.perfetto.dev."""

    def __post_init__(self) -> None:
        if self.enabled:  # Levanter (0.2.227) begins after a step, and skips a trace that it cannot begin
            check_range("trainer.profiler.", self, start_step=1, num_steps=1)


@dataclass(frozen=True)
class MeshSettings:
    """How devices are arranged, and which named axes of arrays are split over them."""

    axes: dict[str, int] = key(factory=lambda: {"data": -1, "replica": 1, "model": 1}, free="speed", entries=True)
    """Devices of a slice along each axis; -1: those that are left."""
    dcn_axes: dict[str, int] = key(factory=lambda: {"replica_dcn": -1}, free="speed", entries=True)
    """Slices along each axis."""
    shared_mapping: dict[str, list[str] | str] = key(factory=dict, free="speed", entries=True)
    """Named axis -> axes of the mesh, for parameters and for computed arrays."""
    compute_mapping: dict[str, list[str] | str] = key(factory=dict, free="speed", entries=True)
    """The same for computed arrays alone; `sharding` decides where parameters lie."""


@dataclass(frozen=True)
class CheckpointerSettings:
    """When checkpoints are written, and which are kept."""

    temporary_base_path: str | None = key(None, free="saving")
    """Folder or URL for the checkpoints of `save_interval`; None: beside those that are kept."""
    save_interval: str | None = key("15m", free="saving")
    """Time between checkpoints that a later one replaces, such as 10m; null: none."""
    keep: list[dict[str, int | None]] | None = key(factory=lambda: [{"every": 10000}], free="saving")
    """Which steps' checkpoints stay: `[{every: 100, until: 1000}, {every: 1000, until: null}]`."""
    keep_last_temporary_checkpoints: int = key(1, free="saving")
    """Number of the checkpoints of `save_interval` that are kept."""

    def __post_init__(self) -> None:
        if not self.keep_last_temporary_checkpoints >= 1:
            said = f"trainer.checkpointer.keep_last_temporary_checkpoints is {self.keep_last_temporary_checkpoints}"
            raise TomatError(f"{said}; expected at least 1, or a killed run has none to go on from.")
        if set(re.findall(r"\d", self.save_interval or "")) == {"0"}:  # Levanter (0.2.227) saves nothing by it
            said = f"trainer.checkpointer.save_interval is {self.save_interval}"
            raise TomatError(f"{said}; expected a time above 0, such as 10m, or null for no saves by the clock.")
        for each in self.keep or []:
            every, until = each.get("every"), each.get("until")
            if not each.keys() <= {"every", "until"} or every is None or min(every, 1 if until is None else until) < 1:
                said = f"trainer.checkpointer.keep has {each}"
                raise TomatError(f"{said}; expected `every` and, if there is a last step, `until`, each at least 1.")


@dataclass(frozen=True)
class DistributedSettings:
    """How the processes of a run find each other; a TPU slice needs none of these keys."""

    coordinator_address: str | None = key(None, free="speed")
    """Host and port of the first process."""
    num_processes: int | None = key(None, free="speed")
    """Processes of the run."""
    process_id: int | None = key(None, free="speed", host=True)
    """Index of this process, from 0."""
    local_device_ids: int | list[int] | None = key(None, free="speed", host=True)
    """Devices of the machine that this process uses; None: all."""
    initialize_jax_distributed: bool = key(True, free="speed")
    """False: this process runs alone, whatever its environment says."""


@dataclass(frozen=True)
class TrainerSettings:
    """Steps, batch, devices, checkpoints, profiles."""

    seed: int = key(0, step=False)
    """Seed of the first weights, of the order of the data and of what is drawn in training."""
    mp: str = "compute=bfloat16,params=float32,output=bfloat16"
    """Types of the numbers: of computed arrays, and of the parameters. The loss is float32 whatever these are."""
    quantization: QuantizationSettings | None = None
    """Products in few bits that keep scales; None: none (`model.int8_matmuls` keeps no scales)."""
    model_averaging: AveragingSettings | None = None
    """An average of the weights; None: the run's weights are those of the last step."""
    profiler: ProfilerSettings = key(ProfilerSettings(), step=False)
    """A window of steps that is traced."""
    mesh: MeshSettings = MeshSettings()
    """How devices are arranged."""
    train_batch_size: int = 512
    """Sequences per step."""
    per_device_parallelism: int = key(-1, free="speed")
    """Sequences of a microbatch on each device; -1: all of its sequences at once."""
    per_device_eval_parallelism: int = key(-1, free="speed")
    """The same for validation; -1: as many as in training."""
    num_train_steps: int = 400_000
    """Steps of the whole run."""
    steps_per_eval: int = key(1_000, free="watching", step=False)
    """Steps from one validation to the next."""
    max_eval_batches: int | None = key(None, free="watching", step=False)
    """Batches of a validation, at most; None: the whole set."""
    checkpointer: CheckpointerSettings = key(CheckpointerSettings(), step=False)
    """When checkpoints are written, and which are kept."""
    jax_config: dict[str, Any] = key(
        factory=lambda: {"jax_threefry_partitionable": True, "jax_softmax_custom_jvp": True},
        free="speed",
        entries=FREE_JAX_OPTIONS,
    )
    """Options of `jax.config`."""
    jax_compilation_cache_dir: str | None = key(None, free="speed", host=True)
    """Folder of compiled programs that later starts find."""
    distributed: DistributedSettings = DistributedSettings()
    """How the processes of a run find each other."""

    def __post_init__(self) -> None:
        check_range("trainer.", self, num_train_steps=1, steps_per_eval=1, max_eval_batches=0)
        for name in ("per_device_parallelism", "per_device_eval_parallelism"):
            if (value := getattr(self, name)) < 1 and value != -1:
                raise TomatError(f"trainer.{name} is {value}; expected at least 1, or -1 for all at once.")
        parts = _policy_parts(self.mp)
        if parts["output"] != parts["compute"]:
            said = f"trainer.mp has output={parts['output']}, which does nothing: the loss is computed in float32"
            raise TomatError(f"{said}. Leave output out, or set it to compute={parts['compute']}.")
        object.__setattr__(self, "mp", _policy_text(parts))

    @property
    def compute_dtype(self) -> str:
        return self.mp.partition("=")[2].partition(",")[0]


def without_output(policy: str) -> str:
    """`policy` with the output in the type that it computes in, whatever it says."""
    parts = _policy_parts(policy)
    return policy if parts["output"] == parts["compute"] else _policy_text(parts | {"output": parts["compute"]})


def _policy_text(parts: dict[str, str]) -> str:
    return ",".join(f"{name}={parts[name]}" for name in ("compute", "params", "output"))


def _policy_parts(text: str) -> dict[str, str]:
    """Types of `params`, `compute` and `output`; left out: float32, the type of params, that of compute (jmp 0.0.4)."""
    parts: dict[str, str] = {}
    for word in text.split(","):
        name, equals, dtype = (each.strip() for each in word.partition("="))
        names = [MP_PARTS.get(name)] if equals else list(MP_PARTS.values())
        dtype = MP_DTYPES.get(dtype if equals else name)
        if dtype is None or None in names:
            raise TomatError(f"trainer.mp is '{text}'; expected for example compute=bfloat16,params=float32, or f32.")
        parts |= dict.fromkeys(filter(None, names), dtype)
    params = parts.get("params", "float32")
    compute = parts.get("compute", params)
    return {"params": params, "compute": compute, "output": parts.get("output", compute)}
