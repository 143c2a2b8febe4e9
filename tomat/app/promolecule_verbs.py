"""`tomat promolecule fit` and `tomat promolecule show`."""

import argparse
from pathlib import Path
from typing import Any

from tomat.base.arguments import output_file, report_file
from tomat.base.progress import progress
from tomat.base.report.model import Facts
from tomat.base.report.terminal import show
from tomat.base.reporting import console, counted, write_bytes, write_report, write_text
from tomat.data.density.rules import add_rule_flags, refuse_rules, rules_of

_REMEDY = "Remove it and fit again."


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add `tomat promolecule`."""
    verbs = subparsers.add_parser("promolecule", help="fit a sum of atoms to densities, or look at one").add_subparsers(
        title="verbs", metavar="VERB", required=True
    )
    fit = verbs.add_parser(
        "fit",
        help="fit one radial density an element to many densities",
        description="Fit the sum over atoms of one non-negative radial function an element, and say how far it is from "
        "the densities it was fitted to.",
    )
    source = fit.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", metavar="PATH", help="densities, or folders (also gs://) of them")
    source.add_argument("--demo", action="store_true", help="the embedded training densities")
    add_rule_flags(fit)
    fit.add_argument("--sums", type=output_file, metavar="FILE", help="keep the sums here; goes on where it stopped")
    fit.add_argument("--output", type=output_file, required=True, metavar="FILE", help="the promolecule, JSON")
    fit.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    fit.set_defaults(run=_run_fit)

    show = verbs.add_parser(
        "show",
        help="elements and electrons of a promolecule",
        description="Elements of a promolecule, and the electrons that each brings.",
    )
    show.add_argument("promolecule", type=Path, help="the promolecule, JSON")
    show.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    show.set_defaults(run=_run_show)


def _run_fit(args: argparse.Namespace) -> int:
    import numpy as np

    from tomat.data.codec.inputs import demo_inputs, path_inputs
    from tomat.data.density.promolecule import PromoleculeFit

    if args.demo:
        refuse_rules(args.species, args.accept, "the embedded densities")
    inputs = demo_inputs("train") if args.demo else path_inputs(args.input, rules_of(args.species, args.accept))
    kept: Path | None = args.sums

    def save() -> None:
        if kept is not None:
            write_bytes(kept, fit.to_bytes())

    fit = PromoleculeFit()
    if kept is not None and kept.exists():
        fit = PromoleculeFit.from_bytes(kept.read_bytes(), str(kept), _REMEDY)

    skipped = inputs.add_to(
        lambda name, grid: fit.add(grid, material_id=name),
        fit.material_ids,
        save,
        what="Adding densities",
        kept=kept,
    )
    with progress() as bar:
        task = bar.add_task(f"Solving for {len(fit.projections)} elements", total=1)
        promolecule = fit.solve()
        bar.advance(task)
        write_text(args.output, promolecule.to_text())
        nmae = {
            name: promolecule.nmae(inputs.get_grid(name))
            for name in bar.track(fit.material_ids, description="Comparing with the densities")
        }
    values = list(nmae.values())
    figures = _figures(promolecule) | {
        "skipped": skipped,
        "nmae_fraction": {"mean": float(np.mean(values)), "median": float(np.median(values)), "worst": max(values)},
        "nmae_fraction_by_material": nmae,
    }
    write_report(args.json, figures)
    _print(figures, args.output)
    worst = max(nmae, key=lambda name: nmae[name])
    console.print(
        f"NMAE on these densities, whole cells: median {100 * np.median(values):.2f} %, mean "
        f"{100 * np.mean(values):.2f} %, worst {100 * nmae[worst]:.2f} % ({worst})"
    )
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason}")
    return 0


def _run_show(args: argparse.Namespace) -> int:
    from tomat.data.density.promolecule import Promolecule

    figures = _figures(Promolecule.load(args.promolecule))
    write_report(args.json, figures)
    _print(figures, args.promolecule)
    return 0


def _figures(promolecule: Any) -> dict[str, Any]:
    from tomat.data.density.elements import symbol_of

    basis = promolecule.basis
    return {
        "n_materials": promolecule.n_materials,
        "functions": basis.n,
        "cutoff_a": basis.cutoff_a,
        "electrons": {symbol_of(z): electrons for z, electrons in promolecule.electrons().items()},
        "sha256": promolecule.sha256,
    }


def _print(figures: dict[str, Any], path: Path) -> None:
    rows = {
        "fitted to": counted(figures["n_materials"], "density", "densities"),
        "each element": f"{figures['functions']} radial functions to {figures['cutoff_a']:g} A",
        "electrons": ", ".join(f"{symbol} {value:.2f}" for symbol, value in figures["electrons"].items()),
        "sha256": figures["sha256"],
    }
    show(Facts(rows, str(path)))
