"""A child that answers, refuses, fails or takes too long, without a compiler."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tomat.base.errors import TomatError
from tomat.hardware.chips import slice_named
from tomat.perf.plan.compile import process
from tomat.perf.plan.compile.process import Limits, ask, request_key
from tomat.perf.plan.plan_cache import Kept, open_cache, remove_abandoned

CHILD = """
import os, subprocess, sys, time
from pathlib import Path
from tomat.base.errors import TomatError
from tomat.perf.plan.compile.process import LLO_DUMP, XLA_DUMP, answer, keep_answer, say

def carry_out(request):
    work = Path(request["work_dir"])
    say("compiling")
    print("a library's chatter")
    if request["do"] == "refuse":
        raise TomatError("two words")
    if request["do"] == "fail":
        sys.exit("it broke")
    if request["do"] == "wait":
        time.sleep(60)
    if request["do"] == "leave":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])  # which holds the output open
        sys.stdout.buffer.write(b"no text: \\xff\\n")
    assert (work / LLO_DUMP).is_dir() and (work / XLA_DUMP).is_dir()
    (work / "part").mkdir()
    result = {"did": request["do"], "environment": dict(os.environ)}
    keep_answer(result, work / "part", Path(request["programs_dir"]) / "key")

answer(sys.argv[1], carry_out)
"""


@pytest.fixture
def child(child_module) -> str:
    return child_module(CHILD)


@pytest.fixture
def asked(tmp_path, child, monkeypatch):
    """Asks the child to do something, with a cache named from the folder that one is in."""
    monkeypatch.chdir(tmp_path)
    cache = Path("cache")
    open_cache(cache)

    def ask_(do: str, limits: Limits | None = None) -> tuple[Kept, list[str]]:
        stages: list[str] = []
        slice_ = slice_named("v6e-4")
        answer = ask(child, {"do": do}, slice_, cache, limits or Limits(), on_stage=stages.append)
        return answer, stages

    yield ask_
    assert not list(cache.glob(".work-*"))


def test_an_answer_is_taken_when_the_child_has_ended_whoever_holds_its_output(asked):
    answer, _ = asked("leave", Limits(seconds=15.0))
    with answer.lock:
        assert answer.result["did"] == "leave"


@pytest.mark.parametrize(
    ("do", "limits", "says"),
    [
        ("refuse", Limits(), "^two words$"),
        ("fail", Limits(), "(?s)status 1 while compiling.*it broke"),
        ("wait", Limits(seconds=3.0), "--time_limit_seconds"),
        ("wait", Limits(memory_bytes=2**20), "--memory_limit_gib"),
    ],
)
def test_what_keeps_a_child_from_an_answer_is_said(asked, do, limits, says):
    with pytest.raises(TomatError, match=says):
        asked(do, limits)


def test_a_request_is_named_by_its_content_its_childs_sources_and_the_installed_packages(monkeypatch):
    module = "tomat.perf.cost.llo"
    one = request_key({"a": 1}, module)
    assert one == request_key({"a": 1}, module)
    others = [request_key({"a": 2}, module), request_key({"a": 1}, "tomat.base")]
    monkeypatch.setattr(process, "installed_packages", lambda: ["jax-99.0"])
    assert len({one, *others, request_key({"a": 1}, module)}) == 4


def test_nothing_inherited_reaches_the_compile(asked, tmp_path, monkeypatch):
    foreign = {
        "JAX_DEFAULT_MATMUL_PRECISION": "highest", "JAX_ENABLE_X64": "1", "EQX_ON_ERROR": "nan",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path), "LIBTPU_INIT_ARGS": "--foreign", "XLA_FLAGS": "--foreign",
        "OF_NOBODY": "1",
    }  # fmt: skip
    for name, value in foreign.items():
        monkeypatch.setenv(name, value)
    answer, stages = asked("answer", Limits(cache_bytes=0))
    with answer.lock:  # while it is open it is not evicted
        seen = answer.result["environment"]
        assert stages == ["compiling"] and answer.result["did"] == "answer"
        assert answer.folder.name == "key" and (answer.folder / "result.json").exists()
    assert [name for name, value in foreign.items() if value in seen.get(name, "")] == []
    assert seen["PATH"] == os.environ["PATH"] and seen["TPU_ACCELERATOR_TYPE"] == "v6e-4"


ASKER = """
import sys
from pathlib import Path
from tomat.hardware.chips import slice_named
from tomat.perf.plan.compile.process import Limits, ask
ask(sys.argv[1], {"do": "wait"}, slice_named("v6e-4"), Path(sys.argv[2]), Limits())
"""


def test_who_asks_is_killed_and_the_child_ends_and_its_folder_goes(child, tmp_path):
    cache = tmp_path / "cache"
    open_cache(cache)
    asker = subprocess.Popen([sys.executable, "-c", ASKER, child, str(cache)])
    while not (children := psutil.Process(asker.pid).children()) or not list(cache.glob(".work-*/request.json")):
        assert asker.poll() is None
        time.sleep(0.02)
    asker.send_signal(signal.SIGKILL)
    asker.wait()
    psutil.wait_procs(children, timeout=60)
    assert not [one for one in children if one.is_running()]
    # only now: a child that is not yet the compiler's program still holds the lock of the folder
    remove_abandoned(cache)
    assert not list(cache.glob(".work-*"))
