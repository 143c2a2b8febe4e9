"""The page of a step: every operation is there, and the boxes of its charts add up to it."""

import json
import math
from dataclasses import asdict, replace

import pytest
from html_reader import read_page, values_of

from tomat.base.errors import TomatError
from tomat.base.report.svg import chart_svg
from tomat.perf.cost.chip_model import Support
from tomat.perf.cost.memory import read_memory
from tomat.perf.profile.breakdown import Roofs
from tomat.perf.profile.categories import Category
from tomat.report.html.document import page_html
from tomat.report.html.kinds import page_of
from tomat.report.html.step import breakdown_page, module_path
from tomat.report.step import COLOURS, roofline_chart, step_charts

SPAN = {"estimate": 5e-3, "low": 4e-3, "high": 6e-3}


def test_a_profile_has_every_operation_and_charts_of_the_whole_step(step):
    # Modules are the scopes of the model.
    assert [module_path(op) for op in step.ops[:3]] == [("Model", "scan(layer)", "Attention")] * 2 + [()]
    reader = read_page(page_html(breakdown_page(step, "profile")))
    operations = next(rows for rows in reader.tables if len(rows[0]) == 14)
    assert {(row[0][0], float(row[5][1])) for row in operations} == {(op.name, op.seconds) for op in step.ops}
    assert "<model>.py:1" in reader.text and "A <step>" in reader.text and "A note." in reader.text
    for kind in ("icicle", "treemap"):
        [trace] = [trace for figure in reader.figures for trace in figure["data"] if trace["type"] == kind]
        assert math.isclose(sum(trace["values"]), 1e3 * step.step_seconds)
        assert len(set(trace["ids"])) == len(trace["ids"]) and set(trace["parents"]) <= {"", *trace["ids"]}
        assert "1 short operations" in trace["labels"]
    [trace] = [trace for figure in reader.figures for trace in figure["data"] if trace.get("mode") == "markers"]
    assert [text.split(":")[0] for text in trace["hovertext"]] == ["fusion.1", "fusion.2"]
    assert trace["y"] == [2e9 / 3e-3, 2e9 / 1e-3]
    assert trace["x"][0] == 2000.0 and trace["x"][1] > trace["x"][0]  # that of no bytes at the right edge


def test_figures_that_lack_the_flops_of_a_kernel_say_at_least(step):
    step = replace(step, ops=tuple(replace(op, flops=op.flops or 0.0) for op in step.ops))
    assert "at least" not in read_page(page_html(breakdown_page(step, "profile"))).text
    # cuDNN's attention, as long as a tenth of what is beside it in its kind, and with it.
    known = next(op for op in step.ops if op.flops)
    seconds = known.seconds / 20
    attention = replace(known, name="cudnn", opcode="custom-call", flops=None, seconds=seconds)
    ops = [replace(op, seconds=op.seconds - seconds) if op is known else op for op in step.ops]
    found = replace(step, ops=(*ops, attention))
    assert [row.name for row in found.categories if row.flops_at_least] == [known.category]
    text = read_page(page_html(breakdown_page(found, "profile"))).text
    # Of the step; flops and share of the peak of its kind and of its module.
    assert text.count("at least") == 5 and "FLOP a step" in text


def test_a_plan_has_its_memory_over_the_schedule_and_the_buffers_at_the_peak(step, memory):
    support = Support("hbm", 3e-3, 0.6, 0.05, 40), Support("interconnect", 2e-3, 0.4, 0.5, 0)
    report = {
        "run_name": "<plan>", "memory": memory.to_dict(), "step_seconds": SPAN, "mfu_full": SPAN, "slice": "v6e-4",
        "rests_on": [asdict(one) for one in support],
        "models_seconds": {"matmul": {"compiler": 1e-3, "roofline": 2e-3, "schedule": 0.0, "estimate": 3e-3}},
    }  # fmt: skip
    reader = read_page(page_html(breakdown_page(step, "plan", report=report)))
    area = next(trace for figure in reader.figures for trace in figure["data"] if trace.get("name") == "in use")
    assert list(values_of(area["x"])) == [0.0, 50.0, 90.0] and list(values_of(area["y"])) == [1.0, 2.0, 1.0]
    assert "at most 2.000 GiB at 50 % of it" in reader.text and "1. fusion.9" in reader.text and "<plan>" in reader.text
    assert "on kernels without timings" in reader.text and "40.0 %: interconnect 40.0 %" in reader.text
    assert asdict(read_memory(report["memory"], "x")) == asdict(memory)


def test_an_older_plan_says_that_it_lacks_the_schedule_and_a_damaged_one_is_refused(step, memory):
    older = {key: value for key, value in memory.to_dict().items() if key != "timeline"}
    reader = read_page(page_html(breakdown_page(step, "plan", report={"run_name": "x", "memory": older})))
    assert "an earlier tomat made it" in reader.text
    with pytest.raises(TomatError, match="the memory of the plan x.json is damaged: timeline"):
        damaged = {"run_name": "x", "memory": older | {"timeline": [[0.0]]}}
        breakdown_page(step, "plan", report=damaged, origin="x.json")


def test_a_plan_that_does_not_fit_shows_what_fills_the_memory_and_what_was_tried(tmp_path, memory):
    memory = replace(memory, fits=False, required_bytes=5 * 2**30)
    trials = [{"words": "--sharding zero1", "required_bytes": 2**31, "fits": True, "error": ""}]
    report = {"program_key": "x", "run_name": "large", "breakdown": None, "memory": memory.to_dict()}
    report["nearest_fits"] = trials
    (tmp_path / "plan.json").write_text(json.dumps(report))
    page = page_of(str(tmp_path / "plan.json"))
    reader = read_page(page_html(page))
    assert "does not fit: 1 GiB too much" in reader.text and "1. fusion.9" in reader.text
    assert [cell for cell, _ in reader.tables[-1][0]] == ["--sharding zero1", "2.00 GiB", "fits"]
    assert page.figures["fits"] is False
    del report["nearest_fits"]  # of `--no_search`
    (tmp_path / "plan.json").write_text(json.dumps(report))
    assert "Nothing else was tried." in read_page(page_html(page_of(str(tmp_path / "plan.json")))).text


def test_the_share_bar_names_every_category_and_every_chart_has_a_file(step):
    charts = step_charts(step, "run")
    assert [chart.file for chart in charts] == ["run-shares.svg", "run-roofline.svg", "run-steps.svg"]
    drawn, shown = chart_svg(charts[0]), [row for row in step.categories if row.share > 0]
    assert len(shown) == 3 and all(f"{row.name} {100 * row.share:.1f} %" in drawn for row in shown)
    # A device without roofs has no roofline.
    cpu = replace(step, roofs=Roofs("cpu"), step_times_seconds=())
    assert [chart.file for chart in step_charts(cpu, "cpu")] == ["cpu-shares.svg"]
    assert set(COLOURS) == set(Category) and len(set(COLOURS.values())) == len(COLOURS)


def test_int8_products_have_a_roof_of_their_own(step):
    """On the bf16 roof they would stand above it."""
    roofs = Roofs.of_device_kind("TPU v6 lite")
    first, *others = step.ops
    fast = replace(first, flops=1.5 * 918e12 * first.seconds, hbm_bytes=1e3, operands="int8")
    chart = roofline_chart(replace(step, roofs=roofs, ops=(fast, *others)))
    assert chart is not None
    lines = {series.name: max(series.y) for series in chart.series if series.mark == "line"}
    assert lines == {"roofs": 918e12, "int8 products": 1836e12}
