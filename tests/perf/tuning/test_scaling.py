"""The scaling of lines over slices, of rows whose figures are made up: seconds, shares and errors are chosen here."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tomat.base.errors import TomatError
from tomat.base.reporting import to_jsonable
from tomat.perf.tuning.scaling import contests, crossings, lines_of, scaling_record
from tomat.perf.tuning.sweep import record_path, run_sweep
from tomat.perf.tuning.sweep_config import SweepConfig, SweepRow, load_sweep
from tomat.perf.tuning.sweep_rows import FAILED, FITS, OOM, RowRecord
from tomat.report.pages.sweep_pages import write_sweep_page

TOKENS = 8192


def row(
    name: str, lines: str | list[str], n_chips: int, seconds: float | None = 1.0, share: float | None = 0.0,
    batch: int | None = None, error: float = 0.1, status: Any = None,
) -> RowRecord:  # fmt: skip
    """A row of a step of `seconds` with `share` of it in exposed collectives; without `seconds` it does not fit.

    `share` None: no collectives occur. `batch` None: 8 sequences a chip. `error`: of the intervals, a fraction.
    """
    batch = batch or 8 * n_chips
    known = RowRecord(
        name=name, explain="", base=None, overrides={}, config_file="train.yaml", config_hash=None, model="1b",
        batch_sequences=batch, sequence_tokens=TOKENS, slice=f"v6e-{n_chips}", n_chips=n_chips,
        status=status or (FITS if seconds else OOM), lines=[lines] if isinstance(lines, str) else lines,
        hbm_required_bytes=20 << 30, hbm_capacity_bytes=31 << 30,
    )  # fmt: skip
    if seconds is None:
        return known
    shares = {"matmul": 1 - (share or 0)} | ({} if share is None else {"collectives, exposed": share})
    rates = {
        "step_seconds": seconds,
        "mfu_full": 0.5 / seconds * batch / (8 * n_chips),
        "tokens_per_second_per_chip": batch * TOKENS / n_chips / seconds,
    }
    spans = {key: {"estimate": x, "low": x / (1 + error), "high": x * (1 + error)} for key, x in rates.items()}
    groups = [{"name": name, "seconds": seconds * part, "share": part} for name, part in shares.items()]
    categories = [group | {"hidden_seconds": 0.0, "flops_fraction": None} for group in groups]
    return dataclasses.replace(known, categories=categories, **spans)


def test_a_line_crosses_where_its_exposed_collectives_pass_the_limit():
    rising = [row("c", "a", 128, share=0.2), row("a", "a", 8, share=0.04), row("b", "a", 64, share=0.11)]
    falling = [*rising[1:], row("c", "a", 128, share=0.1), row("d", "a", 256, share=0.05)]
    low = [rising[1], row("b", "a", 64, share=0.1), row("c", "a", 256, share=None)]
    said = [
        ([64, 128], rising, "pass 10 % of the step first at 64 chips (11.0 %)."),
        ([64], falling, "first at 64 chips (11.0 %), and are below it again at 128 and 256 chips."),
        ([], low, "at none of 8, 64 and 256 chips; the most is 10.0 %, at 64."),
    ]
    for above, rows, words in said:
        (found,) = crossings(rows)
        assert found.above == above and words in found.sentence


def test_points_without_a_step_time_are_said_and_not_taken_for_free_communication():
    lost = [row("a", "a", 8, None), row("c", "a", 32, None, status=FAILED)]
    (found,) = crossings([*lost, row("b", "a", 16, share=0.3)])
    assert found.above == [16] and found.without == {8: OOM, 32: FAILED}
    assert "nothing is known of its collectives. Without" in crossings(lost)[0].sentence


@pytest.mark.parametrize(
    ("quick", "lead", "words"),
    [
        # 25 % more; the wider interval is that of the slower row, 1.1 - 1 / 1.1 of its own rate: 19 %
        ({"error": 0.01}, 0.25, "`zero1` is the fastest, 25.0 % more tokens/s than `fsdp`, beyond the interval"),
        ({"error": 0.2}, 0.25, "within the interval"),
        ({"error": 0.0}, 0.25, "with an error that is not known"),
        ({"seconds": 1.245}, 0.004, "`zero1` is as fast as `fsdp` (0.4 % more"),
    ],
)
def test_the_fastest_line_and_its_lead_stand_against_the_interval(quick, lead, words):
    # Of three, the next and not the last.
    rows = [row("last", "c", 64, 2.0), row("slow", "fsdp", 64, 1.25), row("quick", "zero1", 64, **quick)]
    # What does not fit takes no part and is named.
    (found,) = contests([row("a", "large", 64, None), *rows])
    assert found.lead == pytest.approx(lead, abs=1e-3) and words in found.sentence
    assert found.sentence.startswith("64 chips, 512 sequences of 8,192: ") and "`large` does not fit" in found.sentence
    (alone,) = contests([row("a", "zero1", 8, None), row("b", "fsdp", 8)])
    assert "only line with a step time" in alone.sentence and alone.lead is alone.against_interval is None


def test_only_the_same_chips_and_batch_are_compared_and_a_row_of_two_lines_once():
    both = row("both", ["8 a chip", "256 in all"], 32)
    rows = [both, row("x", "8 a chip", 64), row("y", "256 in all", 64, batch=256), row("z", "fsdp", 32, 2.0)]
    rows += [row("without a line", [], 32, 0.1)]
    assert list(lines_of(rows)) == ["8 a chip", "256 in all", "fsdp"]
    assert lines_of(rows)["256 in all"] == [both, rows[2]]
    assert [(one.n_chips, one.batch_sequences) for one in contests(rows)] == [(32, 256), (64, 256), (64, 512)]
    assert "`8 a chip` = `256 in all` is the fastest, 100.0 % more" in contests(rows)[0].sentence


def test_the_record_has_the_figures_of_the_section():
    rows = [row("a", "zero1", 8, 2.0, 0.05), row("b", "zero1", 16, 2.5, 0.3), row("c", "fsdp", 8, None)]
    record = to_jsonable(scaling_record(rows))
    zero1, fsdp = record["lines"]
    assert (zero1["line"], zero1["collectives_pass_at_chips"], fsdp["collectives_pass_at_chips"]) == ("zero1", 16, None)
    second = zero1["points"][1]
    assert second["tokens_per_second"]["estimate"] == pytest.approx(128 * TOKENS / 2.5)
    assert second["exposed_collectives_seconds"] == pytest.approx(0.75)
    assert (second["sequences_per_chip"], second["exposed_collectives_share"]) == (8.0, 0.3)
    assert fsdp["points"][0]["status"] == OOM and fsdp["points"][0]["exposed_collectives_share"] is None
    fastest = [tuple(one[key] for key in ("n_chips", "row", "next_row", "lead")) for one in record["fastest"]]
    assert fastest == [(8, "a", None, None), (16, "b", None, None)]


def test_a_page_of_lines_has_the_section_once_and_one_without_has_it_not(tmp_path):
    known = {"sweep": "s", "title": "S", "introduction": "", "n_rows": 2, "n_fitting": 2}
    for lines in (["zero1"], ["zero1"], []):
        rows = [row("a", lines, 8).to_dict(), row("b", lines, 16).to_dict()]
        text = write_sweep_page(to_jsonable({**known, "rows": rows}), tmp_path).read_text()
        assert text.count("## Scaling") == text.count("\n| zero1 | ") / 2 == len(lines)


SWEEP = """
name: s
config_path: train.yaml
rows:
  - {name: mine, line: own, overrides: {slice: v6e-8}}
grid:
  sharding:
    - {name: zero1, line: zero1, overrides: {sharding: zero1}}
    - {name: whole, line: whole, overrides: {sharding: replicated}}
  size:
    - {name: small, line: 8 a chip, overrides: {slice: v6e-8}}
    - {name: large, line: [8 a chip, 256 in all], overrides: {slice: v6e-32}}
    - {name: aside, overrides: {slice: v6e-64}}
"""


@pytest.fixture
def sweep_file(tmp_path) -> Path:
    (tmp_path / "train.yaml").write_text("{slice: v6e-16}")
    (tmp_path / "s.yaml").write_text(SWEEP)
    return tmp_path / "s.yaml"


def test_lines_of_rows_and_of_grid_values_are_read(sweep_file):
    lines = {one.name: one.lines for one in load_sweep(sweep_file).rows}
    assert lines["mine"] == ("own",)
    assert lines["zero1, small"] == ("zero1, 8 a chip",)
    assert lines["whole, large"] == ("whole, 8 a chip", "whole, 256 in all")
    assert lines["zero1, aside"] == ("zero1",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("line: own", "line: 3"), "mine.* line is 3; expected"),
        (("line: own", "line: [a, a]"), "mine.* line is .* expected"),
        (("line: own", "line: 'a|b'"), "mine.* line is .* expected"),
        (("line: own", "line: 'zero1, 8 a chip'"), "rows 'mine' and 'zero1, small' are both the point .* at 8 chips"),
        # other slices of as many chips, and a configuration's own
        (("line: own, overrides: {slice: v6e-8}", "line: 'zero1, 8 a chip', overrides: {slice: v5e-8}"), "at 8 chips"),
        (("name: aside, overrides: {slice: v6e-64}", "name: aside, overrides: {}, lines: x"), "with line: ..."),
        (("name: mine", "name: mine, lines: x"), "unknown key 'lines'"),
    ],
)
def test_a_wrong_line_is_refused_with_the_reason(sweep_file, change, message):
    assert change[0] in SWEEP
    sweep_file.write_text(SWEEP.replace(*change))
    with pytest.raises(TomatError, match=message):
        load_sweep(sweep_file)


def test_a_record_follows_the_lines_of_the_file_and_not_another_slice(tmp_path, monkeypatch):
    """With `--row`, the other rows are those on record: their lines are the file's, their slice must be."""

    def refused(config, slice_, on_stage):
        raise TomatError("no plan here")

    monkeypatch.setattr("tomat.perf.plan.plan.make_plan", refused)

    def sweep(slice_: str, lines: tuple[str, ...]) -> SweepConfig:
        train = tmp_path / "train.yaml"
        rows = (SweepRow("a", train, {}, slice_, None, lines=lines), SweepRow("b", train, {}, "v6e-16", None))
        return SweepConfig("s", rows)

    (tmp_path / "train.yaml").write_text(
        json.dumps({"data": {"source": "embedded", "layout": "v3-p7"}, "preset": "demo"})
    )
    record = run_sweep(sweep("v6e-8", ("x",)), tmp_path)
    assert [one.get("lines") for one in record["rows"]] == [["x"], None]
    assert record["scaling"]["lines"][0]["points"][0]["n_chips"] == 8
    again = run_sweep(sweep("v6e-8", ("y",)), tmp_path, only=["b"])
    assert [line["line"] for line in again["scaling"]["lines"]] == ["y"]
    moved = run_sweep(sweep("v6e-32", ("y",)), tmp_path, only=["b"])
    assert [one["name"] for one in moved["rows"]] == ["b"] and "scaling" not in moved
    assert json.loads(record_path(tmp_path, "s").read_text()) == moved
