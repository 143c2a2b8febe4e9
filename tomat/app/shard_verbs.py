"""`tomat tokens` and `tomat shards`: show the content of sequences and shard sets, and check whether a set is whole."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from tomat.base.arguments import add_flag, add_report, add_verb, add_verbs, count, positive_int, whole_number
from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.records import typed
from tomat.base.report.model import Column, Facts, Table
from tomat.base.report.terminal import show
from tomat.base.reporting import console, counted, is_or_are, write_report
from tomat.data.density.rules import add_rule_flags, refuse_rules, rules_of

SAMPLE_ROWS = 64
"""Number of rows compared with their source. A fault in one of twenty materials is missed by 4 % of such samples."""


@dataclass(frozen=True)
class SourceOnRecord:
    """The part of a set's request that says where its densities are and how to read them."""

    source: str | None = None
    input: str | None = None
    filelist: str | None = None
    split_file: str | None = None
    species: Sequence[str] = ()
    accept: Sequence[str] = ()


NO_CHECKSUM = "no checksum of its own: written before manifests had one"
"""Message for a manifest without a checksum."""


def register(subparsers: argparse._SubParsersAction) -> None:
    verbs = add_verbs(subparsers, "tokens", "look at sequences")
    show = add_verb(verbs, "show", "a sequence in words", _run_show)
    show.add_argument("shards", nargs="?", metavar="PLACE", help="a shard set: folder or gs:// URL")
    show.add_argument("--row", type=count, default=0, help="row of the set; with --input, of scattered voxels")
    show.add_argument("--input", metavar="PATH", help="a density instead of a shard set")
    add_rule_flags(show)
    text = "first voxel"
    show.add_argument("--anchor", type=whole_number, nargs=3, default=(0, 0, 0), metavar=("X", "Y", "Z"), help=text)
    show.add_argument("--layout", default="v3-p19", help="layout for --input (default: %(default)s)")
    show.add_argument("--codec", type=Path, metavar="FILE", help="codec for --input")
    show.add_argument("--voxels", type=count, default=8, help="voxels to spell out (default: %(default)s)")
    show.add_argument("--raw", action="store_true", help="also every token by name")

    layouts = add_verb(verbs, "layouts", "how much of a context is density", _run_layouts)
    add_flag(layouts, "--context", 8192, "tokens", type=positive_int)
    text = "numbers of atoms of the materials (default: 1 4 12 29 88)"
    layouts.add_argument("--atoms", type=positive_int, nargs="+", default=[1, 4, 12, 29, 88], help=text)
    add_flag(layouts, "--smallest_side", 8, "smallest side of packed cubes, in voxels", type=positive_int)
    add_report(layouts, "write the figures; shares are fractions")

    moved = {"import": "`python profiling/import_first_generation.py` in a checkout of tomat"}
    verbs = add_verbs(subparsers, "shards", "look at a shard set", moved)
    info = add_verb(verbs, "info", "what a shard set holds", _run_info)
    info.add_argument("shards", metavar="PLACE", help="folder or gs:// URL")
    add_report(info)

    text = "read every chunk and compare its checksum; compare rows with their source; repair"
    verify = add_verb(verbs, "verify", text, _run_verify)
    verify.add_argument("shards", metavar="PLACE", help="folder or gs:// URL")
    verify.add_argument("--input", metavar="PLACE", help="the densities (default: those that `tomat retokenize` read)")
    verify.add_argument("--source", help="kind of --input, as in `tomat retokenize` (default: any found there)")
    add_rule_flags(verify)
    text = "rows to compare with their source (default: %(default)s; 0: none)"
    verify.add_argument("--sample", type=count, default=SAMPLE_ROWS, metavar="ROWS", help=text)
    verify.add_argument("--seed", type=count, default=0, help="seed of the sample")
    verify.add_argument("--repair", action="store_true", help="write the damaged chunks again, and no others")
    add_report(verify)


def _run_show(args: argparse.Namespace) -> int:
    """Show a sequence of a shard set, or of a density with --input and --codec, in words: cell, atoms, first voxels. In
    a layout of scattered voxels --row chooses the row of a density, drawn with seed 0."""
    import numpy as np

    from tomat.data.tokens.patch import humanise, token_runs
    from tomat.data.tokens.scattered import humanise_scattered
    from tomat.data.tokens.vocabulary import Vocabulary

    if (args.shards is None) == (args.input is None):
        raise TomatError("Give a shard set, or a density with --input PATH --codec FILE.")
    if args.input is not None:
        from tomat.data.codec.files import load_codec
        from tomat.data.codec.relative import cell_codec
        from tomat.data.density.crystal import Crystal
        from tomat.data.tokens.layouts import layout_named
        from tomat.data.tokens.manifest import anchors_seed
        from tomat.data.tokens.patch import check_cell_encodable, encode_sequence
        from tomat.data.tokens.pipeline.sources import path_inputs
        from tomat.data.tokens.scattered import draw_voxels, encode_scattered

        if args.codec is None:
            raise TomatError("--input needs --codec FILE; fit one with `tomat codec fit`.")
        layout, codec = layout_named(args.layout), load_codec(args.codec)
        inputs = path_inputs([args.input], rules_of(args.species, args.accept))
        name, *others = inputs.material_ids
        if others:
            shown = ", ".join([name, *others[:4]])
            raise TomatError(f"{args.input} holds {1 + len(others):,} densities ({shown}, ...); name one file.")
        grid = inputs.get_grid(name)
        if layout.is_scattered:
            check_cell_encodable(name, grid.grid_shape, grid.lattice, grid.atomic_numbers, layout)
            voxels = draw_voxels(anchors_seed(0, name), grid.grid_shape, layout.context, args.row, args.row + 1)
            if voxels[0, 0] < 0:
                rows = layout.material_rows(args.row + 1, grid.grid_shape)
                raise TomatError(f"--row is {args.row}; {name} has {counted(rows, 'row')} of {layout.name}, from 0.")
            ids = encode_scattered(grid, voxels, layout, codec)[0]
            lines = humanise_scattered(ids, voxels[0], Crystal.of(grid), grid.grid_shape, layout, codec, args.voxels)
        else:
            ids = encode_sequence(grid, tuple(args.anchor), layout, codec)
            anchor = np.array([args.anchor]) % grid.grid_shape
            cell = cell_codec(codec, grid).patches(anchor, layout.patch_shape(len(grid.atomic_numbers)))
            lines = humanise(ids, layout, codec, args.voxels, None if cell.scale is None else cell.scale[0])
    else:
        from tomat.data.tokens.shards import open_shards

        refuse_rules(args.species, args.accept, "a shard set")
        shards = open_shards(args.shards)
        ids, layout, codec = shards.read_rows(args.row, args.row + 1)[0], shards.layout, shards.codec
        material = shards.material_of_row(args.row)
        said = f"row      {args.row:,} of {shards.rows:,}: {material.material_id}"
        if layout.is_scattered:
            crystal = shards.crystals[int(shards.manifest.material_indices(np.array(args.row)))]
            voxels = shards.voxels_of_row(args.row)
            lines = [said, *humanise_scattered(ids, voxels, crystal, material.grid_shape, layout, codec, args.voxels)]
        else:
            x, y, z = shards.anchor_of_row(args.row)
            words = humanise(ids, layout, codec, args.voxels, shards.scale_of_row(args.row))
            lines = [f"{said}, first voxel {x} {y} {z}", *words]
    print("\n".join(lines))
    if args.raw:
        for place, names in token_runs(ids, Vocabulary(codec.n_density_tokens)):
            words = f"PAD x {len(names)}" if names[0] == "PAD" else "  ".join(names)
            print(f"{place:6d}  {words}")
    return 0


def _run_layouts(args: argparse.Namespace) -> int:
    """Show, for materials of given numbers of atoms, the patch of each layout of a context, its share of the context,
    and the same for several cubes packed into one context, which no layout does."""
    from tomat.data.tokens.context_use import context_table

    rows = context_table(args.context, args.atoms, args.smallest_side)
    made = [["preamble, tokens", *(f"{row['preamble_tokens']:,}" for row in rows)]]
    made += [[name, *(_cell(row["layouts"][name]) for row in rows)] for name in rows[0]["layouts"]]
    made.append(["wider box", *(_cell(row["wide_box"]) for row in rows)])
    for shared, words in ((True, "one preamble"), (False, "a preamble each")):
        alike = [[each for each in row["packed"] if each["shared_preamble"] == shared] for row in rows]
        best = (max(some, key=itemgetter("voxels"), default=None) for some in alike)
        made.append([f"packed cubes, {words}", *map(_cell, best)])
    for name, use in rows[0]["layouts"].items():
        if "voxels_without_preamble" in use:
            cells = (f"{row['layouts'][name]['voxels_without_preamble']:,}" for row in rows)
            made.append([f"{name} with no preamble at all", *cells])
    title = f"Voxels in {args.context:,} tokens, their share of the context, and how many of them have\n"
    title += "their seven preceding neighbours in the patch too"
    show(Table(title, [Column("atoms"), *(Column(str(row["n_atoms"]), right=True) for row in rows)], made))
    write_report(args.json, {"context_tokens": args.context, "smallest_packed_side": args.smallest_side, "rows": rows})
    return 0


def _cell(use: dict[str, Any] | None) -> str:
    if use is None:
        return "-"
    shapes = use["patch_shapes_voxels"]
    if not shapes:
        return f"scattered\n{use['voxels']:,} = {100 * use['voxel_share']:.1f} %"
    words = " x ".join(map(str, shapes[0])) if len(shapes) == 1 else " + ".join(f"{shape[0]}^3" for shape in shapes)
    share, neighbours = 100 * use["voxel_share"], 100 * use["neighbour_share"]
    return f"{words}\n{use['voxels']:,} = {share:.1f} %\n({neighbours:.1f} %)"


def _run_info(args: argparse.Namespace) -> int:
    """Show what a shard set holds, from its manifest alone."""
    from tomat.data.tokens.shards import open_shards

    report_shards(open_shards(args.shards), args.json, {})
    return 0


OF_A_SET = ("rows", "codec_sha256", "promolecule_sha256", "structures_sha256")
OF_A_SPLIT = ("split", "block_rows", "patches_per_material", "seed", "n_density_tokens", "unit", "max_clipped_share")
"""Values of a manifest that are reported unchanged."""


def set_figures(manifest: Any) -> dict[str, Any]:
    from tomat.data.tokens.clipping import clipped_figures

    found = {name: getattr(manifest, name) for name in OF_A_SET} | clipped_figures(manifest.clipped)
    materials = {"materials": len(manifest.materials), "materials_skipped": len(manifest.skipped)}
    materials["materials_with_fewer_rows"] = manifest.short_materials
    return found | materials | {"context_tokens": manifest.context, "chunks": manifest.n_chunks}


def report_shards(shards: Any, path: Path | None, extra: dict[str, Any]) -> None:
    """Print the content of a shard set, and write it as JSON together with the `extra` figures."""
    from tomat.data.tokens.clipping import clipped_lines
    from tomat.data.tokens.patch import UNIT_WORDS

    manifest = shards.manifest
    layout = manifest.layout
    tokens = manifest.rows * layout.context
    figures = set_figures(manifest) | {name: getattr(manifest, name) for name in OF_A_SPLIT} | extra
    figures |= {"url": shards.url, "layout": layout.name, "voxels_per_patch": layout.n_voxels, "tokens": tokens}
    figures |= {"bytes_uncompressed": tokens * 2, "manifest_has_checksum": manifest.has_checksum}
    most = "up to " if layout.fills_context else ""
    skipped = f", {len(manifest.skipped):,} skipped" if manifest.skipped else ""
    each = f"{counted(manifest.patches_per_material, 'row')} each"
    if manifest.short_materials:
        each += f", but fewer for {manifest.short_materials:,}, whose rows hold the whole cell"
    known = manifest.promolecule_sha256
    rows = {
        "split": manifest.split or "-",
        "layout": f"{layout.name}: {most}{layout.n_voxels:,} voxels, context {layout.context:,}",
        "rows": f"{manifest.rows:,} in {counted(manifest.n_chunks, 'chunk')} of {manifest.block_rows}",
        "materials": f"{len(manifest.materials):,}{skipped}, {each}",
        "tokens": f"{tokens:,}, {tokens * 2 / 1e6:,.1f} MB uncompressed",
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


def _run_verify(args: argparse.Namespace) -> int:
    """Read every chunk and compare its checksum, then read a sample of rows back into densities and compare them with
    the source: every voxel must lie in its token's bin."""
    from tomat.data.tokens.clipping import clipped_figures, clipped_lines
    from tomat.data.tokens.shards import open_shards
    from tomat.data.tokens.source_check import compare_with_source, damaged_chunks, repair_chunks, sample_rows

    shards = open_shards(args.shards)
    started = time.monotonic()
    get_grid = _source(shards, args) if args.repair or args.sample else None
    with progress() as bar:
        damaged = damaged_chunks(shards, bar.track(range(shards.n_blocks), description="Verifying chunks"))
        if damaged and args.repair:
            if get_grid is None:
                raise TomatError(f"{shards.url} does not say where its densities lie; give them with --input.")
            repair_chunks(shards, bar.track(sorted(damaged), description="Repairing chunks"), get_grid)
    if shards.manifest.structures_sha256 is not None:
        len(shards.crystals)  # reading them raises an error for damaged structures
    n = shards.n_blocks
    figures: dict[str, Any] = {"url": shards.url, "chunks": shards.n_blocks, "rows": shards.rows}
    figures |= clipped_figures(shards.manifest.clipped) | {"manifest_has_checksum": shards.manifest.has_checksum}
    figures |= {"chunks_damaged": len(damaged), "chunks_repaired": len(damaged) if args.repair else 0}
    if damaged and not args.repair:
        first = damaged[min(damaged)]
        raise TomatError(
            f"{len(damaged)} of {counted(n, 'chunk')} {is_or_are(n)} missing or damaged. The first: {first} Or let "
            "`tomat shards verify --repair` write it again."
        )
    if damaged:
        which = "chunk" if len(damaged) == 1 else "chunks"
        console.print(f"repaired {which} {', '.join(map(str, sorted(damaged)))}")
    every = "" if n == 1 else "all "
    console.print(f"{shards.url}: {every}{counted(n, 'chunk')} ({counted(shards.rows, 'row')}) {is_or_are(n)} whole")
    if shards.manifest.structures_sha256 is not None:
        console.print(f"structures of {counted(len(shards.crystals), 'material')} are whole")
    if not shards.manifest.has_checksum:
        console.print(f"manifest: {NO_CHECKSUM}")
    for line in clipped_lines(shards.manifest.clipped, shards.manifest.max_clipped_share):
        console.print(line)
    if get_grid is not None and args.sample:
        rows = sample_rows(shards.rows, args.sample, args.seed)
        with progress() as bar:
            tracked = bar.track(rows, description="Comparing rows with their source")
            sample = compare_with_source(shards, tracked, get_grid)
        figures |= sample
        console.print(
            f"{counted(len(rows), 'row')} ({sample['voxels_compared']:,} voxels) agree{'s' if len(rows) == 1 else ''} "
            "with the source: every voxel lies in its token's bin; NMAE of the sample "
            f"{100 * sample['nmae_fraction']:.4f} %"
        )
    elif args.sample:
        why = "the set does not say where they lie (say it with --input or --source embedded)"
        console.print(f"not compared with its densities: {why}")
    write_report(args.json, figures | {"seconds": time.monotonic() - started})
    return 0


def _source(shards: Any, args: argparse.Namespace) -> Callable[[str], Any] | None:
    """A function that reads a density of the set by name; None if it is not known where the densities are."""
    from tomat.base.storage import Store
    from tomat.data.tokens.pipeline.config import RetokenizeConfig
    from tomat.data.tokens.pipeline.driver import REQUEST_NAME, request_content, rules_without_use
    from tomat.data.tokens.pipeline.sources import find_materials, path_inputs

    settings: dict[str, Any] = {}
    # If both flags are given, the request is not needed.
    content = None if args.input and args.source else Store(shards.url).read(REQUEST_NAME)
    if content is not None:
        name, remedy = f"{shards.url}{REQUEST_NAME}", "Say where the densities lie with --input and --source."
        found = request_content(content, name, remedy).get("source", {})
        source = typed(found, SourceOnRecord, name, remedy, extra_keys=False)
        without_use = rules_without_use(source.source)
        settings = {key: value for key, value in found.items() if key not in without_use}
    elif args.input is None and args.source is None:
        from tomat.data.density.demo.embedded import demo_materials

        named = {entry.material_id for entry in (*shards.manifest.materials, *shards.manifest.skipped)}
        # A set written by `tomat tokenize --input` records its read rules; it is not one of embedded densities.
        known = shards.manifest.read_rules is None and named <= {each.material_id for each in demo_materials()}
        if not known:
            refuse_rules(args.species, args.accept, f"{shards.url}, which does not say where its densities lie")
            return None
        settings["source"] = "embedded"
    if args.source == "embedded" and args.input is None:
        settings = {}
    given = {key: getattr(args, key) for key in ("input", "source", "species", "accept")}
    settings |= {key: value for key, value in given.items() if value is not None}
    if args.input is not None and args.source is None and "://" not in args.input:
        # A local file or folder of any formats.
        place = args.input
        inputs = path_inputs([place], rules_of(settings.get("species"), settings.get("accept")))
        readers = {name: partial(inputs.get_grid, name) for name in inputs.material_ids}
    else:
        embedded = settings.get("source") == "embedded"
        # Embedded densities are found by name, whatever the name of the split.
        split = "" if embedded else shards.manifest.split
        # The codec is not read here; naming one keeps the configuration from asking for a fit on validation data.
        config = RetokenizeConfig(output=shards.url, split=split, codec="codec.json", **settings)
        if embedded and args.sample:
            console.print("compared with the embedded densities")
        place = config.input or "the embedded set"
        readers = {each.material_id: partial(each.read, config.storage_tries) for each in find_materials(config)}

    def get_grid(material_id: str) -> Any:
        if material_id not in readers:
            raise TomatError(f"{place} has no material {material_id}; is it what the set was made from?")
        return readers[material_id]()

    return get_grid
