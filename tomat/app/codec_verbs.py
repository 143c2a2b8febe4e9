"""`tomat codec fit` and `tomat codec show`."""

import argparse
from pathlib import Path
from typing import Any

from tomat.base.arguments import add_flag, output_file, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.report.model import Facts
from tomat.base.report.terminal import show
from tomat.base.reporting import console, counted, write_report
from tomat.data.density.rules import add_rule_flags, refuse_rules, rules_of


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add `tomat codec`."""
    verbs = subparsers.add_parser("codec", help="fit a codec to densities, or look at one").add_subparsers(
        title="verbs", metavar="VERB", required=True
    )
    fit = verbs.add_parser(
        "fit",
        help="fit Lloyd-Max bins to every voxel of many densities",
        description="Count every voxel, fit bins for absolute and for squared error, and keep those of the objective.",
    )
    source = fit.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", metavar="PATH", help="densities, or folders (also gs://) of them")
    source.add_argument("--demo", action="store_true", help="the embedded training densities")
    add_rule_flags(fit)
    add_flag(fit, "--bins", 16_384, "bins, the one of zero included", type=positive_int)
    fit.add_argument("--objective", choices=("absolute", "squared"), default="absolute", help="error to minimise")
    fit.add_argument(
        "--histogram", type=output_file, metavar="FILE", help="keep the counts here; goes on where it stopped"
    )
    fit.add_argument("--output", type=output_file, required=True, metavar="FILE", help="the codec, JSON")
    fit.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    fit.set_defaults(run=_run_fit)

    show = verbs.add_parser(
        "show",
        help="bins, mass, widths and NMAE floor of a codec",
        description="Bins of a codec, what share of the voxels lies in which, and the NMAE that no model can go below.",
    )
    show.add_argument("codec", type=Path, help="the codec, JSON")
    show.add_argument("--plot", type=output_file, metavar="FILE", help="draw the bins, .svg or .png")
    show.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    show.set_defaults(run=_run_show)


def _run_fit(args: argparse.Namespace) -> int:
    from tomat.data.codec.files import write_codec
    from tomat.data.codec.histogram import DensityHistogram
    from tomat.data.codec.inputs import demo_inputs, path_inputs
    from tomat.data.codec.lloyd_max import fit_lloyd_max
    from tomat.data.codec.report import codec_figures

    if not 2 <= args.bins <= 1 << 16:
        raise TomatError(f"--bins is {args.bins:,}; expected 2 to 65,536.")
    if args.demo:
        refuse_rules(args.species, args.accept, "the embedded densities")
    inputs = demo_inputs("train") if args.demo else path_inputs(args.input, rules_of(args.species, args.accept))
    kept: Path | None = args.histogram
    histogram = DensityHistogram.load(kept) if kept is not None and kept.exists() else DensityHistogram()

    def save() -> None:
        if kept is not None:
            histogram.save(kept)

    skipped = inputs.add_to(
        lambda name, grid: histogram.add(grid.rho, name),
        histogram.material_ids,
        save,
        what="Counting voxels",
        kept=kept,
    )
    console.print(f"Fitting {args.bins:,} bins to {histogram.n_voxels:,} voxels")
    codec = fit_lloyd_max(histogram, args.bins, args.objective)
    write_codec(codec, args.output)
    figures = codec_figures(codec) | {"skipped": skipped, "n_materials": len(histogram.material_ids)}
    write_report(args.json, figures)
    _print(figures, args.output)
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    return 0


def _run_show(args: argparse.Namespace) -> int:
    from tomat.data.codec.files import load_codec
    from tomat.data.codec.lloyd_max import LloydMaxCodec
    from tomat.data.codec.report import codec_figures, draw_codec

    codec = load_codec(args.codec)
    if args.plot is not None:
        if not isinstance(codec, LloydMaxCodec):
            raise TomatError(
                f"{args.codec} has levels at equal distances, nothing to draw; only Lloyd-Max codecs are drawn."
            )
        draw_codec(codec, args.plot)
    figures = codec_figures(codec)
    write_report(args.json, figures)
    _print(figures, args.codec)
    return 0


def _print(figures: dict[str, Any], path: Path) -> None:
    unit = {"e_per_A3": "e/A^3"}.get(figures["unit"], figures["unit"])
    rows = {
        "kind": f"{figures['kind']}, {counted(figures['tokens_per_voxel'], 'token')} a voxel, {unit}",
        "ids": f"{figures['n_density_tokens']:,}",
    }
    if "objective" in figures:
        low = figures["smallest_density"]
        smallest = "not recorded" if low is None else f"{low:.3g}"
        rows |= {
            "fitted for": f"{figures['objective']} error",
            "voxels": f"{figures['n_voxels']:,}, {100 * figures['zero_share']:.3g} % exactly zero",
            "densities fitted": f"{smallest} to {figures['largest_density']:.4g} {unit}, and zero",
            "voxels a bin": f"{figures['voxels_per_bin_min']:,} to {figures['voxels_per_bin_max']:,}",
            "bin width / median": ", ".join(
                f"{100 * value:.3g} % ({key})" for key, value in figures["relative_bin_width_by_voxel"].items()
            ),
        }
        for objective, floors in figures["nmae_floor_fraction"].items():
            text = ", ".join(f"{name}s {100 * value:.4f} %" for name, value in sorted(floors.items(), reverse=True))
            rows[f"NMAE floor, {objective} fit"] = text
    show(Facts(rows | {"sha256": figures["sha256"]}, str(path)))
