"""A plane of a density across c, drawn with the crystal's angle between a and b, and the atoms near the plane."""

import base64
import html
import io
from collections.abc import Iterator, Sequence

import numpy as np

from tomat.data.density.elements import symbol_of
from tomat.data.density.grid import DensityGrid

NEAR_PLANE_A = 0.35
"""Atoms at most this far from the plane are drawn: about the radius within which a valence density peaks."""


def atoms_near(grid: DensityGrid, plane: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """Symbol and place in the picture, A, of each atom within `NEAR_PLANE_A` of a plane. Atoms on an edge repeat."""
    a, b, _, _, _, gamma_degrees = grid.lattice_parameters
    gamma = np.deg2rad(gamma_degrees)
    normal = np.cross(grid.lattice[0], grid.lattice[1])
    normal /= np.linalg.norm(normal)
    height = grid.lattice[2]
    for number, (x, y, z) in zip(grid.atomic_numbers.tolist(), grid.frac_coords.tolist(), strict=True):
        away = z - plane / grid.grid_shape[2]
        away -= round(away)
        if abs(away * float(height @ normal)) > NEAR_PLANE_A:
            continue
        # The atom is projected along the plane's normal, because the c axis may lean.
        foot = (x, y, 0) + away * np.linalg.solve(grid.lattice.T, height - (height @ normal) * normal)
        for along_a, along_b in np.ndindex(2, 2):
            s, t = foot[0] % 1 + along_a, foot[1] % 1 + along_b
            if s <= 1 + 1e-6 and t <= 1 + 1e-6:
                yield symbol_of(number), (s * a + t * b * np.cos(gamma), t * b * np.sin(gamma))


def most_structured_plane(grid: DensityGrid) -> int:
    """Index along c of the plane whose density varies most (largest standard deviation; the first of equals)."""
    return int(np.argmax(grid.rho.astype(np.float64).std(axis=(0, 1))))


def corners_a(grid: DensityGrid) -> tuple[np.ndarray, np.ndarray]:
    """x and y, A, of the corners of the voxels of a plane across c, `[nx + 1, ny + 1]` each, in the crystal's angle.
    The place of a voxel is the middle of its four."""
    nx, ny, _ = grid.grid_shape
    along_a, along_b = np.meshgrid(*((np.arange(n + 1) - 0.5) / n for n in (nx, ny)), indexing="ij")
    length_a, length_b, _, _, _, gamma_degrees = grid.lattice_parameters
    gamma = np.deg2rad(gamma_degrees)
    return along_a * length_a + along_b * length_b * np.cos(gamma), along_b * length_b * np.sin(gamma)


def slice_html(grid: DensityGrid, captions: Sequence[str]) -> str:
    """The most structured plane as an HTML figure with an embedded picture, and the captions below it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    plane = most_structured_plane(grid)
    figure = Figure(figsize=(4.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    mesh = axes.pcolormesh(*corners_a(grid), grid.rho[:, :, plane], norm=PowerNorm(0.5, vmin=0.0), cmap="viridis")
    for symbol, place in atoms_near(grid, plane):
        axes.annotate(symbol, place, color="white", ha="center", va="center", weight="bold")
    axes.set_aspect("equal")
    axes.set_xlabel("Å")
    axes.set_title(f"plane {plane} of {grid.grid_shape[2]} along c", fontsize=9)
    figure.colorbar(mesh, ax=axes, label="e/Å³")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=100)
    lines = "<br>".join(map(html.escape, captions))
    source = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    return f'<figure><img alt="a slice of the density" src="{source}"><figcaption>{lines}</figcaption></figure>'
