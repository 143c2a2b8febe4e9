"""How much of a context is density: one patch, one that fills it, and several patches of a material packed into it.

Packing is not built; it is counted here, and at its best: cubes of whatever sides hold most, their tokens as few as the
vocabulary allows, the largest cube's size the layout's own.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product
from math import prod
from operator import itemgetter
from typing import Any

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, add_report, positive_int
from tomat.base.report.model import Column, Table
from tomat.base.report.terminal import show
from tomat.base.reporting import write_report
from tomat.data.tokens.layouts import (
    BLOCK_OF_THREE,
    FIXED_TOKENS,
    TOKENS_PER_ATOM,
    Use,
    boxes,
    layouts_of,
    one_patch,
    use_of,
)

WIDE_SIDE_DIFFERENCE = 8
"""Voxels by which sides differ in the boxes that packing is held against: they leave 0.3 % of 8,192 tokens less the
preamble empty (mean over 1 to 131 atoms), and a difference of 10 no less."""
MOST_PACKED = 4
FURTHER_PATCH_TOKENS = BLOCK_OF_THREE + 2
"""Of a further patch beside the same preamble: where it lies from the first (OFFSET), the brackets of its density."""


def packed(context: int, n_atoms: int, n_patches: int, *, shared_preamble: bool, smallest_side: int) -> Use | None:
    """The `n_patches` cubes of one material that hold most voxels in one context; None if they do not fit.

    Cubes of another size than the largest say their SHAPE. With a preamble of its own each cube is a whole sequence;
    with a shared one it costs `FURTHER_PATCH_TOKENS`.
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
    return use_of(context, [(side, side, side) for side in best], best_used) if best else None


def context_table(context: int, atoms: Sequence[int], smallest_side: int) -> list[dict[str, Any]]:
    """Every layout of that context with one token a voxel, and packing, for each number of atoms.

    `smallest_side`: of packed cubes, in voxels, at least 1.

    Returns:
        Of each number of atoms: `n_atoms`; `preamble_tokens` without SHAPE; `layouts`, the `Use` of each by name, for
            those that fill with `voxels_without_preamble`, what a shorter preamble could win at most; `wide_box`, the
            same for boxes of `WIDE_SIDE_DIFFERENCE`; `packed`, a list of the same with `n_patches` (2 to `MOST_PACKED`)
            and `shared_preamble`, without those that do not fit.
    """
    layouts = layouts_of(context)
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


def build_parser() -> Parser:
    """The flags of this script."""
    parser = Parser(prog="python profiling/layout_use.py", description="How much of a context is density, by layout.")
    add_flag(parser, "--context", 8192, "tokens", type=positive_int)
    atoms, text = [1, 4, 12, 29, 88], "of the materials (default: 1 4 12 29 88)"
    parser.add_argument("--atoms", type=positive_int, nargs="+", default=atoms, help=text)
    add_flag(parser, "--smallest_side", 8, "of packed cubes, in voxels; 8 are half an angstrom", type=positive_int)
    add_report(parser, "write the figures; shares are fractions")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} --context 4608 --atoms 2 8 32",)
    return parser


def run(args: argparse.Namespace) -> int:
    """Show, for materials of given numbers of atoms, the patch of each layout of a context, its share of the context,
    and the same for several cubes packed into one context, which no layout does."""
    rows = context_table(args.context, args.atoms, args.smallest_side)
    made = [["preamble, tokens", *(f"{row['preamble_tokens']:,}" for row in rows)]]
    made += [[name, *(_cell(row["layouts"][name]) for row in rows)] for name in rows[0]["layouts"]]
    made.append(["wider box", *(_cell(row["wide_box"]) for row in rows)])
    for shared, words in ((True, "one preamble"), (False, "a preamble each")):
        alike = [[each for each in row["packed"] if each["shared_preamble"] == shared] for row in rows]
        best = (max(some, key=itemgetter("voxels"), default=None) for some in alike)
        made.append([f"packed cubes, {words}", *map(_cell, best)])
    for name, use in rows[0]["layouts"].items():
        if "voxels_without_preamble" in use:
            cells = (f"{row['layouts'][name]['voxels_without_preamble']:,}" for row in rows)
            made.append([f"{name} with no preamble at all", *cells])
    title = f"Voxels in {args.context:,} tokens, their share of the context, and how many of them have\n"
    title += "their seven preceding neighbours in the patch too"
    show(Table(title, [Column("atoms"), *(Column(str(row["n_atoms"]), right=True) for row in rows)], made))
    write_report(args.json, {"context_tokens": args.context, "smallest_packed_side": args.smallest_side, "rows": rows})
    return 0


def _cell(use: dict[str, Any] | None) -> str:
    if use is None:
        return "-"
    shapes = use["patch_shapes_voxels"]
    words = " x ".join(map(str, shapes[0])) if len(shapes) == 1 else " + ".join(f"{shape[0]}^3" for shape in shapes)
    share, neighbours = 100 * use["voxel_share"], 100 * use["neighbour_share"]
    return f"{words}\n{use['voxels']:,} = {share:.1f} %\n({neighbours:.1f} %)"


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
