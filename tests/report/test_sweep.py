"""Pages of the sweeps on record: every row is there, and those that were planned and measured are beside each other."""

import json
from pathlib import Path

import pytest
from html_reader import read_page

from tomat.measure.lab.record import LabRow, Window
from tomat.report.html.document import page_html
from tomat.report.html.kinds import page_of
from tomat.report.pages.sweep_pages import write_lab_page, write_sweep_page

TRACKING = Path(__file__).parents[2] / "docs" / "tracking"


@pytest.mark.parametrize("place", ["lab/lab-demo.json", "sweeps/mfu-200m.json"])
def test_a_record_is_a_table_and_a_figure_of_its_rows(place):
    record = json.loads((TRACKING / place).read_text())
    page = page_of(str(TRACKING / place))
    reader = read_page(page_html(page))
    assert "Verdict" not in reader.text  # a section that has only what people write
    ranking = next(rows for rows in reader.tables if len(rows) == len(record["rows"]))
    assert sorted(row[1][0] for row in ranking) == sorted(row["name"] for row in record["rows"])
    assert record["title"] in reader.text
    [trace] = [one for figure in reader.figures for one in figure["data"] if one["name"] == "rows"]
    names = [text.split(": ")[0] for text in trace["hovertext"]]
    points = dict(zip(names, zip(trace["x"], trace["y"], strict=True), strict=True))
    measured = place.startswith("lab")
    for row in record["rows"]:
        name = row["name"]
        if name in points:
            memory = row["peak_memory_bytes" if measured else "hbm_required_bytes"] / 2**20
            speed = row["tokens_per_second_median"] if measured else 100 * row["mfu_full"]["estimate"]
            assert points[name] == (memory, speed)
    assert set(page.figures["front"]) <= set(points)
    if not measured:  # what is drawn of categories stands in a table too, those below 1 % included
        taken = {float(key) for rows in reader.tables for row in rows for _, key in row if key}
        assert taken >= {group["seconds"] for row in record["rows"] for group in row["categories"]}


def test_rows_of_both_records_are_compared(tmp_path):
    for folder in ("lab", "sweeps"):
        (tmp_path / folder).mkdir()
    plans = json.loads((TRACKING / "sweeps" / "mfu-200m.json").read_text())
    plan = plans["rows"][0]
    plan["name"] = "<b>bold</b>"
    (tmp_path / "sweeps" / "mfu-200m.json").write_text(json.dumps(plans))
    settings = {key: plan[key] for key in ("name", "config_file", "overrides")}
    row = LabRow(**settings, key="key", base=None, status="measured")
    row.windows = [Window(0, 0.7, 1e6)]
    start = {"compile_seconds": 1.0, "compile_saved_seconds": 0.0, "compiled_programs": 1}
    row.starts = [start | {"peak_memory_bytes": 2**30}]
    record = {"record_format": 1, "sweep": "mfu-200m", "title": "Both", "introduction": "", "measured_with": {}}
    record["rows"] = [row.to_dict()]
    (tmp_path / "lab" / "mfu-200m.json").write_text(json.dumps(record))
    for place in ("lab", "sweeps"):
        reader = read_page(page_html(page_of(str(tmp_path / place / "mfu-200m.json"))))
        both = next(rows for rows in reader.tables if rows and len(rows[0]) == 7)
        planned = plan["step_seconds"]["estimate"]
        traces = [trace for figure in reader.figures for trace in figure["data"]]
        [named] = [one["hovertext"] for one in traces if one["name"] == "rows" and one["mode"] == "markers"]
        assert named[0].startswith("&lt;b&gt;bold&lt;/b&gt;: ") and "<b>bold</b>" in reader.text
        assert [float(key) for _, key in both[0][2:5]] == [planned, 0.7, 0.7 / planned]


@pytest.mark.parametrize("first", ["lab", "sweeps"])
def test_a_sweep_that_is_planned_and_measured_has_a_page_of_each(tmp_path, first):
    """One page of both had the ranking and the figure of the later one, below a heading of the other."""
    pages = {}
    for kind, name in sorted({"lab": "lab-demo", "sweeps": "mfu-200m"}.items(), key=lambda each: each[0] != first):
        record = json.loads((TRACKING / kind / f"{name}.json").read_text()) | {"sweep": "both"}
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "both.json").write_text(json.dumps(record))
        for _ in range(2):
            pages[kind] = (write_lab_page if kind == "lab" else write_sweep_page)(record, tmp_path)
    assert pages[first].name == "both.md" and pages["lab"] != pages["sweeps"]
    planned, measured = (pages[kind].read_text() for kind in ("sweeps", "lab"))
    assert f"![MFU full, % against memory](figures/{pages['sweeps'].stem}-pareto.svg)" in planned
    assert f"![tokens a second against memory](figures/{pages['lab'].stem}-pareto.svg)" in measured
    assert f"]({pages['sweeps'].name})" in (tmp_path / "index.md").read_text()
