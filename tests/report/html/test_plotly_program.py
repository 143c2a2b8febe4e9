"""plotly without the kinds that a page has none of: what is left runs, and knows the kinds that the page has."""

import json
import re

import pytest
from html_reader import read_page
from markupsafe import Markup
from py_mini_racer import MiniRacer

from tomat.base.report.model import Report, Section
from tomat.report.html import plotly_program as module
from tomat.report.html.document import DENSITY_KINDS, Figure, asset, page_html
from tomat.report.html.plotly_program import plotly_program, whole_program

BROWSER = """
var any = new Proxy(function () {}, {
  get: (target, key) => key === Symbol.toPrimitive ? () => ""
    : key === Symbol.iterator ? undefined : key === "length" ? 0 : any,
  apply: () => any, construct: () => any, set: () => true, has: () => true,
});
var window = globalThis, self = globalThis, document = any, location = {href: ""};
var navigator = {userAgent: "", platform: "", language: "en"}, performance = {now: () => 0};
var DOMParser = any, Element = any, HTMLElement = any, CSSStyleDeclaration = any;
var setTimeout = () => 0, clearTimeout = () => 0, requestAnimationFrame = () => 0;
"""
"""As much of a browser as plotly asks for while it is read: things of which every part is such a thing."""
STEP_KINDS = {"bar", "histogram", "icicle", "scatter", "treemap"}


def kinds_of(program: str) -> set[str]:
    """The kinds of traces that a program knows, once V8 has run it."""
    with MiniRacer() as context:
        context.eval(BROWSER)
        context.eval(program)
        return set(json.loads(context.eval("JSON.stringify(Object.keys(Plotly.PlotSchema.get().traces))")))


@pytest.mark.parametrize("kinds", [STEP_KINDS, set(DENSITY_KINDS)], ids=["step", "density"])
def test_what_is_left_of_plotly_runs_and_knows_the_kinds_that_were_asked_for(kinds):
    program = plotly_program(frozenset(kinds))
    assert kinds_of(program) == kinds | {"scatter"}
    assert "Licensed under the MIT license" in program[:200]
    # What makes the first figure of a plan come in 0.3 s, not 0.6 s; of a plotly built otherwise all is kept.
    assert len(program) < 0.4 * len(whole_program())


def test_plotly_stays_whole_where_a_kind_or_the_list_of_kinds_is_not_found(monkeypatch):
    assert plotly_program(frozenset({"bar", "no such kind"})) == whole_program()
    for other in ("var Plotly={}", whole_program().replace(".register([", ".enter([")):
        monkeypatch.setattr(module, "whole_program", lambda other=other: other)
        assert plotly_program.__wrapped__(frozenset({"bar"})) == other


def test_a_page_has_the_kinds_of_its_figures_and_densities():
    drawn = set(re.findall(r'{type: "(\w+)"|push\(\{type: "(\w+)"', asset("density.js")))
    assert {one or other for one, other in drawn} == {"scatter", *DENSITY_KINDS}
    figure = Figure("boxes", [{"type": "treemap"}, {"y": [1]}], {}, "Boxes.", 200)
    written = page_html(Report("x", (Section("x", (figure, Markup('<div data-density="x"></div>'))),)))
    assert read_page(written).figures and plotly_program(frozenset({"treemap", "scatter", *DENSITY_KINDS})) in written
