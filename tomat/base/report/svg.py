"""A chart as SVG, drawn by matplotlib: the same bytes for the same chart."""

import io
import math
from typing import TYPE_CHECKING, Any

from tomat.base.report.model import Chart, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RC: dict[Any, Any] = {"svg.hashsalt": "tomat", "svg.fonttype": "none", "font.size": 9.0, "axes.spines.top": False,
      "axes.spines.right": False}  # fmt: skip
MOST_NAMED = 12
"""Most series that a legend inside the axes has room for."""


def chart_svg(chart: Chart) -> str:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(rc=RC):
        figure, axes = plt.subplots(figsize=chart.size, layout="constrained")
        _draw(axes, chart)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _draw(axes: "Axes", chart: Chart) -> None:
    left = 0.0
    for series in chart.series:
        label = _label(series.name) if series.named else None
        common: dict[str, Any] = {"label": label} | ({"color": series.colour} if series.colour else {})
        match series.mark:
            case "bar":
                axes.barh([0], list(series.x), left=[left], **common)
                left += series.x[0]
            case "histogram":
                axes.hist(series.x, bins=min(40, max(5, len(series.x) // 2)), **common)
            case "points" if not (series.x_ranges or series.y_ranges):
                areas = [max(4.0, 1500 * area) for area in series.areas] or 16.0
                axes.scatter(series.x, series.y, s=areas, alpha=0.7, lw=0, **common)
            case "crosses":
                # Not clipped: they may stand on an axis.
                axes.plot(series.x, series.y, "x", clip_on=False, zorder=5, **common)
            case _:
                _draw_line(axes, series, common)
        for text, x, y in zip(series.labels, series.x, series.y, strict=False):
            axes.annotate(_label(text), (x, y), textcoords="offset points", xytext=(5, 3), fontsize=8)
    for limit in chart.limits:
        axes.axvline(limit, color="black", lw=0.8, ls="--")
    for axis, name in ((chart.x, "x"), (chart.y, "y")):
        axes.set(**{f"{name}label": _label(axis.label), f"{name}scale": "log" if axis.log else "linear"})
        if axis.from_zero:
            axes.set(**{f"{name}lim": (0, None)})
        if axis.ticks:
            axes.set(**{f"{name}ticks": axis.ticks, f"{name}ticklabels": [f"{tick:,}" for tick in axis.ticks]})
            axes.minorticks_off()
    named = sum(series.named for series in chart.series)
    if left:
        axes.set(xlim=(0, left), yticks=[])
        axes.legend(frameon=False, ncols=3, fontsize=7.5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    elif 1 < named <= MOST_NAMED:
        axes.legend(frameon=False, fontsize=7)


def _draw_line(axes: "Axes", series: Series, common: dict[str, Any]) -> None:
    style: dict[str, Any] = common | ({"lw": 0.5, "alpha": 0.25} if series.faint else {"lw": 1.2})
    if series.mark in ("both", "points"):
        style |= {"marker": "o", "ms": 3.5}
    if series.mark == "step":
        style["drawstyle"] = "steps-post"
    style["ls"] = "" if series.mark == "points" else ":" if series.dotted else "-"
    values = [math.nan if one is None else one for one in series.y]
    if not (series.x_ranges or series.y_ranges):
        axes.plot(series.x, values, **style)
        return
    bars = {
        f"{name}err": [[one - low for one, (low, _) in zip(at, ranges, strict=True)],
                       [high - one for one, (_, high) in zip(at, ranges, strict=True)]]
        for name, at, ranges in (("x", series.x, series.x_ranges), ("y", values, series.y_ranges))
        if ranges
    }  # fmt: skip
    axes.errorbar(series.x, values, elinewidth=0.7, **bars, **style)


def _label(text: str) -> str:
    """Words that matplotlib shows as they are: between two dollars it reads mathematics."""
    return text.replace("$", r"\$")
