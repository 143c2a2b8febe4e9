"""Pictures of one plane of a density: the reference, the prediction, and their difference."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import replacing
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.patch import check_encodable, tiling_anchors
from tomat.predict.evaluation.free_running import FREE_RUNNING
from tomat.predict.evaluation.metrics import nmae
from tomat.predict.evaluation.result import LABEL
from tomat.predict.inference.slices import NEAR_PLANE_A, atoms_near, corners_a, most_structured_plane

if TYPE_CHECKING:  # JAX and Levanter are needed to compute a plane, not to draw one
    from levanter.models.lm_model import LmHeadModel
    from matplotlib.colors import Normalize

    from tomat.predict.evaluation.teacher_forced import TeacherForcedEvaluator

METADATA = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
"""The metadata of each format that would differ from one drawing to the next; None leaves an entry out."""


@dataclass(frozen=True, eq=False)
class DensityPlane:
    """The voxels (ix, iy, plane) of a cell."""

    grid: DensityGrid
    """The cell, with its reference density."""
    plane: int
    predicted: np.ndarray | None = None
    """float32 [nx, ny], e/Å³; None: the reference is drawn alone."""
    panel: str = "teacher-forced"
    label: str = LABEL
    """Says in full what kind of prediction is shown."""
    reference_panel: str = "reference (DFT)"
    difference_panel: str = ""
    """Heading of the difference; empty: `panel` minus reference."""

    @property
    def reference(self) -> np.ndarray:
        """float32 [nx, ny], e/Å³, not rounded to the codec."""
        return self.grid.rho[:, :, self.plane]


def teacher_forced_plane(evaluator: "TeacherForcedEvaluator", model: "LmHeadModel", grid: DensityGrid) -> DensityPlane:
    """Predict the most structured plane: a slab of patches is tiled so that the plane is the middle of each patch."""
    chosen = most_structured_plane(grid)
    nx, ny, nz = (int(side) for side in grid.grid_shape)
    px, py, pz = check_encodable(grid, evaluator.layout, evaluator.codec)
    anchors = tiling_anchors((nx, ny, 1), (px, py, 1))
    anchors[:, 2] = (chosen - pz // 2) % nz
    patches = evaluator.patches_at(model, grid, anchors)
    middle = patches.counted.reshape(patches.reference.shape)[:, :, :, pz // 2]
    if not middle.all():
        raise TomatError(
            f"the model reads {patches.tokens.shape[1]} tokens, too few for whole patches of {px} x {py} x {pz} "
            "voxels, which tile a plane; take a model of the layout's full context."
        )
    found = patches.codec.decode(evaluator.predict(model, [patches])[0].median_bin)[:, :, :, pz // 2]
    image = np.empty((nx, ny), dtype=np.float32)
    for (x, y, _), tile in zip(anchors, found, strict=True):
        width, height = min(px, nx - x), min(py, ny - y)
        image[x : x + width, y : y + height] = tile[:width, :height]
    return DensityPlane(grid, chosen, image)


def predicted_plane(predicted: np.ndarray, truth: DensityGrid) -> DensityPlane:
    """The most structured plane of a whole cell that was predicted from its structure."""
    chosen = most_structured_plane(truth)
    return DensityPlane(truth, chosen, predicted[:, :, chosen], "predicted from the structure", FREE_RUNNING)


def compared_plane(reference: DensityGrid, other: DensityGrid) -> DensityPlane:
    """The plane of two densities on one grid in which the reference is most structured."""
    chosen, names = most_structured_plane(reference), (other.material_id, reference.material_id)
    label = f"{names[0]} against {names[1]}"
    return DensityPlane(reference, chosen, other.rho[:, :, chosen], names[0], label, names[1], "difference")


def _panels(plane: DensityPlane) -> list[tuple[str, np.ndarray, "Normalize", str, str]]:
    """Heading, values, colour scale, name of the colour map, and label of each panel."""
    from matplotlib.colors import Normalize, PowerNorm

    shown = [(plane.reference_panel, plane.reference)]
    if plane.predicted is not None:
        shown.append((plane.panel, plane.predicted))
    top = float(max(values.max() for _, values in shown)) or 1.0
    norm, label = PowerNorm(0.5, vmin=0.0, vmax=top), r"density (e/$\mathrm{\AA}^3$), square-root scale"
    panels: list[Any] = [(heading, values, norm, "viridis", label) for heading, values in shown]
    if plane.predicted is not None:
        difference = plane.predicted - plane.reference
        limit = float(np.abs(difference).max()) or 1.0
        heading = plane.difference_panel or f"{plane.panel} minus reference"
        panels.append((heading, difference, Normalize(-limit, limit), "RdBu_r", r"difference (e/$\mathrm{\AA}^3$)"))
    return panels


def draw_plane(plane: DensityPlane, path: str | os.PathLike[str]) -> Path:
    """Draw a plane to a PNG, SVG or PDF file, the same bytes for the same plane.

    Densities share one square-root colour scale, since they span decades between core and bond. The difference has a
    linear one, symmetric about zero. The plane is drawn with the crystal's own angle between a and b, in A.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    target = Path(path)
    if target.suffix not in METADATA:
        raise TomatError(f"cannot draw to {target}: expected one of {', '.join(METADATA)} as its ending.")
    near = f"atoms within {NEAR_PLANE_A:g} A"
    title = f"{plane.grid.material_id}, plane {plane.plane} of {plane.grid.grid_shape[2]} along c"
    if plane.predicted is None:
        title += f"\n{near}"
    else:
        error = 100 * nmae(plane.predicted, plane.reference)
        title += f", NMAE in the plane {error:.2f} %; {near} are drawn\n{plane.label}"
    panels = _panels(plane)
    x, y = corners_a(plane.grid)
    atoms = list(atoms_near(plane.grid, plane.plane))
    # A Figure without pyplot leaves the caller's backend alone. The salt and the missing dates make the bytes repeat.
    with matplotlib.rc_context({"svg.hashsalt": "tomat", "font.size": 9}):
        figure = Figure(figsize=(12.5 if len(panels) > 1 else 5.0, 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        drawn = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (heading, values, norm, colours, label) in zip(drawn, panels, strict=True):
            mesh = axes.pcolormesh(x, y, values, norm=norm, cmap=colours, shading="flat", rasterized=True)
            axes.set_aspect("equal")
            axes.set_title(heading)
            axes.set_xlabel(r"$\mathrm{\AA}$")
            for symbol, (at_x, at_y) in atoms:
                axes.plot(at_x, at_y, "o", ms=9, mfc="none", mec="white", mew=2.2)
                axes.plot(at_x, at_y, "o", ms=9, mfc="none", mec="black", mew=0.9)
                box = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.7}
                place = {"xytext": (6, 6), "textcoords": "offset points"}
                axes.annotate(symbol, (at_x, at_y), **place, fontsize=7, bbox=box)
            figure.colorbar(mesh, ax=axes, orientation="horizontal", label=label, shrink=0.85)
        figure.suptitle(title)
        with replacing(target) as temporary:
            figure.savefig(temporary, dpi=120, metadata=METADATA[target.suffix])
    return target


def draw_density(grid: DensityGrid, path: str | os.PathLike[str]) -> Path:
    """Draw the most structured plane of one density, as `draw_plane` does."""
    return draw_plane(DensityPlane(grid, most_structured_plane(grid), reference_panel=""), path)
