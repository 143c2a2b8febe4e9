"""Every key of the configuration does something, or is refused with what to use instead. Most of it is tracing."""

import ast
import copy
import dataclasses
import functools
import itertools
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from levanter.optim.config import OptimizerConfig
from levanter.tracker.wandb import WandbConfig
from tiny_run import ONE_STEP

from tomat.base.config_keys import fields_below, meaning_of, section_of
from tomat.base.errors import TomatError
from tomat.model.any_decoder import environment_of
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.tiles import HEAD_NAMES
from tomat.perf.plan.compile.lowering import _stand_in_atoms, lower_step, stand_in_table, stand_in_tables
from tomat.train import startup
from tomat.train.loader import TokenExample
from tomat.train.restore import model_initialiser
from tomat.train.runs.former_keys import FOLLOWS, FORMER
from tomat.train.settings.checks import OPTIMIZER_NO_EFFECT, OPTIMIZERS_THAT_CANNOT_RUN
from tomat.train.settings.config import TrainConfig, load_config
from tomat.train.settings.meanings import changed_keys, may_change
from tomat.train.step import DensityLossFunction, density_target

ROOT = Path(__file__).parents[2]
TINY = [
    *ONE_STEP, "--trainer.train_batch_size", "8", "--data.seq_len", "128", "--model.attn_backend", "vanilla",
]  # fmt: skip


def tiny(*words: str) -> TrainConfig:
    return load_config(None, [*TINY, *words])


CHANGED = [
    "data.codec_relative true", "data.layout v3-p11", "data.n_density_tokens 128", "data.seq_len 96",
    "data.vocabulary_rows 2304", "density_dropout 0.5", "guards.on_bad_loss skip", "guards.spike_factor 5.0",
    "guards.spike_window 16",
    "loss.block_positions 64", "loss.emd_weight 2.0", "loss.kind cross_entropy", "loss.preamble_weight 0.5",
    "loss.target_sigma 1.0", "loss.target_space rho", "loss.vocabulary full", "loss.z_loss_weight 1e-4",
    "model.activation_function relu", "model.attn_backend jax_flash", "model.embedding_skip 0.1",
    "model.environment.basis.cutoff_a 4.0", "model.environment.basis.n 8", "model.environment.basis.stretch_a 0.7",
    "model.environment.channels 4", "model.environment.hidden_dim 16", "model.environment.max_atoms 64",
    "model.environment.max_elements 4", "model.environment.prior_anchors 16", "model.environment.prior_width 0.3",
    "model.flash_attention_block_size 32", "model.flat_mlp true", "model.fused_gate_up true", "model.fused_qkv true",
    "model.gradient_checkpointing off", "model.head_dim 8", "model.hidden_dim 64", "model.hybrid_norm true",
    "model.input_embedding_norm true", "model.int8_matmuls forward", "model.intermediate_dim 32",
    "model.layer_norm_epsilon 0.01", "model.num_heads 4", "model.num_kv_heads 1", "model.num_layers 2",
    "model.paired_heads true", "model.query_blocks 2", "model.save_mlp_layers 1", "model.scan_layers false",
    "model.sliding_window 16", "model.tie_word_embeddings false", "model.upcast_attn true", "model.use_bias true",
    "model.use_layer_norm_weight false", "model.use_qk_norm false", "model.use_sliding_window false",
    "model.value_mix 0.1", "optimizer_state_dtype bfloat16", "sharding zero1",
    "trainer.mesh.axes {replica: 1, data: 1, model: 2}", "trainer.mesh.compute_mapping {embed: another}",
    "trainer.mesh.dcn_axes {replica_dcn: -1, another: 1}", "trainer.mesh.shared_mapping {embed: another}",
    "trainer.model_averaging.beta 0.5", "trainer.mp compute=bfloat16,params=float32", "trainer.num_train_steps 77",
    "trainer.per_device_parallelism 2", "trainer.quantization.amax_history_length 7", "trainer.quantization.fp8 true",
    "trainer.quantization.int8 true", "trainer.quantization.targets [q_proj]", "trainer.train_batch_size 16",
]  # fmt: skip
"""Keys of the compiled step, each with a value: the lowered text changes with it."""

FOUR_AXES = "trainer.mesh.axes {replica: 1, data: 1, model: 1, another: 2}"
BOTH = {
    "data.codec_relative": "model.environment.channels 8",
    "data.layout": "data.seq_len null",
    "model.save_mlp_layers": "model.scan_layers false",
    "loss.emd_weight": "loss.kind ce_emd",
    "model.environment": "model.environment.channels 8",
    "model.flash_attention_block_size": "model.attn_backend jax_flash",
    "model.upcast_attn": "trainer.mp compute=bfloat16,params=float32",
    "model.value_mix": "model.num_layers 2",
    "model.use_sliding_window": "model.sliding_window 16",
    "trainer.mesh.shared_mapping": FOUR_AXES,
    "trainer.mesh.compute_mapping": FOUR_AXES,
    "trainer.model_averaging": "trainer.model_averaging {type: ema, beta: 0.9}",
    "trainer.quantization.amax_history_length": "trainer.quantization.fp8 true",
    "trainer.quantization.targets": "trainer.quantization.int8 true",
}
"""What must be set, before and after, for some of them or of a section to act."""


def words(*settings: str) -> list[str]:
    return [word for one in settings for word in f"--{one}".split(" ", 1)]


def step_words(setting: str) -> tuple[list[str], list[str]]:
    """Those that both have, and the one that changes."""
    both = [value for key, value in BOTH.items() if f"{setting.split()[0]}.".startswith(f"{key}.")]
    return words(*both), words(setting)


STEP = {setting.split()[0]: step_words(setting) for setting in CHANGED}

HANDED_ON = [
    "trainer.distributed.coordinator_address somewhere:1234", "trainer.distributed.initialize_jax_distributed false",
    "trainer.distributed.local_device_ids [0]", "trainer.distributed.num_processes 1",
    "trainer.distributed.process_id 0", "trainer.jax_compilation_cache_dir /somewhere",
    "trainer.jax_config {jax_enable_x64: true}", "trainer.checkpointer.keep [{every: 7, until: null}]",
    "trainer.checkpointer.keep_last_temporary_checkpoints 3", "trainer.checkpointer.save_interval 7m",
    "trainer.checkpointer.temporary_base_path elsewhere", "trainer.profiler.create_perfetto_trace true",
    "trainer.profiler.enabled true", "trainer.profiler.num_steps 7", "trainer.profiler.start_step 7",
    "trainer.per_device_eval_parallelism 3",
]  # fmt: skip
"""Keys that Levanter acts on: what it is given under the same name changes with them."""

UNUSED = {
    f"model.{name}": meaning_of(field).unused
    for name, (field, _) in fields_below(DensityDecoderConfig).items()
    if meaning_of(field).unused
}
REFUSED = {
    **dict.fromkeys(UNUSED),
    "model.max_seq_len": "77",
    "trackers.wandb.fork_from": "a?_step=3",
    "trackers.wandb.id": "another",
    "trackers.wandb.resume": "never",
    "trainer.model_averaging.type": None,  # it takes one
}
"""Keys that are refused, and a value to try."""

WANDB = {f.name for f in dataclasses.fields(WandbConfig)} - {"id", "resume", "fork_from"}


def walk(cls: type, prefix: str = "") -> Iterator[str]:
    """Every leaf key below a dataclass."""
    for name, (_, hint) in fields_below(cls).items():
        key, below = f"{prefix}{name}", section_of(hint)
        if key in ("model", "optimizer", "model.rope"):  # by kind, in tests of their own
            continue
        if below is None:
            yield key
        else:
            yield from walk(below, f"{key}.")


def every_key() -> set[str]:
    return {*walk(TrainConfig), *walk(DensityDecoderConfig, "model.")}


TABLES = (set(STEP), {one.split()[0] for one in HANDED_ON}, set(REFUSED),
          {f"trackers.wandb.{name}" for name in WANDB})  # fmt: skip
SHOWN = {"loss.interpret", "model.qk_rotary.block_positions", *(f"model.whole_head.{name}" for name in HEAD_NAMES),
         *(f"model.splash.{letter}_layout" for letter in "qkv"), "model.splash.block_kv_compute",
         "model.splash.block_kv_dkv_compute", "pause.every", "pause.seconds"}  # fmt: skip
"""Keys that are read under another name than their section's; tests of the kernels and of `dispatch.py` set them."""


def test_every_key_acts_or_is_refused_or_is_read():
    """What no table shows is read by a module outside of the configuration that has to do with the key's section."""
    listed, keys = [key for table in TABLES for key in table], every_key()
    assert len(listed) == len(set(listed)) and len(keys) > 150
    assert set(listed) - keys == set(), "there are no such keys any more"
    modules = [path for path in (ROOT / "tomat").rglob("*.py") if "settings" not in path.parts]
    trees = [ast.walk(ast.parse(path.read_text())) for path in modules]
    chains = [[ast.unparse(node).split(".") for node in tree if isinstance(node, ast.Attribute)] for tree in trees]

    def is_read(key: str) -> bool:
        *_, section, leaf = ["config", *key.split(".")]
        if section == "config":  # each module has some `config`
            return any(one[-2:] in (["config", leaf], ["_config", leaf]) for one in itertools.chain(*chains))
        return any(
            any(one[-1] == leaf for one in module) and any(section in (one[0], one[-1]) for one in module)
            for module in chains
        )

    assert {key for key in keys - set(listed) if not is_read(key)} == SHOWN, "nothing reads these"
    assert not is_read("compiler.seed"), "or any name that is read somewhere would do"


FREED = {
    "": "baseline dispatch_ahead keep_freed_memory output_dir preset purpose run_elsewhere run_name sharding slice "
    "tracking_dir",
    "data": "in_memory input prefetch_batches verify_checksums",
    "loss": "block_positions interpret kernel",
    "model": "attn_backend flash_attention_block_size flat_mlp fused_gate_up fused_qkv gradient_checkpointing "
    "query_blocks reference_checkpoint save_mlp_layers scan_layers tokenizer",
    "trainer": "jax_compilation_cache_dir max_eval_batches per_device_eval_parallelism per_device_parallelism "
    "steps_per_eval",
}
"""Keys that may change when a run is resumed, by section."""
FREED_WHOLE = (
    "compiler", "evaluation", "guards", "loss.tiles", "model.qk_rotary", "model.splash", "model.whole_head", "pause",
    "preemption", "trackers", "trackers.wandb", "trainer.checkpointer", "trainer.distributed", "trainer.mesh",
    "trainer.profiler",
)  # fmt: skip
"""Sections all of whose keys may."""


@functools.cache
def _record_of_tiny() -> dict[str, Any]:
    return tiny().to_dict()


def _changed(key: str) -> list[str]:
    """What a resume says of a record in which one key, and nothing else, has another value than now."""
    records = [copy.deepcopy(_record_of_tiny()) for _ in range(2)]
    for value, node in zip(("before", "after"), records, strict=True):
        *parents, leaf = key.split(".")
        for part in parents:
            node[part] = node[part] if isinstance(node.get(part), dict) else {}
            node = node[part]
        node[leaf] = value
    return list(changed_keys(*records))


def test_a_key_that_was_added_is_no_change_of_a_field_model_either():
    now = load_config("demo", ["--model.descriptors", "3"]).to_dict()
    before = copy.deepcopy(now)
    del before["model"]["descriptors"]
    assert changed_keys(before, now) == {}
    assert list(changed_keys(before, {**now, "model": {**now["model"], "descriptors": 6}})) == ["model.descriptors"]


def test_a_resume_holds_every_key_that_is_not_freed():
    """A key that a new version brings is fixed until it is freed, and fails here until somebody has said which."""

    def is_freed(key: str) -> bool:
        section, _, leaf = key.rpartition(".")
        return section in FREED_WHOLE or leaf in FREED.get(section, "").split()

    keys = every_key() - set(FOLLOWS)
    assert [key for key in keys if may_change(key) != is_freed(key)] == [], "say whether these may change on resume"
    assert [key for key in keys if (_changed(key) == [key]) == is_freed(key)] == []


def test_a_resume_holds_every_key_of_every_optimizer():
    for kind, cls in OptimizerConfig.get_known_choices().items():
        for field in dataclasses.fields(typing.cast(Any, cls)):
            key = f"optimizer.{field.name}"
            assert _changed(key) == [key], (kind, key)
            assert _changed(f"{key}.nested") == [f"{key}.nested"]
    assert _changed("optimizer.type") == ["optimizer.type"]


def test_a_resume_holds_a_key_that_nobody_has_heard_of():
    """At the top, and in every section, those whose other keys are all free among them."""
    sections = {key.rpartition(".")[0] for key in every_key()} - {"", "trackers.wandb"}
    assert len(sections) > 20
    for key in ["noise_scale", *(f"{section}.noise_scale" for section in sorted(sections))]:
        assert _changed(key) == [key]
    assert _changed("trainer.jax_config.jax_enable_x64") == ["trainer.jax_config.jax_enable_x64"]
    assert _changed("trainer.jax_config.jax_compilation_cache_dir") == []


@functools.cache
def step_text(words: tuple[str, ...]) -> str:
    config = tiny(*words)
    return lower_step(config, config.trainer_config().device_mesh, stand_in_table(config)).as_text()


@functools.cache
def loss_text(words: tuple[str, ...]) -> str:
    """What of the step is the loss, forward: a third of the time."""
    config, key = tiny(*words), jax.random.PRNGKey(0)
    table, environment = stand_in_table(config), environment_of(config.model)
    tables = None if environment is None else stand_in_tables(environment, table, config.data.codec_relative)
    batch, position = hax.Axis("batch", config.batch_size), hax.Axis("position", config.seq_len)
    tokens = hax.NamedArray(jax.ShapeDtypeStruct((batch.size, position.size), jnp.int32), (batch, position))
    target = density_target(config, table, tables and tables.offset_e_per_a3)
    loss = DensityLossFunction(config.loss, target, None, tables, config.density_dropout)
    model = eqx.filter_eval_shape(model_initialiser(config, key))
    with config.trainer_config().use_device_mesh():
        jaxpr, _, _ = eqx.filter_make_jaxpr(loss)(model, TokenExample(tokens, _stand_in_atoms(config, batch)), key=key)
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))


@pytest.mark.slow
@pytest.mark.parametrize("key", STEP)
def test_it_changes_the_step(key):
    both, changed = (tuple(words) for words in STEP[key])
    in_the_loss = key.split(".")[0] in ("model", "loss", "data", "density_dropout")
    if not in_the_loss or loss_text(both + changed) == loss_text(both):
        assert step_text(both + changed) != step_text(both)


def test_the_same_settings_make_the_same_step():
    """Or any key would seem to act."""
    for text in (step_text, loss_text):
        before = text(())
        text.cache_clear()
        assert text(()) == before


def test_it_is_handed_to_levanter():
    for setting in HANDED_ON:
        names = setting.split()[0].split(".")[1:]
        configs = tiny().trainer_config(), tiny(*words(setting)).trainer_config()
        before, after = (functools.reduce(getattr, names, config) for config in configs)
        assert before != after, setting


@pytest.mark.parametrize("key", [key for key in REFUSED if key != "trainer.model_averaging.type"])
def test_what_would_do_nothing_is_refused_with_what_to_use(key):
    with pytest.raises(TomatError, match=re.escape(key)) as caught:
        tiny(f"--{key}", REFUSED[key] or "0.7")
    assert (UNUSED.get(key) or "") in str(caught.value)


@pytest.mark.parametrize("key", [*FOLLOWS, *FORMER])
def test_a_key_of_before_that_would_act_is_refused_with_what_to_use(key):
    with pytest.raises(TomatError, match=f"sets {re.escape(key)}") as caught:
        tiny(f"--{key}", "another")
    assert {**FOLLOWS, **FORMER}[key] in str(caught.value) and "\n" not in str(caught.value)


def test_what_wandb_is_told_is_passed_on_whole(tmp_path):
    config = tiny()
    for name in WANDB:
        wandb = dataclasses.replace(WandbConfig(), **{name: (value := object())})
        config = dataclasses.replace(config, trackers=dataclasses.replace(config.trackers, wandb=wandb))
        (passed,) = [one for one in startup.trackers(config, tmp_path, 0) if isinstance(one, WandbConfig)]
        assert getattr(passed, name) is value and passed.id == config.run_name


def test_an_optimizer_that_cannot_run_and_a_field_that_nothing_reads_are_refused():
    """`profiling/levanter_settings.py` finds them."""
    for kind in OptimizerConfig.get_known_choices():
        cls: Any = OptimizerConfig.get_choice_class(kind)
        if kind in OPTIMIZERS_THAT_CANNOT_RUN:
            with pytest.raises(TomatError, match=f"optimizer.type is '{kind}'"):
                dataclasses.replace(tiny(), optimizer=cls())
        for name in OPTIMIZER_NO_EFFECT.get(kind, {}):
            with pytest.raises(TomatError, match=f"optimizer.{name} is .* which tomat takes"):
                dataclasses.replace(tiny(), optimizer=dataclasses.replace(cls(), **{name: 0.037}))


def test_a_learning_rate_below_zero_is_refused_in_any_optimizer():
    for kind in set(OptimizerConfig.get_known_choices()) - set(OPTIMIZERS_THAT_CANNOT_RUN):
        cls = typing.cast(Any, OptimizerConfig.get_choice_class(kind))
        for name in (field.name for field in dataclasses.fields(cls)):
            if name in ("learning_rate", "lr") or name.endswith("_lr"):
                with pytest.raises(TomatError, match=f"optimizer.{name} is -1"):
                    dataclasses.replace(tiny(), optimizer=dataclasses.replace(cls(), **{name: -1.0}))
