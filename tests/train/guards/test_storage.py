"""A storage that takes nothing is said and ends the process; one that is slow does not. In a run: test_multihost.py."""

import threading

import pytest
import tensorstore as ts

from tomat.base.layout import RETRY_STATUS
from tomat.train.guards.storage import NEVER, StorageWatch, bytes_written


def watch(end_seconds: float = 0.3) -> tuple[StorageWatch, list[int], threading.Event]:
    left: list[int] = []
    ended = threading.Event()
    leave = lambda status: (left.append(status), ended.set())  # noqa: E731
    storage = StorageWatch("gs://bucket/runs/a", say_seconds=0.04, end_seconds=end_seconds, leave=leave)
    return storage, left, ended


def test_what_stalls_is_said_and_then_ends_the_process_with_the_status_that_is_tried_again(capfd):
    storage, left, ended = watch()
    told: list[str] = []
    storage.on_end = told.append
    with storage.watching("saving step 40", lambda: 0):
        assert ended.wait(10)
    assert left == [RETRY_STATUS] and len(told) == 1
    out, err = capfd.readouterr()
    assert "still saving step 40 (0 s without progress); after 0 s this process ends" in out
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "gs://bucket/runs/a: saving step 40 made no progress" in error


@pytest.mark.parametrize("moves", [True, False])
def test_what_goes_on_or_waits_for_others_is_let_be(moves, capfd):
    storage, left, _ = watch(end_seconds=0.1)
    clock = iter(range(10**9))
    progress = (lambda: next(clock)) if moves else (lambda: None)
    with storage.watching("saving step 40", progress, end_seconds=None if moves else NEVER):
        threading.Event().wait(0.4)
    assert not left and ("still saving" in capfd.readouterr().out) is not moves


def test_bytes_that_reach_a_storage_are_progress(tmp_path):
    before = bytes_written()
    ts.KvStore.open(f"file://{tmp_path}/").result().write("a", b"x" * 1000).result()
    assert bytes_written() - before == 1000
