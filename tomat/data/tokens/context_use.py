"""How much of a context is density: with one patch, with one that fills it, and with several packed patches of a cell.

Packing is not built. It is counted here at its best: cubes of the sides that hold most, with as few other tokens as the
vocabulary allows, and with the largest cube as the layout's own.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import prod
from typing import Any

from tomat.base.errors import TomatError
from tomat.data.tokens.layouts import (
    BLOCK_OF_THREE,
    FIXED_TOKENS,
    LAYOUTS,
    TOKENS_PER_ATOM,
    PatchShape,
    SequenceLayout,
    boxes,
)

WIDE_SIDE_DIFFERENCE = 8
"""Voxels by which sides may differ in the boxes that packing is compared with. They leave 0.3 % of 8,192 tokens less
the preamble empty (mean over 1 to 131 atoms); a difference of 10 leaves no less."""
MOST_PACKED = 4
FURTHER_PATCH_TOKENS = BLOCK_OF_THREE + 2
"""Tokens of a further patch with a shared preamble: its offset from the first (OFFSET), the brackets of its density."""

Use = dict[str, Any]
"""Where the tokens of one context go, JSON-ready: `patch_shapes_voxels`, the largest patch first (none for scattered
voxels); `voxels`, one density token each; `voxel_share` and `padding_share` of the context, 0 to 1; `neighbour_share`,
0 to 1, the part of the voxels whose seven neighbours towards the patch's first voxel lie in the patch too. A Lorenzo
extrapolation reads these neighbours, which all come before the voxel."""


def _use(context: int, shapes: Sequence[PatchShape], used_tokens: int) -> Use:
    """The use of a context of which all but `used_tokens` tokens are padding."""
    voxels = sum(prod(shape) for shape in shapes)
    return {
        "patch_shapes_voxels": [list(shape) for shape in shapes],
        "voxels": voxels,
        "voxel_share": voxels / context,
        "padding_share": 1 - used_tokens / context,
        "neighbour_share": sum(prod(side - 1 for side in shape) for shape in shapes) / voxels,
    }


def one_patch(layout: SequenceLayout, n_atoms: int) -> Use:
    """The use of the context of a layout with one token per voxel."""
    if layout.is_scattered:  # no patch, so that no voxel has its neighbours
        shares = {"voxel_share": 1.0, "padding_share": 0.0, "neighbour_share": 0.0}
        return {"patch_shapes_voxels": [], "voxels": layout.context} | shares
    shape = layout.patch_shape(n_atoms)
    return _use(layout.context, [shape], layout.used_tokens(n_atoms, shape))


def packed(context: int, n_atoms: int, n_patches: int, *, shared_preamble: bool, smallest_side: int) -> Use | None:
    """The `n_patches` cubes of one material that hold most voxels in one context; None if they do not fit.

    Cubes of another size than the largest state their SHAPE. With a preamble of its own each cube is a whole sequence;
    with a shared preamble each further cube costs `FURTHER_PATCH_TOKENS`.
    """
    preamble = FIXED_TOKENS + TOKENS_PER_ATOM * n_atoms
    further = FURTHER_PATCH_TOKENS if shared_preamble else preamble
    best: tuple[int, ...] = ()
    most = best_used = 0
    for sides in combinations_with_replacement(range(int(context ** (1 / 3)) + 1, smallest_side - 1, -1), n_patches):
        voxels = sum(side**3 for side in sides)
        shapes = BLOCK_OF_THREE * (n_patches - sides.count(sides[0]))
        used = preamble + further * (n_patches - 1) + shapes + voxels
        if used <= context and voxels > most:
            best, most, best_used = sides, voxels, used
    return _use(context, [(side, side, side) for side in best], best_used) if best else None


def context_table(context: int, atoms: Sequence[int], smallest_side: int) -> list[dict[str, Any]]:
    """Every layout of that context with one token per voxel, and packing, for each number of atoms.

    `smallest_side`: of packed cubes, in voxels, at least 1.

    Returns:
        For each number of atoms: `n_atoms`; `preamble_tokens` without SHAPE; `layouts`, the `Use` of each by name, in
            layouts that fill the context with `voxels_without_preamble`, the most that a shorter preamble could give;
            `wide_box`, the `Use` of boxes of `WIDE_SIDE_DIFFERENCE`; `packed`, a list of `Use` with `n_patches` (2 to
            `MOST_PACKED`) and `shared_preamble`, without those that do not fit.
    """
    layouts = [each for each in LAYOUTS.values() if each.context == context and each.tokens_per_voxel == 1]
    if not layouts:
        known = sorted({each.context for each in LAYOUTS.values()})
        raise TomatError(f"No layout has a context of {context} tokens; expected one of {', '.join(map(str, known))}.")
    largest = max(layouts, key=lambda layout: layout.patch_size)
    wide = replace(largest, name="wide", max_side_difference=min(WIDE_SIDE_DIFFERENCE, largest.patch_size))
    rows = []
    for n_atoms in atoms:
        of_layouts = {}
        for layout in layouts:
            of_layouts[layout.name] = one_patch(layout, n_atoms)
            if layout.fills_context:
                alone = boxes(layout.context, layout.max_side_difference)
                of_layouts[layout.name]["voxels_without_preamble"] = max(prod(shape) for shape in alone)
        of_packing = []
        for shared, n_patches in product((True, False), range(2, MOST_PACKED + 1)):
            use = packed(context, n_atoms, n_patches, shared_preamble=shared, smallest_side=smallest_side)
            of_packing += [{"n_patches": n_patches, "shared_preamble": shared} | use] if use else []
        rows.append(
            {
                "n_atoms": n_atoms,
                "preamble_tokens": FIXED_TOKENS + TOKENS_PER_ATOM * n_atoms,
                "layouts": of_layouts,
                "wide_box": one_patch(wide, n_atoms),
                "packed": of_packing,
            }
        )
    return rows
