"""The guards one by one: what is judged a bad step, what a skipped one leaves, regions, clocks, full storage."""

import errno
import math
import time
from pathlib import Path
from types import SimpleNamespace

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gcs_server import serve_bucket
from hypothesis import given, settings
from hypothesis import strategies as st
from levanter.recovery.types import EXIT_STALL
from levanter.tracker import CompositeTracker

from tomat.base.errors import RetryableError, TomatError
from tomat.base.layout import HUNG_STATUS
from tomat.train.guards.loss import guard_updates, spike_limit
from tomat.train.guards.start import (
    check_clocks,
    check_free_space,
    check_run_regions,
    clock_warnings,
    explaining_full_storage,
    full_storage_cause,
    storage_clock_skew,
)
from tomat.train.settings.config import load_config
from tomat.train.settings.schema import SPIKE_HISTORY, GuardsConfig
from tomat.train.tracking import JsonLinesTracker

PARAMETERS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array(0.5)}
SKIP = GuardsConfig(on_bad_loss="skip", spike_window=8)


def steps(config: GuardsConfig):
    """A jitted step of a guarded Adam, `(parameters, state, gradient, loss) -> (parameters, state)`; and its state."""
    guarded = guard_updates(optax.adam(1e-2), config)

    @jax.jit
    def step(parameters, state, gradient, loss):
        gradients = jax.tree.map(lambda leaf: gradient * leaf, parameters)
        updates, state = guarded.update(gradients, state, parameters, loss=loss)
        return optax.apply_updates(parameters, updates), state

    return step, guarded.init(PARAMETERS)


SKIPPING, FRESH = steps(SKIP)


def run(batches, step=SKIPPING, state=FRESH):
    parameters = PARAMETERS
    for gradient, loss in batches:
        parameters, state = step(parameters, state, gradient, loss)
    return parameters, state


GOOD = st.tuples(st.integers(-30, 30).map(lambda i: i / 10), st.integers(90, 110).map(lambda i: i / 100))
BAD = st.sampled_from([(1.0, math.nan), (1.0, math.inf), (math.nan, 1.0), (math.inf, 1.0), (math.nan, -math.inf)])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(GOOD, BAD), max_size=12))
def test_a_skipped_batch_might_never_have_been(batches):
    parameters, state = run(batches)
    good = [batch for batch in batches if all(map(math.isfinite, batch))]
    expected, expected_state = run(good)
    leaves, expected_leaves = jax.tree.leaves((parameters, state[:3])), jax.tree.leaves((expected, expected_state[:3]))
    for ours, theirs in zip(leaves, expected_leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert int(state.tally[2]) == len(batches) - len(good)


def test_a_spike_is_skipped_and_does_not_change_what_the_next_loss_is_held_against():
    calm = [(1.0, 1.0 + 0.01 * (i % 3)) for i in range(8)]
    parameters, state = run(calm)
    limit = float(spike_limit(state.losses, state.accepted, SKIP))
    # Median 1.01, median absolute deviation 0.01: the relative floor of 2 % is the larger, 20 times.
    np.testing.assert_allclose(limit, 1.01 + 20 * 0.02 * 1.01, rtol=1e-6)
    after, after_state = run([*calm, (1.0, 1.5), (1.0, 50.0)])
    assert after_state.tally.tolist() == [3, 2, 2]
    np.testing.assert_array_equal(after["w"], parameters["w"])
    assert float(spike_limit(after_state.losses, after_state.accepted, SKIP)) == limit
    assert run([*calm, (1.0, 50.0), (1.0, 1.4)])[1].tally.tolist() == [0, 0, 1]


def test_nothing_is_a_spike_before_there_are_enough_losses_nor_with_factor_0():
    assert run([(1.0, 1.0)] * 7 + [(1.0, 1e6)])[1].tally.tolist() == [0, 0, 0]
    step, state = steps(GuardsConfig(on_bad_loss="skip", spike_window=8, spike_factor=0))
    assert run([(1.0, 1.0)] * 8 + [(1.0, 1e6)], step, state)[1].tally.tolist() == [0, 0, 0]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.125, 10, width=32), min_size=8, max_size=2 * SPIKE_HISTORY + 9))
def test_the_limit_follows_the_last_losses_of_the_window(losses):
    """Against NumPy, on the ring as the step writes it."""
    ring = np.zeros(SPIKE_HISTORY, np.float32)
    for i, loss in enumerate(losses):
        ring[i % SPIKE_HISTORY] = loss
    window = np.array(losses[-8:], np.float32)
    median = np.median(window)
    sigma = max(1.4826 * np.median(np.abs(window - median)), 0.02 * median)
    found = spike_limit(jnp.asarray(ring), jnp.array(len(losses)), SKIP)
    np.testing.assert_allclose(found, median + 20 * sigma, rtol=1e-5)


def test_stopping_and_skipping_have_states_of_one_shape():
    """So that a run that stopped can go on with `guards.on_bad_loss skip`."""
    states = [steps(config)[1] for config in (GuardsConfig(), SKIP, GuardsConfig(spike_window=128, spike_factor=3))]
    shapes = [jax.tree.map(jnp.shape, state) for state in states]
    assert shapes[0] == shapes[1] == shapes[2]


def test_a_hang_ends_with_the_status_on_record():
    assert HUNG_STATUS == EXIT_STALL


@pytest.fixture(scope="module")
def google():
    """The bucket server, with the metadata of a machine in us-east5."""
    with serve_bucket() as server, pytest.MonkeyPatch.context() as patch:
        server.worker_zone = "us-east5-b"
        server.regions["far"] = "EUROPE-WEST4"
        for key, value in server.environment.items():
            patch.setenv(key, value)
        fsspec.get_filesystem_class("gs").clear_instance_cache()
        yield server
    fsspec.get_filesystem_class("gs").clear_instance_cache()


def gs_config(train: str, output: str, *words: str):
    return load_config(None, ["--data.source", "shards", "--data.train", train, "--output_dir", output, *words])


DATASETS = SimpleNamespace(train=SimpleNamespace(uncompressed_bytes=2**21 * 8192 * 2), validation=None)
"""As far as the size of the data goes: 2,097,152 rows of 16 KiB are 32 GiB."""


def test_data_in_another_region_are_refused_with_the_cost(google):
    assert check_run_regions(gs_config("gs://bucket/train", "gs://bucket/runs"), DATASETS) is None
    far = gs_config("gs://far/train", "gs://bucket/runs")
    with pytest.raises(
        TomatError,
        match=r"^Training data, checkpoints and machine are in different regions: training data \(gs://far/train\) in "
        r"europe-west4, checkpoints \(gs://bucket/runs\) in us-east5, machine \(this one\) in us-east5\. .* an epoch "
        r"of 32 GiB from another region costs at least USD 0\.64 .*--guards.allow_cross_region true",
    ):
        check_run_regions(far, DATASETS)
    with pytest.raises(TomatError, match="checkpoints .gs://far/runs. in europe-west4"):
        check_run_regions(gs_config("/a/folder", "gs://far/runs"), DATASETS)
    allowed = gs_config("gs://far/train", "gs://bucket/runs", "--guards.allow_cross_region", "true")
    assert "europe-west4" in (check_run_regions(allowed, DATASETS) or "")


def test_the_clock_is_held_against_the_buckets(google):
    for off, expected in ((0.0, []), (90.0, ["ahead of"]), (-90.0, ["behind"])):
        skew = storage_clock_skew(lambda off=off: time.time() + off)
        assert skew is not None and abs(skew - off) < 2
        warnings = check_clocks(gs_config("gs://bucket/train", "runs"), lambda off=off: time.time() + off)
        for text, words in zip(warnings, expected, strict=True):
            assert f"{words} Cloud Storage" in text
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
        assert storage_clock_skew() is None


def test_a_clock_that_is_far_off_is_refused(google):
    with pytest.raises(TomatError, match="the clock of host 0 is 400 s ahead of Cloud Storage.*chronyc makestep"):
        check_clocks(gs_config("gs://bucket/train", "runs"), lambda: math.floor(time.time()) + 0.5 + 400)
    now = 1.7e9
    assert clock_warnings([now, now + 0.2, now - 29, now], [None] * 4, 30) == []
    [text] = clock_warnings([now, now + 0.2, now - 40, now], [None] * 4, 30)
    assert text.startswith("the clock of host 2 is 40 s behind the median of all hosts")
    with pytest.raises(TomatError, match="host 1 is 301 s ahead"):
        clock_warnings([now, now + 301, now], [None] * 3, 30)


def test_a_full_disk_is_refused_before_and_found_in_what_an_error_came_from(tmp_path):
    check_free_space(str(tmp_path), 1)
    check_free_space("gs://bucket/runs", 2**60)
    with pytest.raises(TomatError, match=r"has .*iB free; a checkpoint of this run takes up to 1,024 TiB, and 2"):
        check_free_space(str(tmp_path), 2**50 - 1)
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "metrics.jsonl"))
    gathered = RuntimeError("Exception(s) occurred while exiting trainer", [ValueError("x"), full])
    assert full_storage_cause(gathered) is full
    tensorstore = ValueError('RESOURCE_EXHAUSTED: Error writing "local file": No space left on device')
    assert full_storage_cause(tensorstore) is tensorstore
    of_a_device = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    assert full_storage_cause(ValueError("NOT_FOUND: no such chunk")) is full_storage_cause(of_a_device) is None
    with (
        pytest.raises(TomatError, match=r"metrics.jsonl: no room left .* are free .* takes up to 1 KiB.* are whole"),
        explaining_full_storage(tmp_path, "gs://bucket/runs/run", lambda: 1024),
    ):
        raise gathered


def test_storage_that_does_not_answer_a_save_is_worth_another_try(tmp_path):
    """As TensorStore says it, gathered by Levanter's trainer while it closes; XLA says the same words of a host."""
    unanswered = ValueError("ABORTED: All 6 retry attempts failed: injected [source locations='a']")
    gathered = RuntimeError("errors while closing", [unanswered])
    with (
        pytest.raises(RetryableError, match="gs://bucket/runs/run: the storage did not answer.*same command"),
        explaining_full_storage(tmp_path, "gs://bucket/runs/run", lambda: 1024),
    ):
        raise gathered
    others = (jax.errors.JaxRuntimeError("UNAVAILABLE: host 3"), TomatError("no"), ValueError("x"), KeyError("quota"))
    for other in others:
        with pytest.raises(type(other)) as seen, explaining_full_storage(tmp_path, str(tmp_path), lambda: 0):
            raise other
        assert not isinstance(seen.value, RetryableError)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full: no file that is always full")
def test_a_log_that_cannot_be_written_says_so(tmp_path):
    """Levanter would go on without the line."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = JsonLinesTracker(tmp_path / "metrics.jsonl")
    CompositeTracker([log]).log({"train/loss": 1.0}, step=3, commit=True)
    assert log.failure is not None and full_storage_cause(log.failure) is log.failure
    assert log.failure.filename == str(tmp_path / "metrics.jsonl")
