"""`tomat tokenize`, `tomat tokens show` and `tomat shards info`; further verbs of the room lie beside it."""

import argparse
import time
from pathlib import Path
from typing import Any

from tomat.app.layout_verbs import register_layouts
from tomat.app.retokenize_verbs import register_retokenize
from tomat.app.shard_verbs import NO_CHECKSUM, register_verify
from tomat.base.arguments import count, positive_int, report_file, share, whole_number
from tomat.base.errors import TomatError
from tomat.data.density.rules import add_rule_flags, refuse_rules, rules_of


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the verbs of the tokens room."""
    _register_tokenize(subparsers)
    register_retokenize(subparsers)
    _register_show(subparsers)
    _register_shards(subparsers)


def _register_tokenize(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "tokenize",
        help="write a shard set from densities, in one process",
        description="Cut patches out of densities and write them as tokens. Stopped and started again with the same "
        "arguments it goes on where it was, and ends with the same bytes.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", metavar="PATH", help="densities, or folders (also gs://) of them")
    source.add_argument(
        "--demo", choices=("train", "validation"), metavar="SPLIT", help="embedded: train or validation"
    )
    add_rule_flags(parser)
    parser.add_argument("--layout", default="v3-p19", help="sequence layout (default: %(default)s)")
    parser.add_argument("--codec", type=Path, required=True, metavar="FILE", help="from `tomat codec fit`")
    parser.add_argument(
        "--promolecule", type=Path, metavar="FILE", help="laid beside the rows, from `tomat promolecule fit`"
    )
    parser.add_argument("--output", required=True, metavar="PLACE", help="folder or gs:// URL of the shard set")
    parser.add_argument(
        "--patches_per_material", type=positive_int, default=64, help="rows a material (default: %(default)s)"
    )
    parser.add_argument("--seed", type=count, default=0, help="of the anchors (default: %(default)s)")
    parser.add_argument("--split", help="name of the split (default: the embedded one, or none)")
    parser.add_argument(
        "--max_clipped_share",
        type=share,
        metavar="SHARE",
        help="share of its electrons a material may lose outside the codec, else skipped (default: 0.001)",
    )
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    parser.set_defaults(run=run_tokenize)


def _register_show(subparsers: argparse._SubParsersAction) -> None:
    verbs = subparsers.add_parser("tokens", help="look at sequences").add_subparsers(
        title="verbs", metavar="VERB", required=True
    )
    show = verbs.add_parser(
        "show",
        help="a sequence in words",
        description="A sequence of a shard set, or of a density with --input and --codec, in words: cell, atoms, first "
        "voxels.",
    )
    show.add_argument("shards", nargs="?", metavar="PLACE", help="a shard set: folder or gs:// URL")
    show.add_argument("--row", type=count, default=0, help="row of the shard set (default: %(default)s)")
    show.add_argument("--input", metavar="PATH", help="a density instead of a shard set")
    add_rule_flags(show)
    show.add_argument(
        "--anchor", type=whole_number, nargs=3, default=(0, 0, 0), metavar=("X", "Y", "Z"), help="first voxel"
    )
    show.add_argument("--layout", default="v3-p19", help="layout for --input (default: %(default)s)")
    show.add_argument("--codec", type=Path, metavar="FILE", help="codec for --input")
    show.add_argument("--voxels", type=count, default=8, help="voxels to spell out (default: %(default)s)")
    show.add_argument("--raw", action="store_true", help="also every token by name")
    show.set_defaults(run=run_show)
    register_layouts(verbs)


def _register_shards(subparsers: argparse._SubParsersAction) -> None:
    shards = subparsers.add_parser("shards", help="look at a shard set")
    shards.moved = {"import": "`python profiling/import_first_generation.py` in a checkout of tomat"}
    verbs = shards.add_subparsers(title="verbs", metavar="VERB", required=True)
    parser = verbs.add_parser(
        "info", help="what a shard set holds", description="What a shard set holds, from its manifest alone."
    )
    parser.add_argument("shards", metavar="PLACE", help="folder or gs:// URL")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    parser.set_defaults(run=run_info)
    register_verify(verbs)


def run_tokenize(args: argparse.Namespace) -> int:
    """Write the shard set and print what it holds."""
    from tomat.data.codec.files import load_codec
    from tomat.data.codec.inputs import demo_inputs, path_inputs
    from tomat.data.density.promolecule import Promolecule
    from tomat.data.tokens.clipping import MAX_CLIPPED_SHARE
    from tomat.data.tokens.layouts import layout_named
    from tomat.data.tokens.pipeline.driver import write_shards
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
    _report(open_shards(args.output), args.json, {"seconds": time.monotonic() - started})
    for material in manifest.skipped:
        print(f"skipped {material.material_id}: {material.reason}")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Print one sequence in words."""
    from tomat.data.tokens.vocabulary import Vocabulary
    from tomat.data.tokens.words import humanise, token_runs

    if (args.shards is None) == (args.input is None):
        raise TomatError("Give a shard set, or a density with --input PATH --codec FILE.")
    if args.input is not None:
        ids, layout, codec = _sequence_of_density(args)
    else:
        from tomat.data.tokens.shards import open_shards

        refuse_rules(args.species, args.accept, "a shard set")
        shards = open_shards(args.shards)
        ids, layout, codec = shards.read_rows(args.row, args.row + 1)[0], shards.layout, shards.codec
        material = shards.material_of_row(args.row)
        x, y, z = shards.anchor_of_row(args.row)
        print(f"row      {args.row:,} of {shards.rows:,}: {material.material_id}, first voxel {x} {y} {z}")
    print("\n".join(humanise(ids, layout, codec, args.voxels)))
    if args.raw:
        for place, names in token_runs(ids, Vocabulary(codec.n_density_tokens)):
            words = f"PAD x {len(names)}" if names[0] == "PAD" else "  ".join(names)
            print(f"{place:6d}  {words}")
    return 0


def _sequence_of_density(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    from tomat.data.codec.files import load_codec
    from tomat.data.codec.inputs import path_inputs
    from tomat.data.tokens.layouts import layout_named
    from tomat.data.tokens.patch import encode_sequence

    if args.codec is None:
        raise TomatError("--input needs --codec FILE; fit one with `tomat codec fit`.")
    layout, codec = layout_named(args.layout), load_codec(args.codec)
    inputs = path_inputs([args.input], rules_of(args.species, args.accept))
    name, *others = inputs.material_ids
    if others:
        shown = ", ".join([name, *others[:4]])
        raise TomatError(f"{args.input} holds {1 + len(others):,} densities ({shown}, ...); name one file.")
    grid = inputs.get_grid(name)
    return encode_sequence(grid, tuple(args.anchor), layout, codec), layout, codec


def run_info(args: argparse.Namespace) -> int:
    """Print what a shard set holds."""
    from tomat.data.tokens.shards import open_shards

    _report(open_shards(args.shards), args.json, {})
    return 0


def _report(shards: Any, path: Path | None, extra: dict[str, Any]) -> None:
    from tomat.base.report.model import Facts
    from tomat.base.report.terminal import show
    from tomat.base.reporting import console, counted, write_report
    from tomat.data.tokens.clipping import clipped_figures, clipped_lines
    from tomat.data.tokens.words import UNIT_WORDS

    manifest = shards.manifest
    layout = manifest.layout
    figures = {
        "url": shards.url,
        "split": manifest.split,
        "layout": layout.name,
        "context_tokens": layout.context,
        "voxels_per_patch": layout.n_voxels,
        "rows": manifest.rows,
        "tokens": manifest.rows * layout.context,
        "bytes_uncompressed": manifest.rows * layout.context * 2,
        "chunks": manifest.n_chunks,
        "block_rows": manifest.block_rows,
        "materials": len(manifest.materials),
        "materials_skipped": len(manifest.skipped),
        "patches_per_material": manifest.patches_per_material,
        "seed": manifest.seed,
        "n_density_tokens": manifest.n_density_tokens,
        "codec_sha256": manifest.codec_sha256,
        "unit": manifest.unit,
        "structures_sha256": manifest.structures_sha256,
        "promolecule_sha256": manifest.promolecule_sha256,
        "manifest_has_checksum": manifest.has_checksum,
        "max_clipped_share": manifest.max_clipped_share,
    }
    figures |= clipped_figures(manifest.clipped) | extra
    most = "up to " if layout.fills_context else ""
    skipped = f", {len(manifest.skipped):,} skipped" if manifest.skipped else ""
    known = manifest.promolecule_sha256
    rows = {
        "split": manifest.split or "-",
        "layout": f"{layout.name}: {most}{layout.n_voxels:,} voxels, context {layout.context:,}",
        "rows": f"{manifest.rows:,} in {counted(manifest.n_chunks, 'chunk')} of {manifest.block_rows}",
        "materials": f"{len(manifest.materials):,}{skipped}, {counted(manifest.patches_per_material, 'row')} each",
        "tokens": f"{figures['tokens']:,}, {figures['bytes_uncompressed'] / 1e6:,.1f} MB uncompressed",
        "codec": f"{manifest.n_density_tokens:,} ids, {UNIT_WORDS[manifest.unit]}, {manifest.codec_sha256[:16]}...",
        "structures": "exact" if manifest.structures_sha256 else "rounded, from the rows",
        "promolecule": f"{len(shards.promolecule.elements)} elements, {known[:16]}..." if known else "none",
        "seed": str(manifest.seed),
        "manifest": "its checksum fits" if manifest.has_checksum else NO_CHECKSUM,
    }
    show(Facts(rows, shards.url))
    for line in clipped_lines(manifest.clipped, manifest.max_clipped_share):
        console.print(line)
    write_report(path, figures)
