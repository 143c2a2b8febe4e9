"""`tomat demo-data show`."""

import argparse

from tomat.base.arguments import report_file


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the verbs of this room."""
    parser = subparsers.add_parser("demo-data", help="the embedded DFT densities")
    parser.moved = {"build": "`python profiling/embedded_set.py` in a checkout of tomat"}
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    show = verbs.add_parser(
        "show",
        help="list the embedded cells, how they were computed and how well they converged",
        description="List the embedded cells, the settings they were computed with, and the measured error of these.",
    )
    show.add_argument("material_id", nargs="?", help="one cell in full")
    show.add_argument("--json", type=report_file, metavar="FILE", help="write what is shown as JSON")
    show.set_defaults(run=show_command)


def show_command(args: argparse.Namespace) -> int:
    """`tomat demo-data show`."""
    from rich.table import Table

    from tomat.base.reporting import console, dump_json, write_report
    from tomat.data.density.demo.embedded import demo_index, load_demo

    if args.material_id:
        grid = load_demo(args.material_id)
        entry = next(cell for cell in demo_index()["cells"] if cell["material_id"] == args.material_id)
        report = {**entry, "electron_count": grid.electron_count, "formula": grid.formula}
        console.print_json(dump_json(report))
        write_report(args.json, report)
        return 0

    table = Table()
    table.add_column("cell", no_wrap=True)
    for title in ("split", "electrons", "cut-off / Ha", "k-mesh", "native", "refined", "spacing / A"):
        table.add_column(title)
    for cell in demo_index()["cells"]:
        recipe = cell["recipe"]
        table.add_row(
            cell["material_id"],
            recipe["split"],
            str(cell["calculation"]["valence_electrons"]),
            f"{recipe['e_cut_hartree']:g}",
            *("x".join(map(str, sides)) for sides in (recipe["k_mesh"], cell["native_shape"], cell["refined_shape"])),
            f"{max(cell['refined_spacing_a']):.4f}",
        )
    console.print(table)
    errors = Table(title="Measured error of the settings: NMAE against the same cell with one setting raised")
    errors.add_column("cell", no_wrap=True)
    for title in ("setting", "raised to", "NMAE / %"):
        errors.add_column(title)
    for entry in demo_index()["convergence"]:
        k_mesh = "x".join(map(str, entry["reference_k_mesh"]))
        to = k_mesh if entry["setting"] == "k_mesh" else f"{entry['reference_e_cut_hartree']:g} Ha"
        nmae = "reference did not converge" if entry["nmae_percent"] is None else f"{entry['nmae_percent']:.2f}"
        errors.add_row(entry["material_id"], entry["setting"], to, nmae)
    console.print(errors)
    write_report(args.json, demo_index())
    return 0
