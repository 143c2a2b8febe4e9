"""A child that answers, refuses, fails or takes too long, without a compiler."""

import os

import pytest

from tomat.base.errors import TomatError
from tomat.hardware.chips import slice_named
from tomat.perf.plan.compile.process import Limits, ask, request_key
from tomat.perf.plan.plan_cache import Kept, open_cache

CHILD = """
import sys, time
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
    assert (work / LLO_DUMP).is_dir() and (work / XLA_DUMP).is_dir()
    (work / "part").mkdir()
    keep_answer({"did": request["do"]}, work / "part", Path(request["programs_dir"]) / "key")

answer(sys.argv[1], carry_out)
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Asks the child to do something."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "child_of_a_test.py").write_text(CHILD)
    paths = [str(tmp_path / "modules"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    cache = tmp_path / "cache"
    open_cache(cache)

    def ask_(do: str, limits: Limits | None = None) -> tuple[Kept, list[str]]:
        stages: list[str] = []
        slice_ = slice_named("v6e-4")
        answer = ask("child_of_a_test", {"do": do}, slice_, cache, limits or Limits(), on_stage=stages.append)
        return answer, stages

    yield ask_
    assert not list(cache.glob(".work-*"))


def test_an_answer_is_held_while_it_is_open(asked):
    answer, stages = asked("answer", Limits(cache_bytes=0))
    with answer.lock:
        assert stages == ["compiling"] and answer.result == {"did": "answer"}
        assert answer.folder.name == "key" and (answer.folder / "result.json").exists()


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


def test_a_request_is_named_by_its_content_and_its_childs_sources():
    one = request_key({"a": 1}, "tomat.perf.plan.compile.child")
    assert one == request_key({"a": 1}, "tomat.perf.plan.compile.child")
    assert len({one, request_key({"a": 2}, "tomat.perf.plan.compile.child"), request_key({"a": 1}, "tomat.base")}) == 3
