"""Hosts that are gone, or have ended, end the others with one line; barriers. Real ones: test_multihost.py."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from forked import until

from tomat.base.errors import RetryableError, TomatError
from tomat.base.layout import LOST_STATUS
from tomat.base.stages import StartStages
from tomat.train.guards import hosts
from tomat.train.guards.hosts import HostWatch


class Service:
    """JAX's key-value service of two hosts."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.barriers: dict[str, threading.Barrier] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.kept
        self.kept[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in list(self.kept.items()) if key.startswith(f"{folder}/")]

    def wait_at_barrier(self, name: str, timeout_in_ms: int) -> None:
        try:
            self.barriers.setdefault(name, threading.Barrier(2)).wait(timeout_in_ms / 1000)
        except threading.BrokenBarrierError:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out.") from None


@pytest.fixture
def pair(monkeypatch):
    """Makes the watch of a host of two; statuses that it left with, what its history was told."""
    service = Service()
    monkeypatch.setattr(hosts, "coordination", lambda: service)
    monkeypatch.setattr(hosts, "_starts", iter([0, 0]))

    def make(index: int, lost_seconds: float = 0.5) -> HostWatch:
        monkeypatch.setattr(hosts, "joined_as", lambda: (index, 2))
        stages, left, told = StartStages(), [], []
        stages.begin(f"at stage {index}")
        watch = HostWatch(stages, beat_seconds=0.02, lost_seconds=lost_seconds, leave=left.append)
        watch.left, watch.on_loss, watch.told = left, told.append, told  # type: ignore[attr-defined]
        return watch

    return make


def end(watch: HostWatch, error: BaseException | None) -> None:
    with contextlib.suppress(BaseException), watch.watching():
        if error is not None:
            raise error


def test_a_host_that_is_gone_ends_the_other_with_one_line_and_an_event(pair, capfd):
    first, second = pair(0), pair(1)
    with first.watching():
        second._exchange(0)  # the only sign of life that it gives
        assert until(lambda: first.left == [LOST_STATUS])
    (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "host 0 of 2 ends, since host 1 (" in error and "is gone" in error and "when it was at stage 1" in error
    assert len(first.told) == 1


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (TomatError("data.train does not exist."), 2, "has ended: data.train does not exist."),
        (RetryableError("the bucket does not answer."), 75, "the bucket does not answer"),
        (SystemExit(143), 143, "it was stopped (status 143)"),
        (ZeroDivisionError("a fault"), 1, "ZeroDivisionError: a fault"),
    ],
)
def test_a_host_that_has_ended_ends_the_other_as_it_did(pair, error, status, said):
    first, second = pair(0, lost_seconds=60), pair(1, lost_seconds=60)
    with first.watching():
        end(second, error)
        assert until(lambda: first.left == [status])
    assert said in first.told[0]


@pytest.mark.parametrize("told", [False, True])
def test_host_0_is_gone_at_once_and_its_own_words_are_repeated_where_it_had_some(pair, told):
    """Only where it could write no event itself, another host does."""
    first, second = pair(0), pair(1, lost_seconds=60)
    with second.watching():
        first._exchange(0)
        assert until(lambda: bool(second._hosts[0].name))
        if told:
            first._tell({"status": 75, "error": "the bucket does not answer", "follows": False})
            assert until(lambda: 0 in second._ended)
        assert second._coordinator_cut()
    assert second.left == [75 if told else LOST_STATUS] and len(second.told) == (not told)
    assert second._coordinator_cut() is False  # it has ended its part: what follows is JAX's


def test_a_host_that_is_done_is_not_missed(pair):
    first, second = pair(0, lost_seconds=0.1), pair(1)
    with first.watching():
        end(second, None)
        threading.Event().wait(0.4)
    assert not first.left


def test_a_broken_collective_waits_for_its_cause(pair):
    """The error of the host that is left says nothing of the other, which is named instead."""
    first, second = pair(0, lost_seconds=0.3), pair(1)
    second._exchange(0)
    end(first, jax.errors.JaxRuntimeError("INTERNAL: Gloo: Connection closed by peer"))
    assert first.left == [LOST_STATUS] and "host 1 (" in first.told[0]


def test_a_device_that_fails_on_both_hosts_ends_them_by_itself(pair):
    first, second = pair(0, lost_seconds=60), pair(1, lost_seconds=60)
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda watch: end(watch, error), (first, second)))
    assert not first.left and not second.left


def test_the_host_whose_device_fails_keeps_its_error_and_the_other_repeats_it(pair):
    first, second = pair(0, lost_seconds=0.5), pair(1, lost_seconds=60)
    with first.watching():
        end(second, jax.errors.JaxRuntimeError("INTERNAL: a chip has failed"))
        assert until(lambda: first.left == [1])
    assert "JaxRuntimeError: INTERNAL: a chip has failed" in first.told[0] and not second.left


def test_hosts_meet_at_a_barrier_and_one_that_does_not_come_is_named(pair):
    first, second = pair(0, lost_seconds=60), pair(1, lost_seconds=60)
    with first.watching(), second.watching(), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda watch: watch.barrier("the data"), (first, second)))
        assert until(lambda: bool(first._hosts[1].name))
        second.stages.begin("opening the data")
        assert until(lambda: first._hosts[1].at == "opening the data")
        with pytest.raises(RetryableError, match=r"before the first step: host 1 \(.*\) is opening the data"):
            first.barrier("the first step", 0.05)
