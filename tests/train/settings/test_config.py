"""Layers of configuration: defaults, preset, YAML, overrides; and what is refused."""

import re
from pathlib import Path

import draccus
import pytest
import yaml
from draccus.utils import DecodingError
from levanter.optim.config import LionConfig

from tomat.base.errors import TomatError
from tomat.model.checkpoint_policies import NAMED_POLICIES
from tomat.model.decoder import parameter_count
from tomat.train.settings.config import config_from_dict, config_hash, load_config, parse_overrides, recorded_config
from tomat.train.settings.meanings import changed_keys

CONFIGS = Path(__file__).parents[3] / "configs"
DEMO = CONFIGS / "train" / "demo-decoder.yaml"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.progress_watchdog", "3"),
        ("trainer.watch.interval", "7"),
        ("model.max_seq_len", "7"),
        ("optimizer.learning_rate", "fast"),
        ("optimizer.nonsense", "3"),
    ],
)
def test_a_refusal_names_who_set_the_key(tmp_path: Path, key: str, value: str):
    file, words = tmp_path / "run.yaml", [f"--{key}", value]
    kind = ["--optimizer.type", "adam"] if key.startswith("optimizer") else []
    file.write_text(yaml.safe_dump(parse_overrides([*kind, *words])))
    with pytest.raises(TomatError, match=f"^{file} (sets|cannot)"):
        load_config(file)
    with pytest.raises(TomatError) as refused:
        load_config(DEMO, words, words_of="row 'b'")
    said = str(refused.value)
    assert "row 'b'" in said and key.rpartition(".")[2] in said
    assert not said.startswith((f"{DEMO} sets", f"{DEMO} cannot"))


def test_overrides_nest_and_read_yaml_values():
    words = ["--a.b", "1", "--a.c=x", "--d", "[1, 2]", "--lr", "1e-3", "--flag", "true", "--a-b.c-d", "e-f"]
    expected = {"a": {"b": 1, "c": "x"}, "d": [1, 2], "lr": 1e-3, "flag": True, "a_b": {"c_d": "e-f"}}
    assert parse_overrides(words) == expected
    malformed = ("a.b 1", "--a.b", "--", "--a {", "--a 1 --a.b 2", "--a.b 1 --a {c:2}", "--a 2026-13-01")
    for text in (*malformed, "--a " + "[" * 1000):
        with pytest.raises(TomatError) as refused:
            parse_overrides(text.split())
        assert "\n" not in str(refused.value)


def test_overrides_lie_over_yaml_which_lies_over_the_preset(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("preset: 200m\ndata: {source: embedded}\nmodel: {num_layers: 3}\noptimizer: {learning_rate: 0.5}\n")
    config = load_config(path, ["--optimizer.learning_rate", "1e-4"])
    assert config.model.num_layers == 3  # from the file
    assert config.model.hidden_dim == 1024  # from the preset
    assert config.optimizer.learning_rate == 1e-4  # from the override
    assert config.trainer_config().log_jaxprs is False  # tomat's default over Levanter's


@pytest.mark.parametrize(
    "path", sorted([*CONFIGS.glob("train/*.yaml"), *CONFIGS.glob("compare/*.yaml")]), ids=lambda path: path.stem
)
def test_shipped_configs_load_and_survive_a_round_trip(path):
    config = load_config(path)
    again = config_from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict())))
    assert again.to_dict() == config.to_dict()
    assert config_hash(again) == config_hash(config)
    assert config.purpose
    assert config.run_name == path.stem


def test_what_recipes_say_of_their_memory_follows_from_their_parameters():
    told = 0
    for path in CONFIGS.glob("train/*.yaml"):
        for size, alone in re.findall(r"([\d.]+) GB( of parameters alone)?", path.read_text(encoding="utf-8")):
            config = load_config(path)
            parameters = parameter_count(config.model_config(), config.data.model_vocabulary)
            # In float32, with both of Adam's moments or without.
            assert float(size) == pytest.approx(parameters * (4 if alone else 12) / 1e9, rel=0.05), path
            told += 1
    assert told >= 6


REFUSED = [
    ("preset 3t", "preset is '3t'; expected one of demo, 30m, 200m, 1b"),
    ("no_such_key 1", "no_such_key"),
    ("trainer.no_such_key 1", "no_such_key"),
    ("trainer.num_train_steps many", "num_train_steps"),
    ("sharding diagonal", "sharding"),
    ("data.layout v9", "v3-p19"),
    ("data.source shards", "data.train"),
    ("data.vocabulary_rows 2186", "data.vocabulary_rows is 2,186; expected at least"),
    ("compiler.libtpu_args [oops]", "--name=value"),
    ("trainer.mp compute=bfloat16,params=float32,output=float32", "trainer.mp has output=float32"),
    ("trainer.model_averaging {type: ema_decay_sqrt}", "into one of: ema"),
    ("trainer.quantization {fp8: true, int8: true}", "trainer.quantization.fp8"),
    ("trainer.quantization {targets: [q_proj]}", "trainer.quantization.int8 are both false; set one"),
    ("trainer.profiler {enabled: true, start_step: 0}", "trainer.profiler.start_step is 0; expected at least 1"),
    ("trainer.profiler {enabled: true, num_steps: 0}", "trainer.profiler.num_steps is 0; expected at least 1"),
    ("trainer.model_averaging {beta: 1}", "trainer.model_averaging.beta is 1"),
    ("trainer.checkpointer.save_interval soon", "cannot be read"),
    ("trainer.checkpointer.save_interval 0m", "trainer.checkpointer.save_interval is 0m"),
    ("trainer.checkpointer.keep [{every: 1, until: null}, {every: 2, until: null}]", "cannot be read"),
    ("trainer.checkpointer.keep [{every: 0}]", "trainer.checkpointer.keep has {'every': 0}; expected `every`"),
    ("trainer.checkpointer.keep [{every: 3, untl: 5}]", "trainer.checkpointer.keep has {'every': 3, 'untl': 5}"),
    ("trainer.checkpointer.keep [{until: 5}]", "trainer.checkpointer.keep has {'until': 5}"),
]
MEANINGLESS = [
    "data.seq_len 100000", "run_name a/b", "trainer.mp f12", "dispatch_ahead 9", "pause.seconds 61", "pause.every 0",
    "trainer.num_train_steps 0", "trainer.steps_per_eval 0", "trainer.max_eval_batches -1",
    "trainer.per_device_parallelism 0", "trainer.checkpointer.keep_last_temporary_checkpoints 0",
    "evaluation.materials -1", "evaluation.patches_per_material -1",
    "optimizer.learning_rate .nan", "optimizer.learning_rate .inf", "optimizer.learning_rate -1e-3",
    "optimizer.weight_decay -0.1", "optimizer.max_grad_norm -1",
    "trainer.quantization {fp8: true, amax_history_length: 0}",
    "optimizer.weight_decay .nan", "optimizer.lr_schedule wavy", "guards.hang_seconds .inf", "guards.hang_seconds -1",
    "guards.spike_factor .nan", "guards.spike_window 129", "guards.max_skips -1", "preemption.grace_seconds 0",
    "preemption.poll_seconds -1", "model.rope.theta -.inf", "model.layer_norm_epsilon .nan",
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), [*REFUSED, *((one, one.split()[0]) for one in MEANINGLESS)])
def test_bad_values_are_one_error_that_names_the_key(words, expected):
    key, value = words.split(" ", 1)
    with pytest.raises(TomatError) as caught:
        load_config(DEMO, [f"--{key}", value])
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_another_optimizer_takes_the_null_for_what_it_does_not_have():
    """The demo's Muon has a rate for Adam."""
    words = ["--optimizer.type", "lion", "--optimizer.learning_rate", "3e-4"]
    with pytest.raises(TomatError, match="adam_lr"):
        load_config(DEMO, words)
    config = load_config(DEMO, [*words, "--optimizer.adam_lr", "null"])
    assert isinstance(config.optimizer, LionConfig) and config.optimizer.learning_rate == 3e-4
    assert config.optimizer.warmup == 50  # of the file, which both have
    with pytest.raises(TomatError, match="adam_lr.*is unset by null: --optimizer.adam_lr null"):
        load_config(DEMO, words)
    with pytest.raises(TomatError, match="adam_rl"):
        load_config(DEMO, [*words, "--optimizer.adam_lr", "null", "--optimizer.adam_rl", "null"])


def test_what_is_not_one_product_is_refused_with_products_that_keep_scales():
    for key, value in (("value_mix", "0.1"), ("fused_qkv", "true"), ("fused_gate_up", "true")):
        words = ["--model.num_layers", "2", f"--model.{key}", value, "--trainer.quantization.fp8", "true"]
        with pytest.raises(TomatError, match=f"model.{key} is {value.title()} and trainer.quantization is set"):
            load_config(DEMO, words)


def test_a_list_is_no_text():
    """Names of layers were read as one regular expression, by which no layer was in few bits, none decayed."""
    with pytest.raises(DecodingError, match="into a str"):
        draccus.decode(str, ["q_proj"])
    words = ["--trainer.quantization", "{fp8: true, targets: [q_proj]}", "--optimizer.weight_decay_modules", "[q_proj]"]
    config = load_config(DEMO, words)
    assert config.trainer.quantization is not None and config.trainer.quantization.targets == ["q_proj"]
    assert config.optimizer.weight_decay_modules == ["q_proj"]
    quantization = config.trainer_config().quantization
    assert quantization is not None and quantization.targets == ["q_proj"]


def test_layers_that_are_not_trained_are_not_in_fp8():
    """A step gives them no scales back: the next loss was NaN."""
    words = ["--model.field.channels", "4", "--trainer.quantization.fp8", "true"]
    with pytest.raises(TomatError, match="layers that are not trained lose the scales"):
        load_config(DEMO, words)
    assert load_config(DEMO, [*words, "--trainer.quantization.targets", "[q_proj]"]).model.field is not None


def test_an_encoder_whose_logits_are_not_its_hidden_states_times_a_matrix_is_refused():
    with pytest.raises(TomatError, match="model.type is modernbert"):
        config_from_dict({"data": {"source": "embedded"}, "model": {"type": "modernbert"}})


def test_sharding_decides_where_parameters_lie():
    for sharding, mapping in (("replicated", {}), ("zero1", {"embed": "data"}), ("fsdp", {"embed": "data"})):
        assert load_config(DEMO, ["--sharding", sharding]).trainer_config().mesh.param_mapping == mapping


def test_named_checkpoint_policies_are_tomats_and_not_haliaxs():
    """Haliax has policies of its own under some of the names, which draccus would otherwise choose."""
    for name, policy in NAMED_POLICIES.items():
        assert load_config(DEMO, ["--model.gradient_checkpointing", name]).model.checkpoint_policy == policy


def test_a_name_that_levanters_decoders_know_no_policy_by_is_refused():
    llama = ["--data.source", "embedded", "--model.type", "llama", "--model.gradient_checkpointing"]
    load_config(None, [*llama, "offload"])
    with pytest.raises(TomatError, match="gradient_checkpointing is 'fast'.*nested"):
        load_config(None, [*llama, "fast"])


def test_a_recorded_setting_that_never_did_anything_is_left_out_with_a_word(tmp_path, capsys):
    """What earlier versions took and never read does not keep a trained run from being used."""
    now = load_config(DEMO)
    then = yaml.safe_load(yaml.safe_dump(now.to_dict()))
    then["model"]["initializer_range"] = 0.5
    then["trainer"]["watch"] = {"interval": 7}
    then["trainer"]["mp"] = f"{now.to_dict()['trainer']['mp'].rpartition(',')[0]},output=float16"
    then["optimizer"] = {"type": "muon", "lr": 0.3}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(then))
    with pytest.raises(TomatError, match="sets trainer.watch.interval, which tomat does not take"):
        load_config(path)
    found = recorded_config(path)
    said = "".join(capsys.readouterr().out.split())
    for key in ("model.initializer_range", "trainer.watch.interval", "optimizer.lr", "trainer.mp(output)"):
        assert f"sets{key},whichdidnothing" in said
    assert (found.model, found.trainer) == (now.model, now.trainer)
    then = yaml.safe_load(yaml.safe_dump(now.to_dict()))
    then["model"]["keep_activation_gradient"] = True  # of an earlier version; it changed no number
    assert changed_keys(then, now.to_dict()) == {}
    path.write_text(yaml.safe_dump(then))
    assert recorded_config(path) == now and capsys.readouterr().out == ""
