"""`tomat eval`: the teacher-forced diagnostic of a trained run, beside its baselines."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.arguments import (
    add_flag,
    add_report,
    add_verb,
    config_file,
    count,
    existing_file,
    picture_file,
    positive_float,
    positive_int,
    run_folder,
)
from tomat.base.errors import TomatError
from tomat.base.reporting import console, counted, tell, to_jsonable, write_json
from tomat.data.density.rules import add_rule_flags, refuse_rules, rules_of

DECODERS = ("parallel", "autoregressive", "speculative")
"""Decoders of a run. All except the first choose bins."""
OF_A_RUN = ("step", "split", "groups", "input", "species", "accept", "against", "picture", "free_running", "samples",
            "temperature", "kv_cache_dtype", "patches_per_material", "whole_cell", "seed", "batch_size")  # fmt: skip
"""Flags that do not go with `--leave_one_out`."""

if TYPE_CHECKING:  # imported only when the verb runs
    from collections.abc import Callable, Sequence

    from tomat.data.density.grid import DensityGrid
    from tomat.predict.evaluation.result import TeacherForcedResult
    from tomat.train.settings.config import TrainConfig


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "teacher-forced NMAE and NEMD of a run on held-out materials, beside baselines"
    parser = add_verb(subparsers, "eval", text, _run_eval)
    text = "the run's folder, such as runs/demo"
    parser.add_argument("--run", dest="run_dir", type=run_folder, metavar="DIR", help=text)
    text = (
        "instead of a run: train this recipe without each embedded compound in turn, and judge it by the one left out"
    )
    parser.add_argument("--leave_one_out", type=config_file("train"), metavar="CONFIG", help=text)
    parser.add_argument("--compounds", nargs="+", metavar="A", help="compounds to leave out in turn (default: all)")
    text = "with --leave_one_out: split the compounds into N groups, and leave out a group at a time"
    parser.add_argument("--folds", type=positive_int, metavar="N", help=text)
    parser.add_argument("--steps", type=positive_int, metavar="N", help="steps of each run of --leave_one_out")
    parser.add_argument("--step", type=count, help="checkpoint to evaluate (default: the newest)")
    source = parser.add_mutually_exclusive_group()
    text = "materials of the embedded set (default: validation; for a run on a folder, what it held out)"
    source.add_argument("--split", choices=("train", "validation"), help=text)
    text = "groups of the embedded set, as `tomat demo-data show` lists them (default: crystals)"
    parser.add_argument("--groups", nargs="+", metavar="GROUP", help=text)
    text = "densities to use instead: CHGCAR, cube, Zarr, Materials Project JSON, or folders of them"
    source.add_argument("--input", nargs="+", metavar="PATH", help=text)
    add_rule_flags(parser)
    add_flag(parser, "--patches_per_material", 8, "random patches of each material", type=positive_int, metavar="N")
    parser.add_argument("--whole_cell", action="store_true", help="tile each cell, counting every voxel once")
    parser.add_argument("--seed", type=count, default=0, help="seeds the patches' anchors (default: 0)")
    add_flag(parser, "--batch_size", 8, "sequences per forward pass", type=positive_int, metavar="B")
    text = "earlier --json report to compare with, paired by material"
    parser.add_argument("--against", type=existing_file, metavar="FILE", help=text)
    text = "draw a plane of the first material (.png, .svg or .pdf)"
    parser.add_argument("--picture", type=picture_file, metavar="FILE", help=text)
    text = f"also predict whole cells from their structures alone, by each of these decoders: {', '.join(DECODERS)} "
    text += "(default: parallel); needs a run with model.environment and density_dropout"
    parser.add_argument("--free_running", nargs="*", choices=DECODERS, metavar="DECODER", help=text)
    text = "draw N samples with the decoders that choose bins: their mean, and how well their spread tells the error"
    parser.add_argument("--samples", type=positive_int, metavar="N", help=text)
    parser.add_argument("--temperature", type=positive_float, metavar="T", help="temperature of samples (default: 1)")
    text = "type of the keys and values that the autoregressive decoder keeps (default: compute, that of the model)"
    parser.add_argument("--kv_cache_dtype", choices=("compute", "int8"), help=text)
    add_report(parser, "write the figures of every material")
    parser.set_defaults(takes_overrides=True, not_given={name: parser.get_default(name) for name in OF_A_RUN})


def _run_eval(args: argparse.Namespace) -> int:
    """Teacher-forced NMAE and NEMD of a run on held-out materials, beside constant, copy-previous and Lorenzo
    baselines. A diagnostic, not a prediction: the model reads the true values of all earlier voxels."""
    if args.leave_one_out is not None:
        return _run_leave_one_out(args)
    if args.overrides:
        raise TomatError(f"tomat eval --run has no flag {args.overrides[0]}; only --leave_one_out takes settings.")
    if args.run_dir is None or args.compounds or args.folds or args.steps:
        alone = "only the latter takes --compounds, --folds and --steps"
        raise TomatError(f"give --run RUN, or --leave_one_out CONFIG; {alone}.")
    decoders = [] if args.free_running is None else list(dict.fromkeys(args.free_running)) or ["parallel"]
    drawn = {name: value for name in ("samples", "temperature") if (value := getattr(args, name)) is not None}
    cache = {} if args.kv_cache_dtype is None else {"kv_cache_dtype": args.kv_cache_dtype}
    for name in drawn | cache:
        able = ("autoregressive",) if name in cache else DECODERS[1:]
        if not set(able) & set(decoders):
            raise TomatError(f"--{name} is for the decoder {' or '.join(able)}; add --free_running {able[0]}.")
    for place in args.input or ():
        if "://" not in place and not os.path.exists(place):
            raise TomatError(f"{place} does not exist; --input takes the densities that `tomat tokenize` reads.")
    earlier = None if args.against is None else read_report(args.against)

    from tomat.app.workflow.held_out import evaluate_with_bar, partial_path, predict_with_bar
    from tomat.base.report.terminal import show
    from tomat.data.density.demo.embedded import groups_of, load_demo
    from tomat.model.any_decoder import is_field
    from tomat.predict.evaluation.picture import draw_plane, teacher_forced_plane
    from tomat.predict.evaluation.result import MOST_SHOWN
    from tomat.predict.evaluation.teacher_forced import TeacherForcedConfig, evaluator_of
    from tomat.predict.inference.interface import Choice
    from tomat.predict.inference.predictor import RunPredictor
    from tomat.predict.inference.trained import load_weights_found
    from tomat.predict.weights.record import find_weights

    chosen = {"choice": Choice("sampled" if drawn else "median", **drawn)}
    own = {"autoregressive": {**chosen, **cache}, "speculative": chosen}
    flags = ("patches_per_material", "whole_cell", "seed", "batch_size")
    config = TeacherForcedConfig(**{flag: getattr(args, flag) for flag in flags})
    weights = find_weights(args.run_dir, args.step)
    run = load_weights_found(weights, packed=True)
    names, load, materials_from, files = _materials(args, run.config)
    settings = run.settings(materials_from)
    groups = groups_of(names) if load is load_demo else None
    if is_field(run.config.model):
        idle = ("against", "picture", *flags)
        if decoders != ["parallel"] or any(getattr(args, name) != args.not_given[name] for name in idle):
            said = f"{args.run_dir} holds a field model, which reads no density and so has no teacher-forced evaluation"
            raise TomatError(f"{said}. Give --free_running alone; leave decoders and --{', --'.join(idle)} out.")
        cells = predict_with_bar(RunPredictor(run), names, load, settings, groups)
        show(cells.table(MOST_SHOWN), cells.summary())
        _write(args.json, {"settings": settings, "free_running": cells.to_dict()})
        return 0
    predictors = {decoder: RunPredictor(run, decoder=decoder, **own.get(decoder, {})) for decoder in decoders}
    with evaluator_of(run, config) as (evaluator, model):
        of = {"weights_sha256": weights.sha256, "files_sha256": files_sha256(files)}
        result = evaluate_with_bar(evaluator, model, names, load, settings, args.json, of)
        show(result.table(MOST_SHOWN), result.summary())
        if earlier is not None:
            found = result.compare(earlier)
            low, high = 100 * found.mean_difference_ci95_low, 100 * found.mean_difference_ci95_high
            verdict = "leaves out zero" if found.decided else "holds zero, so neither is shown to be better"
            console.print(
                f"Against {args.against}: mean difference in NMAE {100 * found.mean_difference:+.3f} points, 95 % "
                f"interval {low:+.3f} to {high:+.3f}, which {verdict}; lower on {found.first_better}, higher on "
                f"{found.second_better} of {found.materials} materials (sign test p = {found.sign_test_p_value:.2g})."
            )
        figures = result.to_dict()
        for decoder, predictor in predictors.items():
            cells = predict_with_bar(predictor, names, load, settings, groups)
            show(cells.table(MOST_SHOWN), cells.summary())
            figures["free_running" if decoder == "parallel" else f"free_running_{decoder}"] = cells.to_dict()
        _write(args.json, figures)
        if args.json is not None:
            partial_path(args.json).unlink(missing_ok=True)
        if args.picture is not None:
            plane = teacher_forced_plane(evaluator, model, load(names[0]))
            console.print(f"picture: {draw_plane(plane, args.picture)}")
    return 0


def _run_leave_one_out(args: argparse.Namespace) -> int:
    if args.run_dir is not None:
        raise TomatError("--leave_one_out trains runs of its own; leave --run out.")
    if given := next((name for name, default in args.not_given.items() if getattr(args, name) != default), None):
        said = "which judges whole cells of its own runs; leave it out, or set it as a key of the recipe"
        raise TomatError(f"--{given} does not go with --leave_one_out, {said}.")
    from tomat.train.settings.keys import check_words

    check_words(args.leave_one_out, args.overrides)
    tell("loading JAX and the recipe ...")
    from tomat.app.workflow.leave_one_out import leave_one_out, over_compounds
    from tomat.base.report.terminal import show
    from tomat.train.settings.config import load_config

    own = [] if args.steps is None else ["--trainer.num_train_steps", str(args.steps)]
    found = leave_one_out(
        lambda words: load_config(args.leave_one_out, [*args.overrides, *own, *words]), args.compounds, args.folds
    )
    table, over = over_compounds(found)
    what = "one compound" if args.folds is None else "a group of compounds"
    median, mean = (f"{100 * over[key]:.2f} %" for key in ("median", "mean"))
    show(table, f"Left out {what} at a time: NMAE median {median}, mean {mean}.")
    _write(args.json, {"over_compounds": over, "compounds": found})
    return 0


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the `--json` file with a checksum, if one was asked for."""
    from tomat.base.documents import with_checksum

    if path is not None:
        write_json(path, with_checksum(to_jsonable(figures)))
        console.print(f"figures: {path}")


def _materials(
    args: argparse.Namespace, config: "TrainConfig"
) -> "tuple[Sequence[str], Callable[[str], DensityGrid], str, Sequence[str]]":
    """Names of the materials, how to load one, where they come from in words, and the files of --input."""
    if args.input is not None:
        if args.groups is not None:
            raise TomatError("--groups is for the embedded densities; leave it out with --input.")
        from tomat.data.tokens.pipeline.sources import path_inputs

        inputs = path_inputs(args.input, rules_of(args.species, args.accept))
        files = [each.location for each in inputs.materials.values()]
        return list(inputs.material_ids), inputs.get_grid, counted(len(files), "input"), files
    of_folder = args.split is None and args.groups is None and config.data.source == "folder"
    refuse_rules(args.species, args.accept, "what the run held out" if of_folder else "the embedded densities")
    if of_folder:
        from tomat.app.workflow.held_out import held_out_of_run

        held = held_out_of_run(config, args.run_dir)
        return held.names, held.load, held.words[0], ()
    if args.split is None and args.groups is None and config.data.source != "embedded":
        what = f"{args.run_dir} was trained on a shard set, which holds densities only as tokens"
        raise TomatError(f"{what}; name held-out densities with --input, or give --split validation.")
    from tomat.data.density.demo.embedded import CRYSTALS, demo_materials, load_demo

    split, groups = args.split or "validation", args.groups or [CRYSTALS]
    words = " ".join(["embedded", split, *(args.groups or ())])
    return [material.material_id for material in demo_materials(split, groups)], load_demo, words, ()


def files_sha256(files: "Sequence[str]") -> str:
    """Hash of where files lie, how large they are and when they were written; of a URL, only where it is."""
    import hashlib

    digest = hashlib.sha256()
    for path in files:
        words = [path]
        if "://" not in path:
            state = os.stat(path)
            words = [os.path.abspath(path), str(state.st_size), str(state.st_mtime_ns)]
        digest.update("\0".join([*words, ""]).encode(errors="surrogateescape"))
    return digest.hexdigest()


def read_report(path: Path) -> "TeacherForcedResult":
    from tomat.base.documents import parse_checked, read_bytes
    from tomat.predict.evaluation.result import TeacherForcedResult

    how = "Give a report of `tomat eval --json`."
    return TeacherForcedResult.from_dict(parse_checked(read_bytes(path), str(path), "an evaluation", how)[0], path)
