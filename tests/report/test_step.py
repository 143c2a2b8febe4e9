import dataclasses
from pathlib import Path

import pytest

from tomat.base.report.svg import chart_svg
from tomat.perf.profile.breakdown import Roofs
from tomat.perf.profile.categories import Category
from tomat.perf.profile.hlo_files import load_program
from tomat.perf.profile.program_breakdown import breakdown_from_program
from tomat.report.step import COLOURS, step_charts

PROGRAM = Path(__file__).parents[1] / "fixtures" / "profiles" / "v6e_step.hlo.pb.gz"


@pytest.fixture(scope="module")
def breakdown():
    compiled = breakdown_from_program(load_program(PROGRAM), device_kind="TPU v6 lite")
    return dataclasses.replace(compiled, step_times_seconds=(0.001, 0.0012, 0.0011))


def test_the_share_bar_names_every_category_and_every_chart_has_a_file(breakdown):
    charts = step_charts(breakdown, "run")
    assert [chart.file for chart in charts] == ["run-shares.svg", "run-roofline.svg", "run-steps.svg"]
    drawn = chart_svg(charts[0])
    for row in breakdown.categories:
        if row.share > 0:
            assert f"{row.name} {100 * row.share:.1f} %" in drawn


def test_a_category_has_a_colour_of_its_own():
    assert set(COLOURS) == set(Category) and len(set(COLOURS.values())) == len(COLOURS)


def test_a_device_without_roofs_has_no_roofline(breakdown):
    cpu = dataclasses.replace(breakdown, roofs=Roofs("cpu"), step_times_seconds=())
    assert [chart.file for chart in step_charts(cpu, "cpu")] == ["cpu-shares.svg"]
