"""The configuration of a training run, and how YAML, presets and `--a.b value` overrides become one.

Four layers, each over the last: the defaults of `schema.py`, the model preset, the YAML file, the overrides. The result
is one frozen `TrainConfig` that alone decides the compiled training step.
"""

import copy
import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draccus
import mergedeep
import msgspec
from draccus.parsers.decoding import decode_choice_class, decode_dataclass
from draccus.utils import DecodingError
from levanter.models.lm_model import LmConfig
from levanter.optim.config import AdamConfig, OptimizerConfig
from levanter.tracker.wandb import WandbConfig
from levanter.trainer import TrainerConfig

from tomat.base.config_keys import key
from tomat.base.documents import mapping, take_out
from tomat.base.errors import TomatError
from tomat.base.layout import CHECKPOINT_FOLDER
from tomat.base.overrides import COMMAND_LINE, naming_words_of, parse_overrides, read_yaml, set_by, tomat_cause
from tomat.base.reporting import dump_json, tell
from tomat.model.any_decoder import is_density_decoder
from tomat.train.runs.former_keys import FOLLOWS
from tomat.train.settings.checks import LEVANTER_DEFAULTS, drop_without_effect, refuse_what_cannot_work, without_former
from tomat.train.settings.schema import RunSchema, TrackersSchema
from tomat.train.settings.trainer import TrainerSettings


@dataclass(frozen=True)
class TrackersConfig(TrackersSchema):
    wandb: WandbConfig | None = key(None, free="watching", entries=True)


@dataclass(frozen=True)
class TrainConfig(RunSchema):
    """One training run, whole. These three fields have Levanter's classes here; the schema says what they are."""

    model: LmConfig = field(default_factory=lambda: _model({"type": "density_decoder"}))
    optimizer: OptimizerConfig = field(default_factory=AdamConfig)
    trackers: TrackersConfig = key(TrackersConfig(), step=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_what_cannot_work(self)
        self.trainer_config()  # Levanter refuses what it cannot read, such as a time or an interval
        if self.slice is not None and not self.run_elsewhere and is_density_decoder(self.model):
            from tomat.hardware.chips import TPU_SLICES  # no prediction needs the chips

            if (tpu := TPU_SLICES.get(self.slice)) is not None:
                dataclasses.replace(self.model, max_seq_len=self.seq_len).check_chip(tpu.chip.device_kinds[0])

    @property
    def run_dir(self) -> str:
        return f"{self.output_dir.rstrip('/')}/{self.run_name}"

    @property
    def temporary_checkpoints(self) -> str | None:
        """Where `trainer.checkpointer.temporary_base_path` sends this run's temporary checkpoints; None: beside the
        permanent ones."""
        base = self.trainer.checkpointer.temporary_base_path
        return f"{base.rstrip('/')}/{self.run_name}" if base else None

    @property
    def seq_len(self) -> int:
        """Tokens per sequence: `data.seq_len`, or the layout's context where that is not set."""
        return self.data.seq_len if self.data.seq_len is not None else self.data.sequence_layout.context

    @property
    def batch_size(self) -> int:
        return self.trainer.train_batch_size

    def check_batch(self, data_axis_size: int, where: str = "") -> None:
        """Refuse a batch that the devices cannot share evenly; `where` names their slice, such as " on v6e-16"."""
        microbatch = max(self.trainer.per_device_parallelism, 1)
        unit = data_axis_size * microbatch
        if self.batch_size < 1:
            raise TomatError(f"trainer.train_batch_size is {self.batch_size}; expected at least 1.")
        if self.batch_size % unit:
            raise TomatError(
                f"trainer.train_batch_size is {self.batch_size}; expected a multiple of {unit}{where}: "
                f"{data_axis_size} device(s) on the data axis times a microbatch (trainer.per_device_parallelism) of "
                f"{microbatch} each."
            )

    def check_step(self) -> None:
        """Refuse a run whose step cannot be built from its configuration alone."""
        if self.distillation is not None:
            raise TomatError(
                f"run '{self.run_name}' has distillation, whose step also needs {self.distillation.quantised} and the "
                f"teacher {self.distillation.teacher}: only `tomat train` builds it. Give --distillation null for the "
                "step of the model alone."
            )

    def model_config(self) -> LmConfig:
        return dataclasses.replace(self.model, max_seq_len=self.seq_len)

    def trainer_config(self) -> TrainerConfig:
        """Levanter's trainer configuration: the `trainer` block, and what follows from tomat's other keys."""
        own = dataclasses.asdict(self.trainer)
        own["mesh"]["param_mapping"] = {} if self.sharding == "replicated" else {"embed": "data"}
        own["checkpointer"] |= {
            "base_path": f"{self.run_dir}/{CHECKPOINT_FOLDER}",
            "temporary_base_path": self.temporary_checkpoints,
            "append_run_id_to_base_path": False,
        }
        jax_config = own.pop("jax_config")
        values = mergedeep.merge({}, LEVANTER_DEFAULTS, own, {"id": self.run_name, "log_dir": self.output_dir})
        # draccus 0.11.6 decodes a bool of this field's `str | int | float | bool | None` as the text "True".
        return dataclasses.replace(draccus.decode(TrainerConfig, values), jax_config=jax_config)

    def to_dict(self) -> dict[str, Any]:
        """The whole configuration as plain values that `config_from_dict` reads back as an equal configuration."""
        values = msgspec.to_builtins(draccus.encode(self))  # draccus 0.11.6 leaves enums and checkpoint policies
        take_out(values, "model.max_seq_len")
        return values


@draccus.decode.register(LmConfig)
def _model(value: Any, path: Sequence[str] = ()) -> LmConfig:
    """The model's section. A field model is not looked up among Levanter's models: draccus would import them all, and
    transformers with them, an eighth of the time from a structure to its density."""
    if mapping(value).get("type") == "field":
        from tomat.model.field import FieldConfig

        return decode_dataclass(FieldConfig, {name: its for name, its in value.items() if name != "type"}, path)
    import tomat.model.decoder  # noqa: F401  (registers it with draccus)

    return decode_choice_class(LmConfig, value, path)


@draccus.decode.register(str)
def _text(value: Any, path: Sequence[str] = ()) -> str:
    """A text, which no list is. draccus 0.11.6 keeps decoders by type, and the union of texts and lists of Levanter's
    `load_checkpoint_path` equals that of lists and texts: by the order of imports, a list became its text."""
    if isinstance(value, list | dict):
        raise DecodingError(path, f"Couldn't parse '{value}' into a str")
    return str(value)


def _without_nulls_of_another(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """`optimizer` without nulls for fields of other types: overrides of the type unset a file's fields by null."""

    def names(kind: str) -> set[str]:
        cls: Any = OptimizerConfig.get_known_choices().get(kind)
        return set() if cls is None else {each.name for each in dataclasses.fields(cls)}

    kind, nulls = str(optimizer.get("type", "adam")), {name for name, value in optimizer.items() if value is None}
    if not names(kind) or nulls - names(kind):  # the type or the field may be of tomat's own
        from tomat.train.settings import adafactor as adafactor
    elsewhere = set().union(*map(names, OptimizerConfig.get_known_choices())) - names(kind)
    return {name: value for name, value in optimizer.items() if name not in nulls & elsewhere}


def load_config(
    config_path: str | Path | None, overrides: Sequence[str] = (), words_of: str = COMMAND_LINE
) -> TrainConfig:
    """Read a training configuration with `overrides`, such as `["--optimizer.learning_rate", "1e-3"]`; messages say
    that they come from `words_of`."""
    from_file = {} if config_path is None else read_yaml(config_path, "train")
    with naming_words_of(words_of):
        return config_from_dict(from_file, str(config_path), parse_overrides(overrides), words_of)


def recorded_config(config_path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration that a run left. Keys that an earlier version took and never read are left out, with a note."""
    values = read_yaml(config_path)
    for name in drop_without_effect(values):
        tell(f"note: {config_path} sets {name}, which did nothing when the run was trained; it is left out.")
    return config_from_dict(values, str(config_path), parse_overrides(overrides))


def config_from_dict(
    values: Mapping[str, Any],
    source: str = "the configuration",
    overrides: Mapping[str, Any] | None = None,
    words_of: str = COMMAND_LINE,
) -> TrainConfig:
    """`TrainConfig` from plain values, with `overrides` over them and the preset and tomat's defaults beneath. Messages
    say that values come from `source` and overrides from `words_of`."""
    overrides = overrides or {}
    values = dict(mergedeep.merge({}, copy.deepcopy(dict(values)), overrides))
    refused = {
        name: f"follows from {own}; set {own} instead" for name, own in FOLLOWS.items() if take_out(values, name)[0]
    }
    refused |= {name: f"tomat does not take: {instead}" for name, instead in without_former(values).items()}
    for name, why in refused.items():
        raise TomatError(f"{set_by(name.split('.'), source, overrides, words_of)} sets {name}, which {why}.")
    preset = values.get("preset")
    model: dict[str, Any] = {"type": "density_decoder"}
    if preset is not None:
        from tomat.model.decoder import preset_model

        model |= preset_model(preset)  # keys of fields that every Llama-like decoder has
    defaults = {"trainer": {"jax_config": TrainerSettings().jax_config}, "model": model}
    merged = mergedeep.merge({}, defaults, values)
    if isinstance(optimizer := merged.get("optimizer"), dict):
        merged["optimizer"] = _without_nulls_of_another(optimizer)
    try:
        return draccus.decode(TrainConfig, merged)
    except Exception as error:  # draccus wraps what a dataclass raises, by version and by depth, in several classes
        cause = tomat_cause(error)
        if cause is not None:
            raise cause from None
        said = " ".join(str(error).split())
        if foreign := re.search(r"`optimizer`: The fields `(\w+)`", said):
            said += f"; a field of another optimizer is unset by null: --optimizer.{foreign[1]} null"
        if isinstance(error, DecodingError):
            source = set_by(error.key_path, source, overrides, words_of)
        raise TomatError(f"{source} cannot be read: {said}") from error


def config_hash(config: TrainConfig) -> str:
    """Twelve hexadecimal digits that name the configuration's content."""
    # Read back once: decoding settles 500000 against 500000.0, which are the same setting.
    config = config_from_dict(config.to_dict())
    return hashlib.sha256(dump_json(config.to_dict()).encode()).hexdigest()[:12]
