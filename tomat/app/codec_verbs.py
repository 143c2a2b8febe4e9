"""`tomat codec` and `tomat promolecule`: fit a codec or a promolecule to many densities, and show one."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.arguments import add_flag, add_report, add_verb, add_verbs, output_file, positive_int
from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.report.model import Facts
from tomat.base.report.terminal import show
from tomat.base.reporting import console, counted, tell, write_report, write_text
from tomat.data.density.rules import add_rule_flags, refuse_rules, rules_of

if TYPE_CHECKING:
    from tomat.data.codec.histogram import DensityHistogram
    from tomat.data.codec.ratios import RatioHistogram
    from tomat.data.tokens.pipeline.sources import DensityInputs


def register(subparsers: argparse._SubParsersAction) -> None:
    verbs = add_verbs(subparsers, "codec", "fit a codec to densities, or look at one")
    fit = add_verb(verbs, "fit", "fit Lloyd-Max bins to every voxel of many densities", _run_fit)
    _add_source(fit)
    add_flag(fit, "--bins", 16_384, "number of bins, including that of zero", type=positive_int)
    fit.add_argument("--objective", choices=("absolute", "squared"), default="absolute", help="error to minimise")
    text = "fit bins of the ratio to this sum of atoms, from `tomat promolecule fit`; the codec keeps it"
    fit.add_argument("--promolecule", type=Path, metavar="FILE", help=text)
    text = "added to density and sum of atoms before division, e/Å³ (default: 0.01)"
    fit.add_argument("--offset", type=float, metavar="E", help=text)
    text = "file for the counts; a stopped fit goes on there"
    fit.add_argument("--histogram", type=output_file, metavar="FILE", help=text)
    fit.add_argument("--output", type=output_file, required=True, metavar="FILE", help="the codec, JSON")
    add_report(fit)
    show = add_verb(verbs, "show", "bins, mass, widths and NMAE floor of a codec", _run_show)
    show.add_argument("codec", type=Path, help="the codec, JSON")
    show.add_argument("--plot", type=output_file, metavar="FILE", help="draw the bins, .svg or .png")
    add_report(show)

    verbs = add_verbs(subparsers, "promolecule", "fit a sum of atoms to densities, or look at one")
    fit = add_verb(verbs, "fit", "fit one radial density per element to many densities", _run_fit_promolecule)
    _add_source(fit)
    fit.add_argument("--sums", type=output_file, metavar="FILE", help="file for the sums; a stopped fit goes on there")
    fit.add_argument("--output", type=output_file, required=True, metavar="FILE", help="the promolecule, JSON")
    add_report(fit)
    show = add_verb(verbs, "show", "elements and electrons of a promolecule", _run_show_promolecule)
    show.add_argument("promolecule", type=Path, help="the promolecule, JSON")
    add_report(show)


def _add_source(fit: argparse.ArgumentParser) -> None:
    source = fit.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", metavar="PATH", help="densities, or folders (also gs://) of them")
    source.add_argument("--demo", action="store_true", help="the embedded training densities")
    add_rule_flags(fit)


def _inputs(args: argparse.Namespace) -> "DensityInputs":
    from tomat.data.tokens.pipeline.sources import demo_inputs, path_inputs

    if args.demo:
        refuse_rules(args.species, args.accept, "the embedded densities")
        return demo_inputs("train")
    return path_inputs(args.input, rules_of(args.species, args.accept))


def _run_fit(args: argparse.Namespace) -> int:
    """Count every voxel, fit bins for absolute and for squared error, and keep those of the objective. With
    --promolecule the fitted quantity is (density + offset) / (promolecule + offset)."""
    from tomat.data.codec.files import write_codec
    from tomat.data.codec.ratios import fit_codec
    from tomat.data.codec.report import codec_figures

    if not 2 <= args.bins <= 1 << 16:
        raise TomatError(f"--bins is {args.bins:,}; expected 2 to 65,536.")
    inputs = _inputs(args)
    kept: Path | None = args.histogram
    histogram = _histogram(args, kept if kept is not None and kept.exists() else None)
    names, to_bytes = histogram.material_ids, histogram.to_bytes
    skipped = inputs.add_to(histogram.add_grid, names, to_bytes, what="Counting voxels", kept=kept)
    tell(f"Fitting {args.bins:,} bins to {histogram.n_voxels:,} voxels")
    codec = fit_codec(histogram, args.bins, args.objective)
    write_codec(codec, args.output)
    figures = codec_figures(codec, args.output) | {"skipped": skipped, "n_materials": len(histogram.material_ids)}
    write_report(args.json, figures)
    _print(figures, args.output)
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    return 0


def _histogram(args: argparse.Namespace, kept: Path | None) -> "DensityHistogram | RatioHistogram":
    """The histogram for the fit, with the counts that an earlier start has kept."""
    from tomat.data.codec.histogram import DensityHistogram
    from tomat.data.codec.ratios import RatioHistogram
    from tomat.data.codec.relative import OFFSET_E_PER_A3
    from tomat.data.density.promolecule import Promolecule

    again = "Remove it and count again."
    if args.promolecule is None:
        if args.offset is not None:
            raise TomatError("--offset is for a codec relative to a sum of atoms; give that with --promolecule FILE.")
        return DensityHistogram() if kept is None else DensityHistogram.from_bytes(kept.read_bytes(), str(kept), again)
    promolecule = Promolecule.load(args.promolecule)
    offset = OFFSET_E_PER_A3 if args.offset is None else args.offset
    if kept is None:
        return RatioHistogram(promolecule, offset)
    return RatioHistogram.from_bytes(kept.read_bytes(), str(kept), promolecule, offset, again)


def _run_show(args: argparse.Namespace) -> int:
    """Show the bins of a codec, the share of the voxels in them, and the NMAE that no model can go below."""
    from tomat.data.codec.files import load_codec
    from tomat.data.codec.lloyd_max import LloydMaxCodec
    from tomat.data.codec.report import codec_figures, draw_codec

    codec = load_codec(args.codec)
    if args.plot is not None:
        if not isinstance(codec, LloydMaxCodec):
            raise TomatError(f"{args.codec} has evenly spaced levels, so nothing to draw; give a Lloyd-Max codec.")
        draw_codec(codec, args.plot, args.codec)
    figures = codec_figures(codec, args.codec)
    write_report(args.json, figures)
    _print(figures, args.codec)
    return 0


def _print(figures: dict[str, Any], path: Path) -> None:
    unit = {"e_per_A3": "e/Å³"}.get(figures["unit"], figures["unit"])
    rows = {
        "kind": f"{figures['kind']}, {counted(figures['tokens_per_voxel'], 'token')} a voxel, {unit}",
        "ids": f"{figures['n_density_tokens']:,}",
    }
    if "objective" in figures:
        voxels = f"{figures['n_voxels']:,}"
        if (offset := figures.get("offset_e_per_A3")) is not None:
            ratio = f"(density + {offset:g}) / (sum of atoms + {offset:g})"
            seen = {"bins of": f"{ratio}, promolecule {figures['promolecule_sha256'][:16]}..."}
            seen |= {"ratios fitted": f"{figures['smallest_ratio']:.3g} to {figures['largest_ratio']:.4g}"}
        else:
            low = figures["smallest_density"]
            smallest = "not recorded" if low is None else f"{low:.3g}"
            seen = {"densities fitted": f"{smallest} to {figures['largest_density']:.4g} {unit}, and zero"}
            voxels += f", {100 * figures['zero_share']:.3g} % exactly zero"
        rows |= {
            "fitted for": f"{figures['objective']} error",
            "voxels": voxels,
            **seen,
            "voxels a bin": f"{figures['voxels_per_bin_min']:,} to {figures['voxels_per_bin_max']:,}",
            "bin width / median": ", ".join(
                f"{100 * value:.3g} % ({key})" for key, value in figures["relative_bin_width_by_voxel"].items()
            ),
        }
        for objective, floors in figures["nmae_floor_fraction"].items():
            text = ", ".join(f"{name}s {100 * value:.4f} %" for name, value in sorted(floors.items(), reverse=True))
            rows[f"NMAE floor, {objective} fit"] = text
    show(Facts(rows | {"sha256": figures["sha256"]}, str(path)))


def _run_fit_promolecule(args: argparse.Namespace) -> int:
    """Fit a sum over atoms of one non-negative radial function per element, and report its NMAE on the densities that
    it was fitted to."""
    import numpy as np

    from tomat.data.density.promolecule import PromoleculeFit

    inputs = _inputs(args)
    kept: Path | None = args.sums
    fit = PromoleculeFit()
    if kept is not None and kept.exists():
        fit = PromoleculeFit.from_bytes(kept.read_bytes(), str(kept), "Remove it and fit again.")
    skipped = inputs.add_to(fit.add, fit.material_ids, fit.to_bytes, what="Adding densities", kept=kept)
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
    over = {"mean": float(np.mean(values)), "median": float(np.median(values)), "worst": max(values)}
    figures = {"skipped": skipped, "nmae_fraction": over, "nmae_fraction_by_material": nmae}
    write_report(args.json, _show_promolecule(promolecule, args.output) | figures)
    console.print(
        f"NMAE on these densities, whole cells: median {100 * over['median']:.2f} %, mean {100 * over['mean']:.2f} %, "
        f"worst {100 * over['worst']:.2f} % ({max(nmae, key=nmae.__getitem__)})"
    )
    for name, reason in skipped.items():
        console.print(f"skipped {name}: {reason}")
    return 0


def _run_show_promolecule(args: argparse.Namespace) -> int:
    """Show the elements of a promolecule, and the electrons that each brings."""
    from tomat.data.density.promolecule import Promolecule

    figures = _show_promolecule(Promolecule.load(args.promolecule), args.promolecule)
    write_report(args.json, figures)
    return 0


def _show_promolecule(promolecule: Any, path: Path) -> dict[str, Any]:
    """Print the content of a promolecule and return its figures."""
    from tomat.data.density.elements import symbol_of

    basis, electrons = promolecule.basis, promolecule.electrons()
    figures = {
        "n_materials": promolecule.n_materials,
        "functions": basis.n,
        "cutoff_a": basis.cutoff_a,
        "electrons": {symbol_of(z): number for z, number in electrons.items()},
        "sha256": promolecule.sha256,
    }
    rows = {
        "fitted to": counted(promolecule.n_materials, "density", "densities"),
        "each element": f"{basis.n} radial functions to {basis.cutoff_a:g} A",
        "electrons": ", ".join(f"{symbol} {value:.2f}" for symbol, value in figures["electrons"].items()),
        "sha256": promolecule.sha256,
    }
    show(Facts(rows, str(path)))
    return figures
