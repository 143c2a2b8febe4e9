"""`tomat predict`: predicts the densities of structures."""

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.arguments import add_report, add_verb, count, existing_file, positive_float, positive_int, run_folder
from tomat.base.errors import TomatError
from tomat.base.layout import PACKAGED_MODEL
from tomat.base.progress import progress
from tomat.base.reporting import console, counted, tell, write_report
from tomat.data.density.elements import SYMBOLS, atomic_number

if TYPE_CHECKING:
    from tomat.predict.inference.interface import Predictor

logger = logging.getLogger(__name__)

FORMATS = ("chgcar", "cube", "zarr", "json", "qe")
SOME_FAILED_STATUS = 1
"""Exit status if a structure or density failed and others may have succeeded."""
MOST_SHOWN = 10
"""Most ignored files that are listed by name."""


def register(subparsers: argparse._SubParsersAction) -> None:
    text = "predict densities of structures, with the model in the package, a run or a promolecule"
    parser = add_verb(subparsers, "predict", text, _run_predict)
    source = parser.add_mutually_exclusive_group()
    text = "predict with this sum of atoms, a promolecule.json"
    source.add_argument("--promolecule", type=existing_file, metavar="FILE", help=text)
    text = "folder of a run, such as runs/demo, or hf://ORG/NAME (default: the model in the package)"
    source.add_argument("--run", dest="run_dir", type=run_or_hub, default=PACKAGED_MODEL, metavar="PLACE", help=text)
    text = "POSCAR, CIF, CHGCAR (only its header is read), pymatgen's JSON, XYZ with a lattice, or folders of these"
    parser.add_argument("--structure", nargs="+", required=True, type=existing_place, metavar="PATH", help=text)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the outputs")
    parser.add_argument("--format", choices=FORMATS, default="chgcar", help="their format (default: %(default)s)")
    grid = parser.add_mutually_exclusive_group()
    grid.add_argument("--grid", type=positive_int, nargs=3, metavar=("NX", "NY", "NZ"), help="voxels along a, b, c")
    text = "largest voxel spacing in A (default: that of the training; 0.065 for a field model or promolecule)"
    grid.add_argument("--spacing", type=positive_float, metavar="A", help=text)
    grid.add_argument("--like", type=existing_place, metavar="PATH", help="use the grid of this density")
    text = "valence electrons, such as Sr=10,F=7 (default: those that follow from the training set)"
    parser.add_argument("--valences", type=valences, metavar="SYMBOL=N,...", help=text)
    text = "copy the augmentation occupancies of this CHGCAR"
    parser.add_argument("--augmentation_from", type=existing_file, metavar="CHGCAR", help=text)
    text = "for qe: charge-density.dat of pw.x for the same cell and cut-off, or a folder of NAME.save with one in each"
    parser.add_argument("--vectors_from", type=existing_place, metavar="PATH", help=text)
    parser.add_argument("--step", type=count, help="checkpoint of the run (default: the newest)")
    parser.add_argument("--rounds", type=positive_int, metavar="R", help="with --run: passes per patch (default: 1)")
    decoders = ("parallel", "autoregressive", "speculative")
    parser.add_argument("--decoder", choices=decoders, help="of a run (default: parallel)")
    text = "how the other decoders choose a bin (default: median; sampled with one of the next three)"
    parser.add_argument("--choice", choices=("greedy", "median", "sampled"), help=text)
    parser.add_argument("--samples", type=positive_int, metavar="N", help="samples to average (default: 1)")
    parser.add_argument("--temperature", type=positive_float, metavar="T", help="temperature of samples (default: 1)")
    parser.add_argument("--seed", type=count, metavar="S", help="seed of samples (default: 0)")
    text = "type of the keys and values that the autoregressive decoder keeps (default: compute, that of the model)"
    parser.add_argument("--kv_cache_dtype", choices=("compute", "int8"), help=text)
    parser.add_argument("--species", nargs="+", metavar="SYMBOL", help="elements of POSCARs that name none (VASP 4)")
    text = "distances: atoms at any distance; normalisation: densities more than 10 %% off their electrons"
    parser.add_argument("--accept", nargs="+", choices=("distances", "normalisation"), metavar="NAME", help=text)
    add_report(parser, "write the lines of all structures")


def existing_place(text: str) -> str:
    if not os.path.exists(text):
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return text


def run_or_hub(text: str) -> Path | str:
    """An argparse type: the local folder of a run, or the address of a model on the Hugging Face hub."""
    return text if text.startswith("hf://") else run_folder(text)


def valences(text: str) -> dict[int, float]:
    """An argparse type: `Sr=10,F=7`, by atomic number."""
    found: dict[int, float] = {}
    for part in text.split(","):
        symbol, _, number = part.strip().partition("=")
        if symbol not in SYMBOLS or not number:
            raise argparse.ArgumentTypeError(f"found '{part}', expected SYMBOL=N such as Sr=10")
        if atomic_number(symbol) in found:
            raise argparse.ArgumentTypeError(f"{symbol} is given twice")
        found[atomic_number(symbol)] = positive_float(number)
    return found


def _run_predict(args: argparse.Namespace) -> int:
    """Predict the density of each structure, and write it with a line of predictions.jsonl. Started again with the same
    flags, it predicts only what is missing. Exit status 1 if a structure could not be predicted."""
    from tomat.data.density.rules import ACCEPTABLE as READ_RULES
    from tomat.data.density.rules import rules_of

    names = ("step", "rounds", "decoder", "choice", "samples", "temperature", "seed", "kv_cache_dtype")
    of_a_run = {name: getattr(args, name) for name in names}
    given = {name: value for name, value in of_a_run.items() if value is not None}
    if args.promolecule is not None and given:
        raise TomatError(f"--{next(iter(given))} is for --run; a promolecule has one answer. Leave it out.")
    if args.kv_cache_dtype == "int8" and args.decoder != "autoregressive":
        said = f"--kv_cache_dtype int8: the {args.decoder or 'parallel'} decoder has no such cache"
        raise TomatError(f"{said}; add --decoder autoregressive.")
    if args.augmentation_from is not None and args.format != "chgcar":
        raise TomatError(f"--augmentation_from is for --format chgcar, not {args.format}. Leave it out.")
    if (args.format == "qe") != (args.vectors_from is not None):
        what = "the charge-density.dat of pw.x for the same cell and cut-off (electron_maxstep = 1 is enough)"
        raise TomatError(f"--vectors_from goes with --format qe, which needs it: {what}.")
    if args.output.exists() and not args.output.is_dir():
        raise TomatError(f"--output {args.output} is a file; expected a folder, which need not exist.")
    accept = tuple(args.accept or ())
    rules = rules_of(args.species, [name for name in accept if name in READ_RULES])

    from tomat.predict.inference.folder import LINES_FILE, Settings, predict_structures
    from tomat.predict.inference.interface import choose_grid
    from tomat.predict.inference.structures import check_species_used, find_structures

    files, ignored = find_structures(args.structure, args.output)
    check_species_used((file.path for file in files), rules)
    asked = args.promolecule or ("the model in the package" if args.run_dir == PACKAGED_MODEL else args.run_dir)
    tell(f"{counted(len(files), 'structure')} for {asked}")
    predictor: Predictor
    if args.promolecule is not None:
        from tomat.predict.inference.sum_of_atoms import load_promolecule

        predictor = load_promolecule(args.promolecule)
    else:
        from tomat.predict.inference.predictor import described

        # The model of the run is loaded later, for the first structure that is predicted.
        predictor = described(args.run_dir, **given)
        if (found := predictor.found) is not None and found.error is not None:
            console.print(f"{found}. {found.error}", soft_wrap=True)
    logger.info("predictor: %s", predictor.identity)
    grid = choose_grid(None if args.grid is None else tuple(args.grid), args.spacing, args.like, predictor.spacing_a)
    tell(f"grid: {grid.why}")
    settings = Settings(
        output=args.output,
        grid=grid,
        form=args.format,
        valences=args.valences,
        augmentation_from=None if args.augmentation_from is None else str(args.augmentation_from),
        vectors_from=args.vectors_from,
        rules=rules,
        accept=accept,
        recorded=given,
    )
    with progress() as bar:
        structures = bar.add_task("structures", total=len(files))
        patches = bar.add_task("patches", total=None, visible=False)

        def on_start(file: Any) -> None:
            bar.update(structures, description=file.name)
            bar.reset(patches, visible=False)

        def on_line(line: dict[str, Any], skipped: bool) -> None:
            for text in _said(line, skipped):
                bar.console.print(text, highlight=False, soft_wrap=True)
            bar.advance(structures)

        def on_patches(done: int, total: int) -> None:
            bar.update(patches, completed=done, total=total, visible=True)

        told = {"on_start": on_start, "on_line": on_line, "on_patches": on_patches}
        outcome = predict_structures(predictor, files, settings, **told)
        bar.update(structures, description="structures", completed=len(files))
    ignored |= outcome.ignored
    failed, skipped = outcome.failed, outcome.skipped
    done = f"{len(outcome.lines) - len(failed) - len(skipped):,} predicted, {len(skipped):,} already there"
    console.print(f"{done}, {len(failed):,} failed; {args.output / LINES_FILE}", soft_wrap=True)
    if ignored:
        names = ", ".join([*list(ignored)[:MOST_SHOWN], *(["..."] if len(ignored) > MOST_SHOWN else [])])
        console.print(f"ignored {counted(len(ignored), 'other file')}: {names}", soft_wrap=True)
    for line in failed:
        name = "" if line["name"] in line["error"] else f"{line['name']}: "
        console.print(f"failed: {name}{line['error']}", soft_wrap=True)
    report = {"structures": outcome.lines, "failed": [line["name"] for line in failed], "skipped": skipped}
    write_report(args.json, {**report, "ignored": ignored, "predictor": predictor.identity})
    return SOME_FAILED_STATUS if failed else 0


def _said(line: dict[str, Any], skipped: bool) -> list[str]:
    if "error" in line:
        return [f"{line['name']}: failed"]
    if skipped:
        return [f"{line['name']}: already there, from the same structure and settings"]
    sides = " x ".join(map(str, line["grid"]))
    electrons = f"{line['electrons_before']:.4f} electrons"
    if "not known" not in line["electrons_from"]:
        electrons += f", scaled to {line['electrons']:.4f} ({line['electrons_from']})"
    head = (
        f"{line['name']}: {line['formula']}, {sides} voxels, {line['seconds']:.1f} s, {electrons} -> {line['output']}"
    )
    return [head, *(f"  warning: {flag['text']}" for flag in line["flags"])]
