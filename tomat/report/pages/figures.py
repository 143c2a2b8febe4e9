"""The figures of a tracking page, as SVG; the same bytes for the same breakdown and matplotlib."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.report.document import write_if_changed
from tomat.perf.profile.breakdown import Breakdown
from tomat.perf.profile.categories import Category

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One colour a category, so that pages can be compared at a glance: blues attention, greens matmul and loss, oranges
# elementwise work, purples parameters, reds communication, greys time without work.
COLOURS: dict[str, str] = {
    Category.ATTENTION_FORWARD: "#2b6cb0",
    Category.ATTENTION_BACKWARD: "#1a4a80",
    Category.MATMUL: "#2f855a",
    Category.LOSS: "#68a063",
    Category.ELEMENTWISE: "#dd8a33",
    Category.NORM_ROTARY: "#e8b76a",
    Category.EMBEDDING: "#8a63b0",
    Category.OPTIMIZER: "#b39ac9",
    Category.COPIES: "#b8a068",
    Category.COLLECTIVES_EXPOSED: "#c53030",
    Category.COLLECTIVES_HIDDEN: "#e39a9a",
    Category.CUSTOM_KERNELS: "#3d8f93",
    Category.CONTROL: "#a7b0b8",
    Category.HOST: "#6b7680",
    Category.IDLE: "#d4d9dd",
    Category.UNATTRIBUTED: "#ece4e4",
}
SMALLEST_SHARE = 0.0005
"""Of the step, for a point of the roofline."""
RC: dict[Any, Any] = {"svg.hashsalt": "tomat", "svg.fonttype": "none", "font.size": 9.0, "axes.spines.top": False,
      "axes.spines.right": False}  # fmt: skip


def draw_figures(breakdown: Breakdown, folder: Path, stem: str) -> list[tuple[str, Path]]:
    """Write the figures that the breakdown has data for.

    Returns:
        (caption, file) of each.
    """
    drawn = [("Share of the step by category", draw_svg(folder / f"{stem}-shares.svg", _shares, breakdown, (7.5, 1.9)))]
    if any(_roofline_points(breakdown)):
        figure = draw_svg(folder / f"{stem}-roofline.svg", _roofline, breakdown, (6.0, 4.0))
        drawn.append(("Operations against the chip's roofs (area: share of the step)", figure))
    if len(breakdown.step_times_seconds) > 1:
        figure = draw_svg(folder / f"{stem}-steps.svg", _histogram, breakdown, (6.0, 2.4))
        drawn.append(("Step times", figure))
    return drawn


def draw_svg(path: Path, draw: Any, subject: Any, size: tuple[float, float], n_panels: int = 1) -> Path:
    """Write `draw(axes, subject)` as an SVG of `size` inches, unless the file holds it already.

    Of several panels side by side, `axes` is the sequence.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(rc=RC):
        figure, axes = plt.subplots(1, n_panels, figsize=size, layout="constrained")
        draw(axes, subject)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        plt.close(figure)
    write_if_changed(path, "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n")
    return path


def _shares(axes: Axes, breakdown: Breakdown) -> None:
    left = 0.0
    for row in breakdown.categories:
        width = 100 * row.share
        if width <= 0:
            continue
        axes.barh([0], [width], left=[left], color=COLOURS[row.name], label=f"{row.name} {width:.1f} %")
        left += width
    axes.set(xlim=(0, 100), yticks=[], xlabel="% of the step")
    axes.legend(frameon=False, ncols=3, fontsize=7.5, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _roofline_points(breakdown: Breakdown) -> list[tuple[float, float, float, str]]:
    """(flops per HBM byte, flops per second, share, category) of operations that have all of them."""
    peak, bandwidth = breakdown.roofs.peak_flops_per_second, breakdown.roofs.peak_hbm_bytes_per_second
    if not peak or not bandwidth:
        return []
    points = []
    for op in breakdown.ops:
        if op.flops and op.hbm_bytes is not None and op.seconds >= SMALLEST_SHARE * breakdown.step_seconds > 0:
            intensity = op.flops / op.hbm_bytes if op.hbm_bytes else math.inf
            points.append((intensity, op.flops / op.seconds, op.seconds / breakdown.step_seconds, str(op.category)))
    # What stays in VMEM moves no HBM bytes; it stands at the right edge.
    edge = 10 * max([*(point[0] for point in points if point[0] < math.inf), 10 * peak / bandwidth])
    return sorted((min(point[0], edge), *point[1:]) for point in points)


def _roofline(axes: Axes, breakdown: Breakdown) -> None:
    from matplotlib.lines import Line2D

    points = _roofline_points(breakdown)
    peak, bandwidth = breakdown.roofs.peak_flops_per_second, breakdown.roofs.peak_hbm_bytes_per_second
    if not peak or not bandwidth:
        return
    low = min(min(p[0] for p in points), peak / bandwidth / 100)
    high = max(max(p[0] for p in points), peak / bandwidth * 100)
    ridge = peak / bandwidth
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color="black", lw=1)
    for other in sorted({breakdown.roofs.peak_of(op.operands) or peak for op in breakdown.ops} - {peak}):
        axes.plot([ridge, other / bandwidth, high], [peak, other, other], color="black", lw=1, ls=":")  # int8, float32
    handles = []
    for category in sorted({p[3] for p in points}):
        handles.append(Line2D([], [], marker="o", ls="", ms=4, color=COLOURS[category], label=category))
        mine = [p for p in points if p[3] == category]
        intensities, rates, sizes = [p[0] for p in mine], [p[1] for p in mine], [max(4.0, 1500 * p[2]) for p in mine]
        axes.scatter(intensities, rates, s=sizes, color=COLOURS[category], alpha=0.7, lw=0)
    axes.set(
        xscale="log", yscale="log", xlabel="flops per HBM byte (right edge: none moved)", ylabel="flops per second"
    )
    axes.legend(handles=handles, frameon=False, fontsize=7, loc="lower right")


def _histogram(axes: Axes, breakdown: Breakdown) -> None:
    times = [1e3 * t for t in breakdown.step_times_seconds]
    axes.hist(times, bins=min(40, max(5, len(times) // 2)), color="#2b6cb0")
    axes.set(xlabel="step time, ms", ylabel="steps x devices")
