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
    from tomat.base.report.model import Column, Table
    from tomat.base.report.terminal import show
    from tomat.base.reporting import console, dump_json, write_report
    from tomat.data.density.demo.embedded import demo_index, load_demo

    if args.material_id:
        grid = load_demo(args.material_id)
        entry = next(cell for cell in demo_index()["cells"] if cell["material_id"] == args.material_id)
        report = {**entry, "electron_count": grid.electron_count, "formula": grid.formula}
        console.print_json(dump_json(report))
        write_report(args.json, report)
        return 0

    headings = ("cell", "split", "electrons", "cut-off / Ha", "k-mesh", "native", "refined", "spacing / A")
    cells = [
        (
            cell["material_id"],
            cell["recipe"]["split"],
            cell["calculation"]["valence_electrons"],
            f"{cell['recipe']['e_cut_hartree']:g}",
            "x".join(map(str, cell["recipe"]["k_mesh"])),
            "x".join(map(str, cell["native_shape"])),
            "x".join(map(str, cell["refined_shape"])),
            f"{max(cell['refined_spacing_a']):.4f}",
        )
        for cell in demo_index()["cells"]
    ]
    errors = []
    for entry in demo_index()["convergence"]:
        k_mesh = "x".join(map(str, entry["reference_k_mesh"]))
        to = k_mesh if entry["setting"] == "k_mesh" else f"{entry['reference_e_cut_hartree']:g} Ha"
        nmae = "reference did not converge" if entry["nmae_percent"] is None else f"{entry['nmae_percent']:.2f}"
        errors.append((entry["material_id"], entry["setting"], to, nmae))
    show(
        Table("", [Column(heading) for heading in headings], cells),
        Table(
            "Measured error of the settings: NMAE against the same cell with one setting raised",
            [Column(heading) for heading in ("cell", "setting", "raised to", "NMAE / %")],
            errors,
        ),
    )
    write_report(args.json, demo_index())
    return 0
