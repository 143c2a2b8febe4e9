"""What every page is made of: text that stays text, data that stay the same, and nothing to load."""

import re

import numpy as np
import pytest
from html_reader import HtmlReader, read_page, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.base.report.formats import number
from tomat.base.report.model import Column, Facts, Report, Section, Table
from tomat.report.html import document
from tomat.report.html.document import (
    DENSITY_PROGRAMS,
    Figure,
    asset,
    facts_html,
    json_script,
    page_html,
    paragraph,
    table_html,
    typed,
    write_page,
)

FIGURE = Figure(
    "A <b>figure</b>", [{"type": "scatter", "y": typed(np.arange(3.0))}], {}, "It rises & ends.", 200, scales=True
)
HOSTILE = '</script><script>alert("x")</script> & <!-- \'"'


def page(*parts: str | Figure) -> Report:
    return Report(HOSTILE, (Section("", (HOSTILE,)), Section(HOSTILE, parts)), "run")


def test_a_page_stands_alone_and_escapes_what_it_is_given():
    written = page_html(page(FIGURE, paragraph("more")))
    reader = read_page(written)
    assert reader.text.count(HOSTILE) == 5  # title, heading, lead, contents, section
    assert reader.figures == [{"data": list(FIGURE.data), "layout": {}}]
    assert FIGURE.summary in reader.text
    assert len(re.findall(r"<script", written.partition("plotly.js v")[0])) == 3  # data, the page's own, plotly's


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=9), st.lists(st.text(max_size=20), max_size=3)))
def test_no_data_end_their_element(value):
    reader = HtmlReader(json_script("name", {"value": value, "end": HOSTILE}))
    assert reader.data == {"name": {"value": value, "end": HOSTILE}}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.uint8])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3)])
def test_an_array_is_the_same_bits_in_the_page(dtype, shape):
    values = np.random.default_rng(0).normal(100, 9, shape).astype(dtype)
    found = values_of(typed(values))
    assert found.dtype == values.dtype and found.tobytes() == values.tobytes() and found.shape == values.shape


def test_a_page_beyond_the_limit_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(TomatError, match="more than the"):
        write_page(tmp_path / "page.html", page("x" * 8_000_000))
    assert list(tmp_path.iterdir()) == []


def test_the_pages_own_programs_ask_for_no_address():
    for name in ("page.js", *DENSITY_PROGRAMS, "page.css"):
        assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import\(|@import|url\(|eval\(|innerHTML", asset(name))
    assert "prefers-color-scheme: dark" in asset("page.css") and ":focus-visible" in asset("page.css")


CELLS = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs", "Cc"])), CELLS), max_size=12))
def test_a_table_holds_its_text_and_sorts_by_the_values(rows):
    reader = HtmlReader(table_html(Table("All <of> it", [Column("name"), Column("value", number(2))], rows)))
    assert [row[0][0] for row in reader.tables[0]] == [name for name, _ in rows]
    keys = [row[1][1] for row in reader.tables[0]]
    assert [None if key is None else float(key) for key in keys] == [value for _, value in rows]
    assert reader.tags.count("button") == 2
    assert ("input" in reader.tags) == (len(rows) >= document.FILTER_FROM)
    assert "All <of> it" in reader.text


def test_a_long_table_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(document, "MOST_ROWS", 3)
    reader = HtmlReader(table_html(Table("Rows", [Column("n")], [(i,) for i in range(5)], ["sum"])))
    assert len(reader.tables[0]) == 3 and "The first 3 of 5 rows." in reader.text and "sum" in reader.text


def test_what_is_not_known_is_no_fact():
    assert HtmlReader(facts_html(Facts({"here": "<yes>", "missing": None, "empty": ""}))).text == "here<yes>"
    assert facts_html(Facts({"missing": None})) == ""
