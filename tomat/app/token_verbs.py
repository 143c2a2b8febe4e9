"""`tomat tokenize` and `tomat retokenize`: turn densities into a shard set, in one process, on all cores, a cluster."""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tomat.base.arguments import add_flag, add_report, add_verb, config_file, count, positive_int, share
from tomat.base.reporting import console, counted, write_report
from tomat.data.density.rules import add_rule_flags, refuse_rules, rules_of

SETTINGS: Mapping[str, str] = {
    "input": "folder or URL (gs://, s3://) of the densities",
    "output": "folder or gs:// URL of the shard set",
    "source": "rho_gga, materials_project, chgcar, folder or embedded (default: rho_gga)",
    "filelist": "file with a material id per line, may be below --input (default: all that --input holds)",
    "split_file": "JSON with a list of indices into the filelist for each split (default: every material)",
    "split": "split to take and to record (default: train)",
    "layout": "sequence layout, such as v3-p19; `tomat tokens layouts` compares them (default: v3-p19)",
    "codec": "codec to use, path or URL (default: fit one to these densities)",
    "promolecule": "promolecule to lay beside the rows, path or URL (default: fit one where the codec is fitted)",
    "max_clipped_share": "skip materials that lose more of their electrons outside the codec (default: 0.001)",
    "max_skipped": "materials that may be skipped: a number, or below 1 a share of all (default: 0.01)",
    "seed": "seed of the anchors (default: 0)",
}
"""Settings with their own flag in `--help`. Any other can be given in the same way: `--block_rows 128`."""


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = add_verb(subparsers, "tokenize", "write a shard set from densities, in one process", _run_tokenize)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", metavar="PATH", help="densities, or folders (also gs://) of them")
    text = "embedded densities: train or validation"
    source.add_argument("--demo", choices=("train", "validation"), metavar="SPLIT", help=text)
    add_rule_flags(parser)
    parser.add_argument("--layout", default="v3-p19", help="sequence layout (default: %(default)s)")
    parser.add_argument("--codec", type=Path, required=True, metavar="FILE", help="from `tomat codec fit`")
    text = "promolecule to lay beside the rows, from `tomat promolecule fit`"
    parser.add_argument("--promolecule", type=Path, metavar="FILE", help=text)
    parser.add_argument("--output", required=True, metavar="PLACE", help="folder or gs:// URL of the shard set")
    add_flag(parser, "--patches_per_material", 64, "rows of each material", type=positive_int)
    parser.add_argument("--seed", type=count, default=0, help="seed of the anchors (default: %(default)s)")
    parser.add_argument("--split", help="name of the split (default: the embedded one, or none)")
    text = "skip materials that lose more of their electrons outside the codec (default: 0.001)"
    parser.add_argument("--max_clipped_share", type=share, metavar="SHARE", help=text)
    add_report(parser)

    text = "write a shard set from many densities: a process pool, or Zephyr on a cluster"
    parser = add_verb(subparsers, "retokenize", text, _run_retokenize)
    text = "YAML, see configs/tokenize/"
    parser.add_argument("--config_path", type=config_file("tokenize"), metavar="FILE", help=text)
    for name, text in SETTINGS.items():
        parser.add_argument(f"--{name}", metavar="VALUE", help=text)
    add_rule_flags(parser)
    add_flag(parser, "--runner", "pool", "where workers run", choices=("pool", "zephyr"))
    text = "most workers (default: pool one per core, zephyr one per unit)"
    parser.add_argument("--workers", type=positive_int, metavar="N", help=text)
    text = "memory of a Zephyr worker, such as 4g (default: 2g)"
    parser.add_argument("--worker_memory", default=None, metavar="SIZE", help=text)
    parser.add_argument("--allow_cross_region", action="store_true", help="allow data to move between regions")
    add_report(parser, takes_overrides=True)


def _run_tokenize(args: argparse.Namespace) -> int:
    """Cut patches out of densities and write them as tokens. If it is stopped, the same command goes on where it was,
    and ends with the same bytes."""
    from tomat.app.shard_verbs import report_shards
    from tomat.data.codec.files import load_codec
    from tomat.data.density.promolecule import Promolecule
    from tomat.data.tokens.clipping import MAX_CLIPPED_SHARE
    from tomat.data.tokens.layouts import layout_named
    from tomat.data.tokens.pipeline.driver import write_shards
    from tomat.data.tokens.pipeline.sources import demo_inputs, path_inputs
    from tomat.data.tokens.shards import open_shards

    layout, codec = layout_named(args.layout), load_codec(args.codec)
    promolecule = None if args.promolecule is None else Promolecule.load(args.promolecule)
    rules = rules_of(args.species, args.accept)
    if args.demo:
        refuse_rules(args.species, args.accept, "the embedded densities")
    inputs = demo_inputs(args.demo) if args.demo else path_inputs(args.input, rules)
    started = time.monotonic()
    manifest = write_shards(
        args.output,
        inputs.material_ids,
        inputs.get_grid,
        layout=layout,
        codec=codec,
        patches_per_material=args.patches_per_material,
        seed=args.seed,
        split=args.demo or "" if args.split is None else args.split,
        max_clipped_share=MAX_CLIPPED_SHARE if args.max_clipped_share is None else args.max_clipped_share,
        read_rules=None if args.demo else {"species": rules.species, "accept": sorted(rules.accept)},
        promolecule=promolecule,
    )
    report_shards(open_shards(args.output), args.json, {"seconds": time.monotonic() - started})
    for material in manifest.skipped:
        print(f"skipped {material.material_id}: {material.reason}")
    return 0


def _run_retokenize(args: argparse.Namespace) -> int:
    """Survey the densities, fit codec and promolecule (unless they are given), write the tokens. If it is stopped, at
    any moment, the same command goes on, and ends with the same bytes, whatever the number of workers. Every setting of
    tomat/data/tokens/pipeline/config.py can be given as --name VALUE."""
    from tomat.data.tokens.pipeline.config import RetokenizeConfig, load_retokenize_config
    from tomat.train.settings.keys import check_words

    words = [word for name in SETTINGS if (value := getattr(args, name)) is not None for word in (f"--{name}", value)]
    check_words(args.config_path, [*words, *args.overrides], RetokenizeConfig, "tokenize")

    from tomat.app.shard_verbs import set_figures
    from tomat.data.tokens.clipping import clipped_lines
    from tomat.data.tokens.pipeline.driver import retokenize, skipped_by_reason
    from tomat.data.tokens.pipeline.runners import WORKER_MEMORY, PoolRunner, ZephyrRunner

    rules = {"species": args.species, "accept": args.accept}
    config = load_retokenize_config(args.config_path, [*words, *args.overrides], rules)
    runner = PoolRunner(args.workers)
    if args.runner == "zephyr":
        temporary = config.output.rstrip("/") + "-zephyr"
        runner = ZephyrRunner(temporary, args.workers, args.worker_memory or WORKER_MEMORY)
    result = retokenize(config, runner, allow_cross_region=args.allow_cross_region)
    manifest = result.manifest
    padding = padding_share(config.output, config.storage_tries, manifest)
    padded = "padding not known" if padding is None else f"{100 * padding:.1f} % padding"
    materials, skipped = (counted(len(some), "material") for some in (manifest.materials, manifest.skipped))
    rows = f"{counted(manifest.rows, 'row')} of {manifest.context:,} tokens"
    console.print(f"{config.output}: {rows} from {materials}, {padded}, {skipped} skipped")
    if manifest.short_materials:
        asked = counted(manifest.patches_per_material, "row")
        fewer = counted(manifest.short_materials, "material")
        console.print(f"{fewer} with fewer than {asked}, where these hold the whole cell")
    for line in clipped_lines(manifest.clipped, manifest.max_clipped_share):
        console.print(line)
    for entry in manifest.skipped:
        console.print(f"skipped {entry.material_id}: {entry.reason}")
    figures = set_figures(manifest) | {"output": config.output, "padding_fraction": padding}
    figures |= {
        "skipped_reasons": dict(skipped_by_reason(manifest)),
        "materials_surveyed_by_this_run": result.surveyed,
        "rows_written_by_this_run": result.rows_written,
        "survey_seconds": result.survey_seconds,
        "write_seconds": result.write_seconds,
        "materials_surveyed_per_second": result.surveyed / max(result.survey_seconds, 1e-9),
        "rows_written_per_second": result.rows_written / max(result.write_seconds, 1e-9),
    }
    write_report(args.json, figures)
    return 0


def padding_share(output: str, tries: int, manifest: Any) -> float | None:
    """Share of padding in all tokens, 0 to 1. For scattered voxels it follows from the grids, for patches from the
    number of atoms of each material (None without a survey)."""
    if manifest.layout.is_scattered:
        return 1 - manifest.scattered_voxels / (manifest.rows * manifest.context)
    from tomat.base.documents import parse_checked
    from tomat.base.records import typed
    from tomat.base.storage import Store
    from tomat.data.tokens.pipeline.driver import SURVEY_NAME
    from tomat.data.tokens.pipeline.stages import SetSurvey

    store = Store(output, tries)
    if (content := store.read(SURVEY_NAME)) is None:
        return None
    source, remedy = store.url + SURVEY_NAME, "The set itself is complete; remove this file."
    found = typed(parse_checked(content, source, "the survey of a shard set", remedy)[0], SetSurvey, source, remedy)
    shares = [manifest.layout.padding_share(each.n_atoms) for each in found.materials]
    return sum(shares) / len(shares)
