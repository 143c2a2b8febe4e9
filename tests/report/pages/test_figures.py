import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tomat.perf.profile.breakdown import Roofs
from tomat.perf.profile.categories import Category
from tomat.perf.profile.hlo_files import load_program
from tomat.perf.profile.program_breakdown import breakdown_from_program
from tomat.report.pages.figures import COLOURS, draw_figures

PROGRAM = Path(__file__).parents[2] / "fixtures" / "profiles" / "v6e_step.hlo.pb.gz"


@pytest.fixture(scope="module")
def breakdown():
    compiled = breakdown_from_program(load_program(PROGRAM), device_kind="TPU v6 lite")
    return dataclasses.replace(compiled, step_times_seconds=(0.001, 0.0012, 0.0011))


@pytest.fixture(scope="module")
def drawn(breakdown, tmp_path_factory):
    return draw_figures(breakdown, tmp_path_factory.mktemp("drawn"), "run")


def test_figures_are_svg_and_the_same_bytes_every_time(breakdown, drawn, tmp_path):
    second = draw_figures(breakdown, tmp_path, "run")
    assert [p.name for _, p in drawn] == ["run-shares.svg", "run-roofline.svg", "run-steps.svg"]
    for (_, a), (_, b) in zip(drawn, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
        assert ElementTree.fromstring(a.read_text()).tag.endswith("svg")
        assert "<dc:date>" not in a.read_text()


def test_the_share_bar_names_every_category(breakdown, drawn):
    (_, path), *_ = drawn
    text = path.read_text()
    for row in breakdown.categories:
        if row.share > 0:
            assert f"{row.name} {100 * row.share:.1f} %" in text


def test_a_category_has_a_colour_of_its_own():
    assert set(COLOURS) == set(Category) and len(set(COLOURS.values())) == len(COLOURS)


def test_a_device_without_roofs_has_no_roofline(breakdown, tmp_path):
    cpu = dataclasses.replace(breakdown, roofs=Roofs("cpu"), step_times_seconds=())
    assert [p.name for _, p in draw_figures(cpu, tmp_path, "cpu")] == ["cpu-shares.svg"]
