import math

from html_reader import HtmlReader
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.report.formats import number, share
from tomat.base.report.model import Column, Facts, Table
from tomat.report.html import elements
from tomat.report.html.elements import facts_html, table_html

CELLS = st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs", "Cc"])), CELLS), max_size=12))
def test_a_table_holds_its_text_and_sorts_by_the_values(rows):
    reader = HtmlReader(table_html(Table("All <of> it", [Column("name"), Column("value", number(2))], rows)))
    assert [row[0][0] for row in reader.tables[0]] == [name for name, _ in rows]
    for (_, value), row in zip(rows, reader.tables[0], strict=True):
        key = row[1][1]
        assert (key is None) == (value is None)
        assert value is None or float(key) == value
    assert reader.tags.count("button") == 2
    assert ("input" in reader.tags) == (len(rows) >= elements.FILTER_FROM)
    assert "All <of> it" in reader.text


def test_a_long_table_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(elements, "MOST_ROWS", 3)
    reader = HtmlReader(table_html(Table("Rows", [Column("n")], [(i,) for i in range(5)], ["sum"])))
    assert len(reader.tables[0]) == 3
    assert "The first 3 of 5 rows." in reader.text and "sum" in reader.text


def test_numbers_are_written_as_asked():
    assert number(1, 1e3, " ms")(0.0123) == "12.3 ms"
    assert share(0.5) == "50.00 %"
    assert number()(math.inf) == "inf"


def test_what_is_not_known_is_no_fact():
    reader = HtmlReader(facts_html(Facts({"here": "<yes>", "missing": None, "empty": ""})))
    assert reader.text == "here<yes>"
    assert facts_html(Facts({"missing": None})) == ""
