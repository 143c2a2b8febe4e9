"""A log that grows, is cut and goes on: every look says what reading it from the beginning would."""

import json

from tomat.report.dashboard.live import LiveLog, drawn_curves
from tomat.report.html.metrics import read_curves


def lines(first: int, last: int, shift: float = 0.0) -> str:
    return "".join(json.dumps({"step": n, "train/loss": n % 7 + shift}) + "\n" for n in range(first, last))


def test_a_log_is_followed_through_everything_that_a_run_does_to_it(tmp_path):
    log, path = LiveLog(str(tmp_path)), tmp_path / "metrics.jsonl"
    first, found = log.read()
    assert not found.curves and found.written_utc is None
    versions = {first}
    for text in (
        lines(0, 50),
        lines(0, 90),
        lines(0, 60),  # a resume cuts
        lines(0, 60) + lines(60, 200, 0.5),  # and goes on with other losses
        lines(0, 300, 0.25),  # longer, and another from the first line
        "",
    ):
        path.write_text(text)
        version, found = log.read()
        versions.add(version)
        from_start = read_curves(str(tmp_path))
        assert drawn_curves(found) == drawn_curves(from_start) and found.steps_done == from_start.steps_done
    assert len(versions) == 7
    path.unlink()
    assert not log.read()[1].curves


def test_a_line_that_is_not_whole_waits_and_only_what_is_new_is_read(tmp_path, monkeypatch):
    log, path = LiveLog(str(tmp_path)), tmp_path / "metrics.jsonl"
    whole, half = lines(0, 10), lines(10, 11)
    path.write_text(whole + half[:9])
    assert log.read()[1].steps_done == 10
    fed, feed = [], log._reader.feed
    monkeypatch.setattr(log._reader, "feed", lambda line: fed.append(line) or feed(line))
    path.write_text(whole + half + "damage\n")
    found = log.read()[1]
    assert (found.steps_done, found.unreadable, len(fed)) == (11, 1, 2)
