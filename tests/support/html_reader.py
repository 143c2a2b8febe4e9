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
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.data: dict[str, Any] = {}
        self.words: list[str] = []
        self.tables: list[list[list[tuple[str, str | None]]]] = []
        """Rows of the bodies of the tables: (text, sort key) of each cell."""
        self._script: str | None = None
        self._cell: list[str] | None = None
        self.feed(written)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in given:
            self.ids.append(str(given["id"]))
        self.references += [value for name, value in attrs if name in LOADS and value is not None]
        assert not [name for name in given if name.startswith("on")], f"{tag} has a handler in its text"
        if tag == "script" and given.get("type") == "application/json":
            self._script = str(given["id"])
        if tag == "tbody":
            self.tables.append([])
        if tag == "tr" and "tbody" in self.open:
            self.tables[-1].append([])
        if tag == "td" and "tbody" in self.open:
            self._cell = []
            self.tables[-1][-1].append(("", given.get("data-v")))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()
        if tag == "script":
            self._script = None
        if tag == "td" and self._cell is not None:
            self.tables[-1][-1][-1] = ("".join(self._cell), self.tables[-1][-1][-1][1])
            self._cell = None

    def handle_data(self, data):
        if self._script is not None:
            self.data[self._script] = json.loads(data)
        elif self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)
            if self._cell is not None:
                self._cell.append(data)

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
