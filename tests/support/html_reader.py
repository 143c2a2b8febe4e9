"""A page of `tomat page` as a program reads it: its elements, its data, and whether it would load anything."""

import base64
import html
import json
from html.parser import HTMLParser
from typing import Any

import numpy as np

VOID = {"meta", "input", "link", "img", "br", "hr"}
LOADS = ("src", "href", "srcset", "data", "action", "poster")
DTYPES = {"f4": "<f4", "f8": "<f8", "i4": "<i4", "u1": "<u1"}


class HtmlReader(HTMLParser):
    """What a page holds."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.data: dict[str, Any] = {}
        self.words: list[str] = []
        self.tables: list[list[list[tuple[str, str | None]]]] = []
        """Rows of the bodies of the tables: (text, sort key) of each cell."""
        self.feed(written)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        given, within = dict(attrs), self.is_in("tbody")
        self.tags.append(tag)
        self.open += [] if tag in VOID else [(tag, given)]
        self.ids += [str(value) for name, value in attrs if name == "id"]
        self.references += [value for name, value in attrs if name in LOADS and value is not None]
        assert not [name for name in given if name.startswith("on")], f"{tag} has a handler in its text"
        if tag == "tbody":
            self.tables.append([])
        elif tag == "tr" and within:
            self.tables[-1].append([])
        elif tag == "td" and within:
            self.tables[-1][-1].append(("", given.get("data-v")))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        tag, given = self.open[-1] if self.open else ("", {})
        if tag == "script" and given.get("type") == "application/json":
            self.data[str(given["id"])] = json.loads(data)
        elif tag not in ("", "script", "style"):
            self.words.append(data)
            if self.is_in("tbody") and self.is_in("td"):
                text, key = self.tables[-1][-1].pop()
                self.tables[-1][-1].append((text + data, key))

    def is_in(self, tag: str) -> bool:
        return any(name == tag for name, _ in self.open)

    @property
    def text(self) -> str:
        """What one reads."""
        return "".join(self.words)

    @property
    def figures(self) -> list[dict[str, Any]]:
        """plotly's figures in order."""
        return [value for name, value in self.data.items() if name.startswith("figure-")]


def read_page(written: str) -> HtmlReader:
    """The page, once it is known to be one that stands alone: well-formed, small, and without anything to load."""
    import plotly.graph_objects as go

    reader = HtmlReader(written)
    assert len(written.encode()) < 8_000_000
    assert [one for one in reader.references if not one.startswith("#")] == []
    assert not {"link", "iframe", "object", "embed", "base", "img"} & set(reader.tags)
    assert "default-src 'none'" in html.unescape(written.partition("</head>")[0])
    assert len(set(reader.ids)) == len(reader.ids)
    for figure in reader.figures:
        go.Figure(figure)  # plotly's own schema refuses a key or a value that it does not know
    return reader


def values_of(array: Any) -> np.ndarray:
    """An array of a figure, as plotly decodes it."""
    if isinstance(array, dict):
        found = np.frombuffer(base64.b64decode(array["bdata"]), DTYPES[array["dtype"]])
        return found.reshape([int(side) for side in array["shape"].split(",")]) if "shape" in array else found
    return np.array(array)
