import dataclasses

from tomat.base.report.svg import chart_svg
from tomat.perf.profile.breakdown import Roofs
from tomat.perf.profile.categories import Category
from tomat.report.step import COLOURS, step_charts


def test_the_share_bar_names_every_category_and_every_chart_has_a_file(step):
    charts = step_charts(step, "run")
    assert [chart.file for chart in charts] == ["run-shares.svg", "run-roofline.svg", "run-steps.svg"]
    drawn, shown = chart_svg(charts[0]), [row for row in step.categories if row.share > 0]
    assert len(shown) == 3 and all(f"{row.name} {100 * row.share:.1f} %" in drawn for row in shown)
    # A device without roofs has no roofline.
    cpu = dataclasses.replace(step, roofs=Roofs("cpu"), step_times_seconds=())
    assert [chart.file for chart in step_charts(cpu, "cpu")] == ["cpu-shares.svg"]


def test_a_category_has_a_colour_of_its_own():
    assert set(COLOURS) == set(Category) and len(set(COLOURS.values())) == len(COLOURS)
