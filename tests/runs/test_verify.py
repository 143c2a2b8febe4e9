"""Damage is found, and what a kill leaves behind is not called damage."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tomat.runs.record import read_record
from tomat.runs.verify import Verdict, verify_run
from tomat.training.checkpoints import list_checkpoints


def verdict_of(run) -> Verdict:
    return verify_run(read_record(str(run)), list_checkpoints(str(run)))


def test_a_sound_run(make_run):
    assert verdict_of(make_run()) == Verdict("a", (), (), 2, 10)


def test_a_save_cut_short_is_a_note_and_a_damaged_one_a_problem(make_run):
    run = make_run(saved=(4, 9), partial=(8,))
    verdict = verdict_of(run)
    assert verdict.problems == () and "step-8" in verdict.notes[0]
    for file in (run / "checkpoints" / "step-4" / "d").iterdir():
        file.unlink()
    (problem,) = verdict_of(run).problems
    assert "step-4" in problem


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=st.lists(st.integers(0, 9), min_size=1, max_size=14))
def test_holes_and_repeats_are_found_and_nothing_else(make_run, tmp_path, kept):
    run = tmp_path / "runs" / "a"
    if not run.exists():
        make_run(saved=())
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in kept))
    problems = " ".join(verdict_of(run).problems)
    assert bool(problems) == (kept != list(range(len(kept))))
    assert ("more than one line" in problems) == (len(set(kept)) < len(kept))
    assert ("lacks" in problems) == (set(range(min(kept), max(kept) + 1)) != set(kept))
    assert ("begins at" in problems) == (min(kept) > 0)


def test_a_fork_begins_where_it_left_its_parent(make_run):
    run = make_run(events=({"event": "fork", "step": 3, "parent": "b"},))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[3:]))
    assert verdict_of(run).problems == ()


def test_a_cut_last_line_is_a_note_and_a_garbled_one_before_it_a_problem(make_run):
    run = make_run(saved=(4,))
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], lines[-1][:9]]))
    assert verdict_of(run).problems == () and "cut short" in verdict_of(run).notes[0]
    path.write_text("\n".join([*lines[:5], "{", *lines[6:]]))
    assert [text.split(" of ")[0] for text in verdict_of(run).problems] == ["line 6", "metrics.jsonl lacks step 5"]


def test_a_log_that_ends_before_the_newest_checkpoint_is_a_problem(make_run):
    (problem,) = verdict_of(make_run(steps=8, saved=(4, 9))).problems
    assert "ends at step 7" in problem and "step 9" in problem
