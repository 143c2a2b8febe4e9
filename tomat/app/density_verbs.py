"""`tomat demo-data` and `tomat density`: the embedded densities, and density files of any format."""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.app.predict_verbs import SOME_FAILED_STATUS, existing_place, valences
from tomat.base.arguments import add_report, add_verb, add_verbs, existing_file, picture_file
from tomat.base.errors import RetryableError, TomatError
from tomat.base.progress import progress
from tomat.base.report.model import Column, Facts, Table
from tomat.base.report.terminal import show
from tomat.base.reporting import console, counted, dump_json, write_report
from tomat.data.density.rules import add_rule_flags, refuse_rules, rules_of

if TYPE_CHECKING:
    from tomat.data.density.grid import DensityGrid
    from tomat.data.density.io import ReadRules

logger = logging.getLogger(__name__)

FORMATS = ("chgcar", "cube", "zarr", "json")
VALENCES_HELP = (
    "electrons that an atom of each element brings; a density with another number is refused (default: those of the "
    "POTCAR beside a file, else any number that pseudopotentials in use leave)"
)


def register(subparsers: argparse._SubParsersAction) -> None:
    moved = {"build": "`python profiling/embedded_set.py` in a checkout of tomat"}
    verbs = add_verbs(subparsers, "demo-data", "the embedded DFT densities", moved)
    text = "list the embedded cells, how they were computed and how well they converged"
    show = add_verb(verbs, "show", text, _run_show_demo)
    show.add_argument("material_id", nargs="?", help="one cell in full")
    add_report(show, "write what is shown as JSON")

    verbs = add_verbs(subparsers, "density", "look at, convert and compare files of densities")
    show = add_verb(verbs, "show", "formula, electrons, grid and range of a density", _run_show)
    show.add_argument("input", nargs="+", metavar="PATH", help="files, or folders (also gs://) of them")
    add_rule_flags(show)
    show.add_argument("--valences", type=valences, metavar="SYMBOL=N,...", help=VALENCES_HELP)
    show.add_argument("--picture", type=picture_file, metavar="FILE", help="a plane of one density, .png .svg .pdf")
    add_report(show)

    text = "write densities in another format: CHGCAR, cube, Zarr, Materials Project JSON"
    convert = add_verb(verbs, "convert", text, _run_convert)
    source = convert.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", metavar="PATH", help="densities, or folders (also gs://) of them")
    source.add_argument("--demo", nargs="+", metavar="ID", help="embedded cells, on their stored grids")
    add_rule_flags(convert)
    convert.add_argument("--valences", type=valences, metavar="SYMBOL=N,...", help=VALENCES_HELP)
    text = "file whose name says the format; with --format, a folder"
    convert.add_argument("--output", type=Path, required=True, metavar="PATH", help=text)
    convert.add_argument("--format", choices=FORMATS, help="write each as NAME with the ending of the format")
    text = "copy the augmentation occupancies of this CHGCAR"
    convert.add_argument("--augmentation_from", type=existing_file, metavar="CHGCAR", help=text)
    add_report(convert, "write the list of written files")

    compare = add_verb(verbs, "compare", "NMAE of two densities of one crystal", _run_compare)
    compare.add_argument("reference", type=existing_place, metavar="REFERENCE", help="the density to compare with")
    compare.add_argument("other", type=existing_place, metavar="OTHER", help="a prediction, or another calculation")
    add_rule_flags(compare)
    compare.add_argument("--picture", type=picture_file, metavar="FILE", help="draw both and the difference")
    add_report(compare)


def _run_show_demo(args: argparse.Namespace) -> int:
    """List the embedded cells, the settings they were computed with, and the measured error of these settings."""
    from tomat.data.density.demo.embedded import GROUPS, demo_index, load_demo, load_stored

    if args.material_id:
        grid = load_demo(args.material_id)
        entry = next(cell for cell in demo_index()["cells"] if cell["material_id"] == args.material_id)
        stored = load_stored(args.material_id).electron_count
        report = {
            **entry,
            "electron_count": grid.electron_count,
            "stored_electron_count": stored,
            "formula": grid.formula,
        }
        console.print_json(dump_json(report))
        write_report(args.json, report)
        return 0

    def by(mesh: Any) -> str:
        return "x".join(map(str, mesh))

    headings = ("cell", "group", "split", "electrons", "cut-off / Ha", "k-mesh", "native", "refined", "spacing / A")
    cells = []
    for cell in demo_index()["cells"]:
        recipe, electrons = cell["recipe"], cell["calculation"]["valence_electrons"]
        settings = (recipe["group"], recipe["split"], electrons, f"{recipe['e_cut_hartree']:g}", by(recipe["k_mesh"]))
        grids = (by(cell["native_shape"]), by(cell["refined_shape"]), f"{max(cell['refined_spacing_a']):.4f}")
        cells.append((cell["material_id"], *settings, *grids))
    errors = []
    for entry in demo_index()["convergence"]:
        cut_off, mesh = f"{entry['reference_e_cut_hartree']:g} Ha", by(entry["reference_k_mesh"])
        nmae = "reference did not converge" if entry["nmae_percent"] is None else f"{entry['nmae_percent']:.2f}"
        raised = mesh if entry["setting"] == "k_mesh" else cut_off
        errors.append((entry["material_id"], entry["setting"], raised, nmae))
    title = "Measured error of the settings: NMAE against the same cell with one setting raised"
    of_errors = list(map(Column, ("cell", "setting", "raised to", "NMAE / %")))
    recipes = [cell["recipe"] for cell in demo_index()["cells"]]
    groups = []
    for name, words in GROUPS.items():
        splits = [recipe["split"] for recipe in recipes if recipe["group"] == name]
        if splits:
            groups.append((name, len(splits), splits.count("validation"), words))
    of_groups = list(map(Column, ("group", "cells", "held out", "what")))
    show(Table("", list(map(Column, headings)), cells), Table(title, of_errors, errors), Table("", of_groups, groups))
    write_report(args.json, demo_index())
    return 0


def _run_show(args: argparse.Namespace) -> int:
    """Show formula, electrons found and expected, grid, spacing, range, and what a file holds besides the total
    density."""
    from tomat.data.density.io import check_species_apply, find_densities, ignored_words

    rules = rules_of(args.species, args.accept)
    found = find_densities(args.input, accept=rules.accept)
    if args.picture is not None and len(found.files) > 1:
        raise TomatError(f"--picture draws one density, and {len(found.files):,} were found; name one file.")
    check_species_apply((file.path for file in found.files), rules)
    shown, failed = [], {}
    for file in found.files:
        try:
            figures, grid = _shown(file.path, file.name, rules, args.valences)
        except RetryableError:
            raise
        except TomatError as error:
            if len(found.files) == 1:
                raise
            failed[file.path] = str(error)
            continue
        shown.append(figures)
        if args.picture is not None:
            from tomat.predict.evaluation.picture import draw_density

            console.print(f"picture: {draw_density(grid, args.picture)}")
    if len(found.files) > 1 or found.ignored:
        words = f"{len(shown):,} read, {len(failed):,} failed, {ignored_words(found.ignored)}"
        console.print(words, soft_wrap=True)
    for path, reason in failed.items():
        console.print(f"failed: {reason if path in reason else f'{path}: {reason}'}", soft_wrap=True)
    write_report(args.json, {"densities": shown, "failed": failed, "ignored": dict(found.ignored)})
    if failed and not shown:
        raise TomatError(f"none of {counted(len(failed), 'density', 'densities')} could be read.")
    return SOME_FAILED_STATUS if failed else 0


def _shown(path: str, name: str, rules: Any, given: Any) -> "tuple[dict[str, Any], DensityGrid]":
    """Print the content of one file. Returns its figures, with units in the keys, and its density."""
    from tomat.data.dataset.valences import expected_electrons, rules_for
    from tomat.data.density.atoms_on_density import DOUBTFUL_MISFIT, misfit_of
    from tomat.data.density.crystal import Crystal
    from tomat.data.density.io import format_name, open_density, parts_beside

    grid = open_density(path, name, rules_for(path, rules, given))
    parts = parts_beside(path)
    misfit = misfit_of(grid.rho, Crystal.of(grid))
    expected, expected_from = expected_electrons(grid, path, given)
    figures = {
        "name": name,
        "path": path,
        "format": format_name(path),
        "formula": grid.formula,
        "atoms": len(grid.atomic_numbers),
        "electrons": grid.electron_count,
        "electrons_expected": expected,
        "electrons_expected_from": expected_from,
        "grid": list(grid.grid_shape),
        "spacing_a": list(grid.spacing_a),
        "volume_a3": grid.volume_a3,
        "spin_densities": parts.spin_densities,
        "augmentation": parts.augmentation,
        "ghost_atoms": parts.ghost_atoms,
        "smallest_e_per_a3": float(grid.rho.min()),
        "mean_e_per_a3": grid.electron_count / grid.volume_a3,
        "largest_e_per_a3": float(grid.rho.max()),
        "negative_voxels_set_to_zero": grid.clipped_voxels,
        "electrons_added_by_that": grid.clipped_electrons,
        "misfit_of_a_sum_of_atoms_fraction": None if misfit is None else misfit.share,
    }
    found = grid.electron_count
    low, mean, high = (figures[f"{name}_e_per_a3"] for name in ("smallest", "mean", "largest"))
    rows = {
        "format": figures["format"],
        "formula": f"{figures['formula']}, {counted(figures['atoms'], 'atom')}",
        "electrons": f"{found:.6f}; expected {expected:g} ({figures['electrons_expected_from']}), "
        f"{found - expected:+.2g}",
        "grid": " x ".join(map(str, figures["grid"])),
        "spacing": " x ".join(f"{side:.4f}" for side in figures["spacing_a"]) + " A",
        "volume": f"{figures['volume_a3']:.4f} A^3",
        "spin densities": f"{figures['spin_densities'] or 'none'}",
        "augmentation": "present" if figures["augmentation"] else "none",
        "ghost atoms": f"{figures['ghost_atoms']} (Z = 0), left out" if figures["ghost_atoms"] else None,
        "range": f"{low:.4g} to {high:.4g} e/Å³, mean {mean:.4g}",
    }
    if misfit is not None:
        much = "; that is much: do these atoms belong to it?" if misfit.share > DOUBTFUL_MISFIT else ""
        rows["atoms"] = f"one function per element around them leaves {100 * misfit.share:.2g} % of the density{much}"
    if grid.clipped_voxels:
        read = f"adds {grid.clipped_electrons:.2g} electrons to the {found - grid.clipped_electrons:.6f} in the file"
        rows["negative"] = f"{counted(grid.clipped_voxels, 'voxel')} set to zero: {read}"
    show(Facts(rows, path))
    return figures, grid


def _run_convert(args: argparse.Namespace) -> int:
    """Write densities in another format. The total density is kept, and from CHGCAR to CHGCAR the augmentation
    occupancies too. The command says what it does not keep."""
    from tomat.data.density.io import check_species_apply, find_densities, ignored_words
    from tomat.data.density.outputs import FORMATS as ENDINGS
    from tomat.data.density.outputs import OutputError, form_of

    rules = rules_of(args.species, args.accept)
    paths: dict[str, str | None] = dict.fromkeys(args.demo or ())
    ignored = ""
    if args.demo is not None:
        refuse_rules(args.species, args.accept, "the embedded densities")
    else:
        found = find_densities(args.input, accept=rules.accept)
        check_species_apply((file.path for file in found.files), rules)
        paths = {file.name: file.path for file in found.files}
        ignored = f"; {ignored_words(found.ignored)}" if found.ignored else ""
    if args.format is None:
        if len(paths) > 1:
            raise TomatError(f"{len(paths):,} densities for one file, {args.output}; give --format and a folder.")
        targets = {next(iter(paths)): (args.output, form_of(args.output))}
    else:
        if args.output.exists() and not args.output.is_dir():
            raise TomatError(f"--output {args.output} is a file; --format needs a folder.")
        targets = {name: (args.output / f"{name}{ENDINGS[args.format]}", args.format) for name in paths}
    if args.augmentation_from is not None and any(form != "chgcar" for _, form in targets.values()):
        raise TomatError("--augmentation_from is for CHGCARs. Leave it out, or write a CHGCAR.")
    written, failed = [], {}
    with progress() as bar:
        for name, (target, form) in bar.track(targets.items(), description="Converting"):
            try:
                written.append(_convert(args, rules, name, paths[name], target, form))
            except (RetryableError, OutputError):
                raise
            except TomatError as error:
                if len(targets) == 1:
                    raise
                failed[name] = str(error)
                continue
            for note in written[-1]["not_kept"]:
                bar.console.print(f"{name}: {note}", soft_wrap=True)
    last = written[-1]["output"] if len(written) == 1 else str(args.output)
    console.print(f"{counted(len(written), 'density', 'densities')} -> {last}{ignored}", soft_wrap=True)
    for name, reason in failed.items():
        console.print(f"failed: {name}: {reason}", soft_wrap=True)
    write_report(args.json, {"written": written, "failed": failed})
    return SOME_FAILED_STATUS if failed else 0


def _convert(
    args: argparse.Namespace, rules: "ReadRules", name: str, path: str | None, target: Path, form: str
) -> dict[str, Any]:
    """Write one density, from a file or (without a path) the embedded one. Returns its entry of the report."""
    from tomat.data.dataset.valences import rules_for
    from tomat.data.density.chgcar import Parts, read_augmentation
    from tomat.data.density.demo.embedded import load_stored
    from tomat.data.density.io import is_chgcar, open_density, parts_beside
    from tomat.data.density.outputs import write_density
    from tomat.predict.inference.interface import DISTANCE_TOLERANCE_A

    if path is None:
        grid, parts = load_stored(name), Parts()
    else:
        grid, parts = open_density(path, name, rules_for(path, rules, args.valences)), parts_beside(path)
    for given in (path, args.augmentation_from):
        if given is not None and target.exists() and Path(given).exists() and target.samefile(given):
            raise TomatError(f"the output {target} is {given}, which is also an input; expected another --output.")
    augmentation = None
    if args.augmentation_from is not None:
        augmentation = read_augmentation(args.augmentation_from, rules)
    elif path is not None and parts.augmentation and form == "chgcar" and is_chgcar(path):
        augmentation = read_augmentation(path, rules)
    write_density(grid, target, form, augmentation=augmentation)
    if augmentation is not None:
        apart_a = augmentation.apart_a(grid.lattice, grid.frac_coords)
        if apart_a > DISTANCE_TOLERANCE_A:
            of = "%s: the augmentation occupancies belong to atoms or axes up to %.3f A from these"
            logger.warning(of, name, apart_a)
    not_kept = []
    if parts.spin_densities:
        not_kept.append(f"{parts.spin_densities} spin density(s) not kept; only the total density is written")
    if parts.augmentation and augmentation is None:
        not_kept.append(f"augmentation occupancies not kept; they go only from CHGCAR to CHGCAR, not to {form}")
    if parts.ghost_atoms:
        not_kept.append(f"{parts.ghost_atoms} ghost atom(s) (Z = 0) not kept")
    if grid.clipped_voxels:
        not_kept.append(f"{grid.clipped_voxels:,} negative voxel(s) written as zero")
    return {
        "name": name,
        "output": str(target),
        "format": form,
        "electrons": grid.electron_count,
        "augmentation": augmentation is not None,
        "not_kept": not_kept,
    }


def _run_compare(args: argparse.Namespace) -> int:
    """Measure how far a density is from a reference of the same crystal. Grids that differ are interpolated, by their
    Fourier series, to the finer sides."""
    from tomat.data.density.io import check_species_apply, open_density
    from tomat.predict.evaluation.difference import compare_densities
    from tomat.predict.evaluation.picture import compared_plane, draw_plane

    rules = rules_of(args.species, args.accept)
    places = (args.reference, args.other)
    check_species_apply(places, rules)
    reference, other = (open_density(path, str(Path(*Path(path).parts[-2:])), rules) for path in places)
    found = compare_densities(reference, other)
    largest, place = found.largest
    figures = {
        "reference": args.reference,
        "other": args.other,
        "formula": reference.formula,
        "grids": [list(reference.grid_shape), list(other.grid_shape)],
        "compared_on": list(found.reference.grid_shape),
        "electrons": [reference.electron_count, other.electron_count],
        "nmae_fraction": found.nmae,
        "nmae_scaled_fraction": found.scaled_nmae,
        "largest_difference_e_per_a3": largest,
        "largest_difference_frac_coords": list(place),
    }
    sides = " x ".join(map(str, figures["compared_on"]))
    of = ", ".join(" x ".join(map(str, shape)) for shape in figures["grids"])
    rows = {
        "formula": figures["formula"],
        "electrons": f"{other.electron_count:.6f} against {reference.electron_count:.6f}",
        "grid": f"{sides}, interpolated from {of}" if found.refined else sides,
        "NMAE": f"{100 * found.nmae:.4g} %",
        "NMAE, same electrons": f"{100 * found.scaled_nmae:.4g} %",
        "largest difference": f"{largest:.4g} e/Å³ at ({place[0]:.3f}, {place[1]:.3f}, {place[2]:.3f}) of the cell",
    }
    show(Facts(rows, f"{args.other} against {args.reference}"))
    if args.picture is not None:
        console.print(f"picture: {draw_plane(compared_plane(found.reference, found.other), args.picture)}")
    write_report(args.json, figures)
    return 0
