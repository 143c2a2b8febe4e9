"""A chart as SVG, drawn by matplotlib: the same bytes for the same chart."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.report.document import write_if_changed
from tomat.base.report.model import Chart, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RC: dict[Any, Any] = {"svg.hashsalt": "tomat", "svg.fonttype": "none", "font.size": 9.0, "axes.spines.top": False,
      "axes.spines.right": False}  # fmt: skip
MOST_NAMED = 12
"""Series that a legend inside the axes has room for."""


def drawn_svg(draw: Callable[[Any], None], size: tuple[float, float], n_panels: int = 1) -> str:
    """What `draw(axes)` draws on `size` inches; of several panels side by side `axes` is the sequence."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(rc=RC):
        figure, axes = plt.subplots(1, n_panels, figsize=size, layout="constrained")
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def draw_svg(path: Path, draw: Any, subject: Any, size: tuple[float, float], n_panels: int = 1) -> Path:
    """Write what `draw(axes, subject)` draws, as `drawn_svg`, unless the file holds it already."""
    write_if_changed(path, drawn_svg(lambda axes: draw(axes, subject), size, n_panels))
    return path


def chart_svg(chart: Chart) -> str:
    """The SVG of a chart."""
    return drawn_svg(lambda axes: _draw(axes, chart), chart.size)


def _draw(axes: Axes, chart: Chart) -> None:
    left = 0.0
    for series in chart.series:
        label = _label(series.name) if series.named else None
        match series.mark:
            case "bar":
                axes.barh([0], list(series.x), left=[left], color=series.colour or None, label=label)
                left += series.x[0]
            case "histogram":
                axes.hist(series.x, bins=min(40, max(5, len(series.x) // 2)), color=series.colour or None, label=label)
            case "points":
                areas = [max(4.0, 1500 * area) for area in series.areas] or 16.0
                axes.scatter(series.x, series.y, s=areas, color=series.colour or None, alpha=0.7, lw=0, label=label)
            case _:
                axes.plot(series.x, series.y, **_line(series), label=label)
    for axis, name in ((chart.x, "x"), (chart.y, "y")):
        axes.set(**{f"{name}label": _label(axis.label), f"{name}scale": "log" if axis.log else "linear"})
        if axis.from_zero:
            axes.set(**{f"{name}lim": (0, None)})
    named = sum(series.named for series in chart.series)
    if left:
        axes.set(xlim=(0, left), yticks=[])
        axes.legend(frameon=False, ncols=3, fontsize=7.5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    elif 1 < named <= MOST_NAMED:
        axes.legend(frameon=False, fontsize=7)


def _line(series: Series) -> dict[str, Any]:
    style: dict[str, Any] = {"lw": 0.5, "alpha": 0.25} if series.faint else {"lw": 1.2}
    if series.mark == "both":
        style |= {"marker": "o", "ms": 3.5}
    if series.dotted:
        style["ls"] = ":"
    return style | ({"color": series.colour} if series.colour else {})


def _label(text: str) -> str:
    """Words that matplotlib shows as they are: between two dollars it reads mathematics."""
    return text.replace("$", r"\$")
