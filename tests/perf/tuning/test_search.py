"""The searches against memory that is a known function of the configuration, so that the true answer is known."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.hardware.chips import Slice, slice_named
from tomat.model.checkpoint_policies import NAMED_POLICIES
from tomat.perf.cost.memory import MemoryReport
from tomat.perf.plan.compile.compiler import CompiledStep
from tomat.perf.plan.compile.topology import data_axis_size
from tomat.perf.tuning import search
from tomat.perf.tuning.changes import changed, checked_keys, override_words
from tomat.perf.tuning.search import (
    BATCH_CAP_FACTOR,
    MAX_COMPILES,
    POLICIES_BY_RECOMPUTATION,
    SHARDINGS,
    largest_batch,
    nearest_fits,
)
from tomat.train.settings.config import TrainConfig, load_config

CONFIG = Path(__file__).parents[3] / "configs" / "train" / "200m-v6e16.yaml"
GIB = 2**30
CAPACITY = round(31.24 * GIB)
KEPT_PER_SEQUENCE = {
    "off": 8.9, "save_qkv_attention": 1.4, "save_attention": 0.9, "save_qkv": 1.1, "full": 0.5, "offload": 0.4,
    "nested": 0.4, "save_attention_mlp": 4.4, "save_matmuls": 4.9,
}  # fmt: skip
"""GiB for a sequence of a chip; `off` as the compiler found for the 200M at context 4608 (71.39 GiB for 8)."""


def policy_name(config: TrainConfig) -> str:
    value = getattr(config.model, "gradient_checkpointing", None)
    return value if isinstance(value, str) else "full" if value else "off"


def linear_bytes(config: TrainConfig, slice_: Slice, state_gib: float = 0.2) -> tuple[int, int]:
    """(arguments, temporaries), a straight line in the sequences that a chip works on at once."""
    shards = data_axis_size(config, slice_.n_devices)
    at_once = config.trainer.per_device_parallelism
    at_once = at_once if at_once > 0 else config.batch_size // shards
    arguments = (
        state_gib if config.sharding == "fsdp" else state_gib * 4 if config.sharding == "zero1" else state_gib * 16
    )
    return round(arguments * GIB), round(KEPT_PER_SEQUENCE[policy_name(config)] * at_once * GIB)


class CountingCompiler:
    """Answers as `compile_step` does, from a function of the configuration, and remembers what it was asked."""

    def __init__(self, memory: Callable[[TrainConfig, Slice], tuple[int, int]] = linear_bytes, space: str = "hbm"):
        self.memory, self.space = memory, space
        self.asked: list[TrainConfig] = []

    def __call__(self, config: TrainConfig, slice_: Slice, *, memory_only: bool) -> CompiledStep:
        assert memory_only == (self.space == "hbm" or not self.asked)  # of tiles the first says where they lie
        self.asked.append(config)
        arguments, temporaries = self.memory(config, slice_)
        required = arguments + temporaries
        report = MemoryReport(
            required <= CAPACITY, required, CAPACITY, argument_bytes=arguments, temporary_bytes=temporaries,
            memory_space=self.space,
        )  # fmt: skip
        result = {"status": "fits" if report.fits else "oom", "memory": report.to_dict(), "compile_seconds": 30.0}
        return CompiledStep(Path("program"), result, cached=False)


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    """Experiment 1 of the tracking issue: batch 128, context 4608, no checkpointing."""
    return load_config(CONFIG, ["--data.layout", "v3-p15", "--model.gradient_checkpointing", "off"])


V6E_16 = slice_named("v6e-16")


def test_orders_name_every_policy_and_sharding():
    assert set(POLICIES_BY_RECOMPUTATION) == set(NAMED_POLICIES)
    assert set(SHARDINGS) == set(get_args(get_type_hints(TrainConfig)["sharding"]))


TEXTS = st.text("abctrue0:[]{}\"' 1e-", max_size=8).filter(lambda text: "e-" not in text and not text[:1].isdigit())
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = TEXTS | NUMBERS | st.booleans() | st.none() | st.lists(st.integers(), max_size=3)


@given(st.dictionaries(st.sampled_from(["model.num_heads", "a.b.c", "d"]), VALUES, min_size=1))
@settings(max_examples=50, deadline=None)
def test_words_say_what_the_mapping_says(overrides):
    assert checked_keys(override_words(overrides), "row") == overrides or any(
        # 1e-3 without a dot is a number to every user, whichever way it is written.
        isinstance(value, str) and "e" in value
        for value in overrides.values()
    )


def test_overrides_may_be_a_mapping_or_words():
    assert checked_keys(["--model.num_heads", 8, "--sharding=zero1"], "row") == {
        "model.num_heads": 8, "sharding": "zero1"
    }  # fmt: skip
    with pytest.raises(TomatError, match="row 3 has overrides 'sharding'"):
        checked_keys("sharding", "row 3")


def test_nearest_change_of_each_dimension_is_found_by_compiling(config):
    compiler, told = CountingCompiler(), []
    trials = nearest_fits(config, V6E_16, compiler, told.append)
    assert len(compiler.asked) == len(trials) + 1
    assert told == [" ".join(f"{key}={value}" for key, value in trial.overrides.items()) for trial in trials]
    fitting = {trial.dimension: dict(trial.overrides) for trial in trials if trial.fits}
    # 8 sequences a chip need 71.4 GiB: 4 could not fit (35.9), 2 do. Temporaries decide, so sharding cannot help.
    assert fitting == {
        "microbatch": {"trainer.per_device_parallelism": 2},
        "checkpointing": {"model.gradient_checkpointing": "save_qkv_attention"},
        "batch": {"trainer.train_batch_size": 32},
    }
    assert [t.dimension for t in trials].index("batch") == len(trials) - 1
    assert not any(trial.fits for trial in trials if trial.dimension == "sharding")
    unchanged = [t for t in trials if t.dimension != "batch"]
    assert all(changed(config, t.overrides).batch_size == config.batch_size for t in unchanged)


def test_the_number_of_compiles_is_kept_and_each_dimension_gets_one(config):
    def nothing_helps(config: TrainConfig, slice_: Slice) -> tuple[int, int]:
        # Arguments alone are too large, so that no batch is ruled out beforehand and each must be tried.
        return 2 * CAPACITY if config.sharding == "replicated" else CAPACITY + 1, 0

    compiler = CountingCompiler(nothing_helps)
    trials = nearest_fits(changed(config, {"sharding": "replicated"}), V6E_16, compiler)
    assert len(trials) == len(compiler.asked) - 1 == MAX_COMPILES
    assert {"checkpointing", "sharding"} <= {trial.dimension for trial in trials}


def test_changes_that_do_not_suffice_alone_are_tried_together(config):
    def both_needed(config: TrainConfig, slice_: Slice) -> tuple[int, int]:
        fits = config.sharding == "fsdp" and policy_name(config) == "nested"
        return (CAPACITY if fits else CAPACITY + 1), 0

    far = {"sharding": "replicated", "model.gradient_checkpointing": "offload"}
    trials = nearest_fits(changed(config, far), V6E_16, CountingCompiler(both_needed))
    assert [t.dimension for t in trials if t.fits] == ["together"]
    assert trials[-1].overrides["sharding"] == "fsdp"


class Refusing(CountingCompiler):
    """A compiler that cannot compile microbatches, and no large batch."""

    def __call__(self, config: TrainConfig, slice_: Slice, *, memory_only: bool) -> CompiledStep:
        if config.trainer.per_device_parallelism > 0 or config.batch_size > 256:
            raise TomatError("not today")
        return super().__call__(config, slice_, memory_only=memory_only)


def test_what_cannot_be_compiled_is_recorded_and_the_search_goes_on_as_far_as_it_can(config):
    trials = nearest_fits(config, V6E_16, Refusing())
    refused = [trial for trial in trials if trial.fits is None]
    assert refused and all(trial.error == "not today" for trial in refused)
    assert any(trial.fits for trial in trials)
    [answer] = largest_batch(config, V6E_16, Refusing(), ["full"])
    assert answer.batch_sequences == 256 and "not today" in answer.stopped_by


def test_tiles_shrink_where_a_kernel_does_not_fit_the_chip(config):
    def vmem(config: TrainConfig, slice_: Slice) -> tuple[int, int]:
        block = getattr(config.model, "splash").block_q  # noqa: B009  (LmConfig has no such field)
        return 0, CAPACITY // 512 * block

    tiled = changed(config, {"data.layout": "v3-p19", "model.splash.block_q": 2048, "model.splash.block_kv": 2048})
    trials = nearest_fits(tiled, V6E_16, CountingCompiler(vmem, "vmem"))
    assert [t.dimension for t in trials] == ["attention tiles"] * 2
    assert trials[-1].fits and trials[-1].overrides == {"model.splash.block_q": 512, "model.splash.block_kv": 512}


@given(st.sampled_from(sorted(KEPT_PER_SEQUENCE)), st.integers(1, 40), st.floats(0.7, 1.5))
@settings(max_examples=15, deadline=None)
def test_largest_batch_is_the_true_one(policy, start, power):
    """Whatever the curve, as long as it rises: the answer fits, one unit more does not, and both were compiled."""

    def curved(config: TrainConfig, slice_: Slice) -> tuple[int, int]:
        return GIB, round(KEPT_PER_SEQUENCE[policy_name(config)] * (config.batch_size / 16) ** power * GIB)

    start_config = load_config(CONFIG, ["--trainer.train_batch_size", str(16 * start)])
    compiler = CountingCompiler(curved)
    cap = BATCH_CAP_FACTOR * start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MAX_BATCH_COMPILES", 40)  # a curve takes more than a line
        [found] = largest_batch(start_config, V6E_16, compiler, [policy])
    fits = [n for n in range(1, cap + 1) if GIB + KEPT_PER_SEQUENCE[policy] * n**power * GIB <= CAPACITY]
    assert found.unit_sequences == 16
    assert found.batch_sequences == (16 * fits[-1] if fits else None)
    tried = {int(trial.overrides["trainer.train_batch_size"]): trial.fits for trial in found.trials}
    assert len(tried) == len(found.trials) == len(compiler.asked)
    if fits:
        assert tried[16 * fits[-1]]
    if len(fits) < cap:
        assert tried[16 * (len(fits) + 1)] is False
    else:
        assert found.next_up is None and "cap" in found.stopped_by


def test_a_straight_line_takes_four_compiles(config, monkeypatch):
    answers = largest_batch(config, V6E_16, CountingCompiler(), ["full", "off"])
    # fsdp: 31.24 - 0.2 GiB hold 62 sequences a chip at 0.5 GiB, and 3 at 8.9.
    assert [answer.batch_sequences for answer in answers] == [16 * 62, 16 * 3]
    assert all(answer.next_up is not None and answer.next_up.fits is False for answer in answers)
    start = changed(config, {"trainer.train_batch_size": 16})
    assert all(len(answer.trials) <= 5 for answer in largest_batch(start, V6E_16, CountingCompiler(), ["off", "full"]))
    monkeypatch.setattr(search, "MAX_BATCH_COMPILES", 2)
    [answer] = largest_batch(config, V6E_16, CountingCompiler(), ["full"])
    assert len(answer.trials) == 2 and answer.stopped_by == "2 compiles"


def test_a_microbatch_is_the_unit_and_its_memory_does_not_grow(config):
    with pytest.raises(TomatError, match="largest batch to try is 64, .* expected at least 128"):
        largest_batch(changed(config, {"trainer.train_batch_size": 1}), slice_named("v6e-128"), CountingCompiler())
    micro = changed(config, {"trainer.per_device_parallelism": 2})
    [answer] = largest_batch(micro, V6E_16, CountingCompiler())
    assert answer.unit_sequences == 32
    assert answer.batch_sequences == 64 * 128 and "cap" in answer.stopped_by
    assert len(answer.trials) <= 3
