"""Voxels outside the codec, which tokens cannot express. Below its smallest density they take the first id above zero's
(in the two-token codec zero's), above its largest the last. `DensityGrid.clipped_voxels` counts negative voxels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.records import Amount, Count
from tomat.base.reporting import counted
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.relative import cell_codec
from tomat.data.density.grid import DensityGrid

MAX_CLIPPED_SHARE = 0.001
"""Electrons that a material may lose outside the codec, as a share of all: 0.1 %. The loss is NMAE that no model can
undo; 16,384 bins cost 0.18 % on Materials Project data, and the best published predictions are 0.5 % off."""

MATERIALS_SHOWN = 5


@dataclass(frozen=True)
class ClippedMaterial:
    """The voxels outside the codec in the whole cell of one material."""

    material_id: str
    below_voxels: Count
    """Above zero, but below the codec's smallest density."""
    above_voxels: Count
    """Above the codec's largest density."""
    electron_share: Amount
    """sum |decoded - density| over these voxels / sum of the density: the NMAE that they cost (median decoder)."""

    @property
    def voxels(self) -> int:
        return self.below_voxels + self.above_voxels


def clipped_of(grid: DensityGrid, codec: DensityCodec, material_id: str, max_share: float) -> ClippedMaterial:
    """The voxels of a density outside a codec. Refuses one that loses more than `max_share` of its electrons there."""
    cell = cell_codec(codec, grid)
    values = cell.values(grid.rho)
    low, high = codec.fitted_range
    below = (values > 0) & (values < low)
    above = values > high
    n_below, n_above = int(np.count_nonzero(below)), int(np.count_nonzero(above))
    if not n_below and not n_above:
        return ClippedMaterial(material_id, 0, 0, 0.0)
    outside = values[below | above]
    lost = np.abs(codec.decode(codec.encode(outside)).astype(np.float64) - outside)
    what, unit, total = "density", codec.unit, values.sum(dtype=np.float64)
    if cell.scale is not None:
        lost, total = lost * cell.scale[below | above], grid.rho.sum(dtype=np.float64)
        what, unit = "ratio", "times the sum of atoms"
    share = float(lost.sum() / total)
    if share > max_share:
        ends = f"{n_below:,} below its smallest {what} of {low:.3g}, {n_above:,} above its largest of {high:.4g}"
        raise TomatError(
            f"{n_below + n_above:,} of {values.size:,} voxels lie outside the codec ({ends} {unit}): "
            f"{100 * share:.3g} % of the electrons, more than the {100 * max_share:g} % of --max_clipped_share. Use a "
            "codec fitted to such densities (`tomat codec fit`), or leave this material out."
        )
    return ClippedMaterial(material_id, n_below, n_above, share)


def clipped_lines(clipped: Sequence[ClippedMaterial] | None, max_share: float | None) -> list[str]:
    """What to say about the voxels outside the codec: one line in all, and one for each of the worst materials."""
    if clipped is None:
        return ["voxels outside the codec: not counted (an imported set, or an older one)"]
    if not clipped:
        return ["voxels outside the codec: none"]
    worst = sorted(clipped, key=lambda each: -each.electron_share)
    below, above = sum(each.below_voxels for each in clipped), sum(each.above_voxels for each in clipped)
    allowed = "" if max_share is None else f"; above {100 * max_share:g} % a material is skipped"
    most = f"at most {100 * worst[0].electron_share:.3g} % of a material's electrons{allowed}"
    where = f"{below:,} below it, {above:,} above it, in {counted(len(clipped), 'material')}"
    lines = [f"voxels outside the codec: {where}; {most}"]
    lines += [
        f"outside the codec {each.material_id}: {counted(each.below_voxels, 'voxel')} below it, "
        f"{each.above_voxels:,} above it, {100 * each.electron_share:.3g} % of the electrons"
        for each in worst[:MATERIALS_SHOWN]
    ]
    if len(worst) > MATERIALS_SHOWN:
        lines.append(f"and {counted(len(worst) - MATERIALS_SHOWN, 'more material')} (manifest.json names all)")
    return lines


def clipped_figures(clipped: Sequence[ClippedMaterial] | None) -> dict[str, int | float | None]:
    """The voxels outside the codec as figures; None where they were not counted."""
    found = clipped or ()
    figures = {
        "materials_clipped": len(found),
        "voxels_below_codec": sum(each.below_voxels for each in found),
        "voxels_above_codec": sum(each.above_voxels for each in found),
        "largest_clipped_electron_fraction": max((each.electron_share for each in found), default=0.0),
    }
    return figures if clipped is not None else dict.fromkeys(figures)
