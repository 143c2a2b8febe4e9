"""Runs beside each other: what differs, what may be compared, and over which steps."""

import json

import numpy as np
import pytest
import yaml
from fitted_codec import fitted_codec

from tomat.base.errors import TomatError
from tomat.data.codec.files import write_codec
from tomat.train.runs.compare import WINDOWS, _not_comparable, compare_runs
from tomat.train.runs.record import RunRecord


def change(run, **values):
    path = run / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))


def test_settings_that_differ_and_losses_over_common_steps(make_run):
    a, b = make_run("a", steps=45), make_run("b", steps=30)
    change(b, optimizer={"learning_rate": 0.5})
    found = compare_runs([str(a), str(b)])
    assert found.settings == {"optimizer.learning_rate": (None, 0.5)}
    assert found.common_steps == tuple(range(30)) and not found.not_comparable
    assert [window[:2] for window in found.windows] == [(n, n + 1) for n in range(0, 30, 2)] and WINDOWS >= 15
    for first, _, losses in found.windows:
        assert losses == pytest.approx((4.0 - (first + 0.5) / 10,) * 2)
    assert found.to_dict()["losses_comparable"]
    later = [json.loads(line) | {"step": number + 50} for number, line in enumerate((b / "metrics.jsonl").open())]
    (b / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in later))
    found = compare_runs([str(a), str(b)])
    assert found.common_steps == () and found.windows == ()


def test_losses_of_other_vocabularies_losses_or_data_are_not_compared(make_run):
    def data(content: str) -> tuple[dict, ...]:
        return ({"event": "data", "step": 0, "train": content, "validation": None},)

    a, b = make_run("a", events=data("1" * 64)), make_run("b", events=data("2" * 64))
    density = np.random.default_rng(0).lognormal(size=4000)
    for run, bins in ((a, 16), (b, 32)):
        write_codec(fitted_codec(bins, density), run / "codec.json")
        change(
            run, data={"n_density_tokens": bins}, loss={"kind": "emd" if bins == 16 else "crps", "kernel": str(bins)}
        )
    vocabulary, kind, training = compare_runs([str(a), str(b)]).not_comparable
    assert "vocabularies differ" in vocabulary and "16, 32 density ids" in vocabulary
    assert kind == "loss.kind differs: emd, crps" and training.startswith("their training data differ")


def test_losses_of_other_voxels_or_with_a_teacher_are_not_compared(make_run):
    a, b = make_run("a"), make_run("b")
    change(a, density_dropout=0.0)
    assert not compare_runs([str(a), str(b)]).not_comparable  # `b` is of before there was such a key
    change(b, density_dropout=0.25, data={"seq_len": 64}, distillation={"teacher": "t"})
    seq_len, dropout, teacher = compare_runs([str(a), str(b)]).not_comparable
    assert seq_len == "data.seq_len differs: None, 64" and dropout == "density_dropout differs: 0.0, 0.25"
    assert teacher == "distillation.teacher differs: None, t"


def test_validation_losses_over_other_sequences_are_not_compared(make_run):
    runs = [make_run(name) for name in "abc"]
    for run, count in zip(runs, (64.0, 64.0, 1280.0), strict=True):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 10, "eval/validation/loss": 3.0, "eval/validation/sequences": count}) + "\n")
    assert not compare_runs([str(run) for run in runs[:2]]).not_comparable
    [reason] = compare_runs([str(run) for run in runs]).not_comparable
    assert "64, 64, 1,280" in reason


def test_what_is_no_run_is_refused(make_run, tmp_path):
    a = str(make_run("a"))
    with pytest.raises(TomatError, match="nothing/config.yaml does not exist"):
        compare_runs([a, str(tmp_path / "nothing")])
    for runs in ([a], [a, a + "/"]):
        with pytest.raises(TomatError, match="runs? (is|are) named; expected 2 to"):
            compare_runs(runs)


def test_data_of_which_nothing_is_recorded_are_not_said_to_be_the_same(tmp_path):
    records = [RunRecord(str(tmp_path / name), {}, [], (), [], None) for name in ("a", "b")]
    [reason] = _not_comparable(records, {"data.train": ("gs://b/x", "gs://b/y")})
    assert "not recorded, and data.train differs" in reason
    assert _not_comparable(records, {"optimizer.learning_rate": (1, 2)}) == ()
