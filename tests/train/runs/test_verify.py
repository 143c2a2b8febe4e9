"""Damage is found, and what a kill leaves behind is not called damage."""

import json
import tracemalloc

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_facts import flipped

from tomat.base.documents import with_checksum
from tomat.train.runs.checkpoints import list_checkpoints
from tomat.train.runs.record import read_record
from tomat.train.runs.verify import Verdict, verify_run


def verdict_of(run) -> Verdict:
    return verify_run(read_record(str(run)), list_checkpoints(str(run)))


def test_a_changed_file_is_damage_and_one_without_a_hash_is_named(make_run):
    run = make_run()
    evaluation = {"over_materials": {"nmae": 0.5}}
    (run / "evaluation.json").write_text(json.dumps(with_checksum(evaluation)))
    assert verdict_of(run) == Verdict("a", (), (), 2, 10)  # sound
    for name, old, new in (
        ("evaluation.json", "0.5", "0.6"),
        ("config.yaml", "num_train_steps: 20", "num_train_steps: 21"),
    ):
        text = (run / name).read_text()
        (run / name).write_text(text.replace(old, new))
        (problem,) = verdict_of(run).problems
        assert name in problem
        (run / name).write_text(text)
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    verdict = verdict_of(run)
    assert not verdict.problems and "evaluation.json was written without a hash" in verdict.notes[0]
    for name in ("codec.json", "promolecule.json"):
        (run / name).write_text("{}")
        assert name in verdict_of(run).problems[0]
        (run / name).unlink()


def test_a_save_cut_short_is_a_note_and_a_damaged_one_a_problem(make_run):
    run = make_run(saved=(4, 9), partial=(8,))
    verdict = verdict_of(run)
    assert verdict.problems == () and "step-8" in verdict.notes[0]
    for file in (run / "checkpoints" / "step-4" / "d").iterdir():
        file.unlink()
    (run / "checkpoints" / "step-9" / "metadata.json").write_text('{"step": 4, "time')
    (problem, damaged) = verdict_of(run).problems
    assert "step-4" in problem and "step-9" in damaged and "metadata.json is damaged" in damaged


def test_data_that_differ_from_their_checksum_are_a_problem_and_data_without_one_a_note(make_run):
    run = make_run(saved=(4, 9))
    data = flipped(run / "checkpoints" / "step-9" / "d")
    (run / "checkpoints" / "step-4" / "checksums.json").unlink()
    verdict = verify_run(read_record(str(run)), list_checkpoints(str(run), read_data=True))
    (problem,), (note,) = verdict.problems, verdict.notes
    assert "step-9" in problem and data.name in problem
    assert "step 4" in note and "not known" in note


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
    (run / "history.jsonl").write_text(json.dumps({"event": "fork", "step": min(kept), "parent": "b"}) + "\n")
    assert "begins at" not in " ".join(verdict_of(run).problems)
    (run / "history.jsonl").write_text("")


def test_a_cut_last_line_is_a_note_and_a_garbled_one_before_it_a_problem(make_run):
    run = make_run(saved=(4,), events=({"event": "start", "step": 0}, {"event": "stop", "step": 3}))
    path, history = run / "metrics.jsonl", run / "history.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], lines[-1][:9]]))
    assert verdict_of(run).problems == () and "cut short" in verdict_of(run).notes[0]
    path.write_text("\n".join([*lines[:5], "{", *lines[6:]]))
    history.write_text(history.read_text().replace('"start"', "7") + '{"event": "st')
    verdict = verdict_of(run)
    assert [text.partition(" is not")[0] for text in verdict.problems] == [
        "line 6 of metrics.jsonl", "line 1 of history.jsonl", "metrics.jsonl lacks step 5",
    ]  # fmt: skip
    assert "the last line of history.jsonl was cut short" in verdict.notes
    path.write_text("\n".join(lines[:4]))
    assert verdict_of(run).problems[-1] == "metrics.jsonl ends at step 3, before the newest checkpoint, step 4"


def test_a_step_of_a_trillion_costs_nothing(make_run):
    """Such a line is damage; one of a billion is a step, and its gap is counted without a list of it."""
    run = make_run()
    log = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(log.replace('"step": 5', '"step": 1000000000000'))
    tracemalloc.start()
    found = verdict_of(run).problems
    assert found == ("line 6 of metrics.jsonl is not JSON with a step from 0 to 10^9", "metrics.jsonl lacks step 5")
    (run / "metrics.jsonl").write_text(log.replace('"step": 9', '"step": 1000000000'))
    assert "lacks step 9, 10, 11, 12, 13 and 999,999,986 more" in verdict_of(run).problems[0]
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()
