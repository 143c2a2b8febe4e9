"""One HTML file that needs nothing else: text, tables, figures, plotly's program and the data, in one document.

The page forbids itself the network by a content security policy, so that nothing in it can load anything, whatever
plotly holds. Figures are drawn as they come into view, in the colours of the page, light or dark.
"""

from __future__ import annotations

import base64
import html
import importlib.resources
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tomat import __version__
from tomat.base.errors import TomatError
from tomat.base.reporting import readable_bytes, to_jsonable, write_text
from tomat.report.html.plotly_program import ALWAYS, plotly_program

MOST_BYTES = 8_000_000
"""Of a page. plotly's program is 1.0 to 1.7 MB of it."""

POLICY = "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; img-src data: blob:"
"""What the page may load: what stands in it, and what it makes of that (plotly's program as a file, its pictures)."""

FIGURE_HEIGHT = 380
"""Of a figure, in CSS pixels, where it says nothing else."""

DENSITY_PROGRAMS = ("cell_geometry.js", "density.js")
"""Of `assets/`, in a page that shows a density, in the order in which they need each other."""

DENSITY_KINDS = ("heatmap", "mesh3d", "scatter3d")
"""Kinds of traces that these draw."""

_DTYPES = {"float32": "f4", "float64": "f8", "int32": "i4", "uint8": "u1"}
"""NumPy's names to those of plotly's typed arrays."""


@dataclass(frozen=True)
class Figure:
    """One drawing of plotly and what it says in words."""

    title: str
    data: Sequence[Mapping[str, Any]]
    """plotly's traces."""
    layout: Mapping[str, Any]
    """plotly's layout; colours that depend on light and dark are the page's."""
    summary: str
    """What the figure shows, as a sentence: a picture is never the only place of what it says."""
    height: int = FIGURE_HEIGHT
    scales: bool = False
    """Whether the page offers a logarithmic scale of its values."""


@dataclass(frozen=True)
class Section:
    """What stands under one heading."""

    heading: str
    parts: tuple[str | Figure, ...]
    """HTML, and figures."""


@dataclass(frozen=True)
class Page:
    """A whole document."""

    title: str
    kind: str
    """`run`, `plan`, ...: stands above the title."""
    lead: tuple[str, ...]
    """HTML before the first heading."""
    sections: tuple[Section, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)
    """For `--json`: what the page shows, in figures with units in their keys."""


def text(value: object) -> str:
    """Anything as HTML text: `<`, `&` and quotes escaped; also for attributes in double quotes."""
    return html.escape(str(value), quote=True)


def equality(top: float) -> dict[str, Any]:
    """The trace of a plot of two figures on which they are equal, from 0 to `top`."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "equal",
        "x": [0, top],
        "y": [0, top],
        "hoverinfo": "skip",
        "line": {"dash": "dash", "color": "#8a929b"},
    }


def label(value: object) -> str:
    """Text inside a figure: plotly reads some HTML in labels, and shows this as it is."""
    return html.escape(str(value), quote=False)


def prose(words: object) -> str:
    """Plain text as HTML; what stands between backticks is code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", text(words))


def paragraph(words: object, kind: str = "") -> str:
    """A paragraph of plain text; nothing of no words. `kind`: `note` or `warning`."""
    css = f' class="{kind}"' if kind else ""
    return f"<p{css}>{prose(words)}</p>" if str(words) else ""


def details(summary: str, content: str) -> str:
    """HTML that opens on a click or a key."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def typed(values: np.ndarray | Sequence[float]) -> dict[str, Any]:
    """An array as plotly reads it from JSON: its bytes in base 64, bit by bit as they are here (little-endian)."""
    array = np.ascontiguousarray(values)
    if array.dtype == np.int64:
        array = array.astype(np.int32)
    little = array.astype(array.dtype.newbyteorder("<"))
    found: dict[str, Any] = {
        "dtype": _DTYPES[array.dtype.name],
        "bdata": base64.b64encode(little.tobytes()).decode("ascii"),
    }
    return found if array.ndim == 1 else found | {"shape": ", ".join(map(str, array.shape))}


def json_script(name: str, value: Any) -> str:
    """Data in the page, found by the name. No text in it can end the element: `<` is written as its escape."""
    body = json.dumps(to_jsonable(value), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{text(name)}">{body}</script>'


def page_html(page: Page) -> str:
    """The document.

    Raises:
        TomatError: It would be larger than `MOST_BYTES`.
    """
    contents, body, number, kinds = [], [], 0, {ALWAYS}
    for place, section in enumerate(page.sections, 1):
        anchor = f"section-{place}"
        contents.append(f'<li><a href="#{anchor}">{text(section.heading)}</a></li>')
        body.append(f'<section id="{anchor}" aria-labelledby="{anchor}-h">')
        body.append(f'<h2 id="{anchor}-h">{text(section.heading)}</h2>')
        for part in section.parts:
            if isinstance(part, Figure):
                number += 1
                kinds |= {trace.get("type", ALWAYS) for trace in part.data}
                body.append(_figure_html(f"figure-{number}", part))
            else:
                body.append(part)
        body.append("</section>")
    density = any("data-density" in part for part in body)
    kinds |= set(DENSITY_KINDS if density else ())
    written = "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{text(POLICY)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(page.title)} - tomat {text(page.kind)}</title>",
            f"<style>\n{asset('page.css')}</style>",
            "</head>",
            "<body>",
            '<a class="skip" href="#content">Skip to the content</a>',
            "<header>",
            f'<div><p class="kind">tomat {text(page.kind)}</p><h1>{text(page.title)}</h1></div>',
            '<button type="button" id="theme" aria-live="polite">Dark</button>',
            "</header>",
            f'<nav aria-label="Sections"><ul>{"".join(contents)}</ul></nav>',
            '<main id="content">',
            *page.lead,
            *body,
            "</main>",
            f"<footer><p>Written by tomat {text(__version__)}. The page holds all that it shows and loads nothing.</p>",
            "</footer>",
            _script("page.js"),
            *([_script(name) for name in DENSITY_PROGRAMS] if density else []),
            f'<script type="text/plain" id="plotly-program">\n{plotly_program(frozenset(kinds))}\n</script>',
            "</body>",
            "</html>",
            "",
        ]
    )
    size = len(written.encode("utf-8", errors="backslashreplace"))
    if size > MOST_BYTES:
        raise TomatError(
            f"the page of {page.title} would have {readable_bytes(size)}, more than the "
            f"{readable_bytes(MOST_BYTES)} that a browser opens at once; give less of it."
        )
    return written


def write_page(path: Path, page: Page) -> int:
    """Write the document in one step; returns its bytes.

    Raises:
        TomatError: It is too large, or the file cannot be written. Nothing is written then.
    """
    written = page_html(page)
    write_text(path, written)
    return path.stat().st_size


def asset(name: str) -> str:
    """A file of `assets/`: the page's style and its own programs."""
    return (importlib.resources.files("tomat.report.html") / "assets" / name).read_text(encoding="utf-8")


def _script(name: str) -> str:
    return f"<script>\n{asset(name)}</script>"


def _figure_html(name: str, figure: Figure) -> str:
    scale = (
        f'<label class="scale"><input type="checkbox" data-log="{name}"> logarithmic</label>' if figure.scales else ""
    )
    return (
        f'<figure class="drawn"><figcaption><b>{text(figure.title)}</b>{scale}</figcaption>'
        f'<div class="plot" id="{name}" data-figure="{name}-data" style="height:{figure.height}px" role="img" '
        f'aria-label="{text(figure.title)}. {text(figure.summary)}"></div>'
        f'<p class="summary">{prose(figure.summary)}</p>'
        f"{json_script(f'{name}-data', {'data': figure.data, 'layout': figure.layout})}</figure>"
    )
