"""What every page is made of: text that stays text, data that stay the same, and nothing to load."""

import re

import numpy as np
import pytest
from html_reader import HtmlReader, read_page, values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tomat.base.errors import TomatError
from tomat.base.report.model import Report, Section
from tomat.report.html.document import (
    DENSITY_PROGRAMS,
    Figure,
    json_script,
    page_html,
    paragraph,
    typed,
    write_page,
)
from tomat.report.html.elements import asset

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
@given(st.dictionaries(st.text(max_size=9), st.lists(st.text(max_size=20) | st.integers(-(2**53), 2**53), max_size=3)))
def test_no_data_end_their_element(value):
    reader = HtmlReader(json_script("name", {"value": value, "end": HOSTILE}))
    assert reader.data == {"name": {"value": value, "end": HOSTILE}}


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([np.float32, np.float64, np.int32, np.uint8]).flatmap(
        lambda dtype: arrays(dtype, st.sampled_from([(0,), (3,), (2, 3)]))
    )
)
def test_an_array_is_the_same_bits_in_the_page(values):
    found = values_of(typed(values))
    assert found.dtype == values.dtype and found.tobytes() == values.tobytes() and found.shape == values.shape


def test_a_page_beyond_the_limit_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(TomatError, match="more than the"):
        write_page(tmp_path / "page.html", page("x" * 8_000_000))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TomatError, match="cannot be written"):
        (tmp_path / "file").write_text("")
        write_page(tmp_path / "file" / "page.html", page())


def test_the_pages_own_programs_ask_for_no_address_and_no_mouse():
    for name in ("page.js", *DENSITY_PROGRAMS, "page.css"):
        assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import\(|@import|url\(|eval\(|innerHTML", asset(name))
    assert "prefers-color-scheme: dark" in asset("page.css") and ":focus-visible" in asset("page.css")
