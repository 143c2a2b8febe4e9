"""`tomat tokens layouts`: how much of a context is density, in each layout and with patches packed into it."""

import argparse
from operator import itemgetter
from typing import Any

from tomat.base.arguments import positive_int, report_file


def register_layouts(verbs: argparse._SubParsersAction) -> None:
    """Add `tomat tokens layouts`."""
    parser = verbs.add_parser(
        "layouts",
        help="how much of a context is density",
        description="Show, for materials of given numbers of atoms, the patch of each layout of a context, its share "
        "of the context, and the same for several cubes packed into one context, which no layout does.",
    )
    parser.add_argument("--context", type=positive_int, default=8192, help="tokens (default: %(default)s)")
    parser.add_argument(
        "--atoms",
        type=positive_int,
        nargs="+",
        default=[1, 4, 12, 29, 88],
        help="of the materials (default: 1 4 12 29 88)",
    )
    parser.add_argument(
        "--smallest_side",
        type=positive_int,
        default=8,
        help="smallest side of packed cubes, in voxels (default: %(default)s, half an angstrom)",
    )
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures; shares are fractions")
    parser.set_defaults(run=run_layouts)


def run_layouts(args: argparse.Namespace) -> int:
    """Count, print and write."""
    from tomat.base.reporting import write_report
    from tomat.data.tokens.context_use import context_table

    rows = context_table(args.context, args.atoms, args.smallest_side)
    _print(args.context, rows)
    write_report(args.json, {"context_tokens": args.context, "smallest_packed_side": args.smallest_side, "rows": rows})
    return 0


def _print(context: int, rows: list[dict[str, Any]]) -> None:
    from tomat.base.report.model import Column, Table
    from tomat.base.report.terminal import show

    made = [["preamble, tokens", *(f"{row['preamble_tokens']:,}" for row in rows)]]
    made += [[name, *(_cell(row["layouts"][name]) for row in rows)] for name in rows[0]["layouts"]]
    made.append(["wider box", *(_cell(row["wide_box"]) for row in rows)])
    by_voxels = itemgetter("voxels")
    for shared, words in ((True, "one preamble"), (False, "a preamble each")):
        best = [
            max((each for each in row["packed"] if each["shared_preamble"] == shared), key=by_voxels, default=None)
            for row in rows
        ]
        made.append([f"packed cubes, {words}", *(_cell(each) for each in best)])
    for name, use in rows[0]["layouts"].items():
        if "voxels_without_preamble" in use:
            cells = (f"{row['layouts'][name]['voxels_without_preamble']:,}" for row in rows)
            made.append([f"{name} with no preamble at all", *cells])
    title = f"Voxels in {context:,} tokens, their share of the context, and how many of them have\n"
    title += "their seven preceding neighbours in the patch too"
    show(Table(title, [Column("atoms"), *(Column(str(row["n_atoms"]), right=True) for row in rows)], made))


def _cell(use: dict[str, Any] | None) -> str:
    if use is None:
        return "-"
    shapes = use["patch_shapes_voxels"]
    words = " x ".join(map(str, shapes[0])) if len(shapes) == 1 else " + ".join(f"{shape[0]}^3" for shape in shapes)
    share, neighbours = 100 * use["voxel_share"], 100 * use["neighbour_share"]
    return f"{words}\n{use['voxels']:,} = {share:.1f} %\n({neighbours:.1f} %)"
