"""`tomat shards verify`."""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from tomat.base.arguments import count, report_file
from tomat.base.errors import TomatError
from tomat.data.density.rules import add_rule_flags, refuse_rules

SAMPLE_ROWS = 64
"""Rows compared with their source: a fault that hits one material in twenty is missed by 4 % of such samples."""


NO_CHECKSUM = "no checksum of its own: written before manifests had one"
"""What is said of such a manifest."""


def register_verify(verbs: argparse._SubParsersAction) -> None:
    """Add `verify` to the verbs of `tomat shards`."""
    parser = verbs.add_parser(
        "verify",
        help="read every chunk and compare its checksum; compare rows with their source; repair",
        description="Read every chunk and compare its checksum, then read a sample of rows back into densities and "
        "compare them with the source: every voxel must lie in its token's bin.",
    )
    parser.add_argument("shards", metavar="PLACE", help="folder or gs:// URL")
    parser.add_argument("--input", metavar="PLACE", help="the densities (default: where `tomat retokenize` had them)")
    parser.add_argument(
        "--source", default=None, help="kind of --input, as in `tomat retokenize` (default: any that lies there)"
    )
    add_rule_flags(parser)
    parser.add_argument(
        "--sample", type=count, default=SAMPLE_ROWS, metavar="ROWS", help="default: %(default)s; 0: none"
    )
    parser.add_argument("--seed", type=count, default=0, help="of the sample")
    parser.add_argument("--repair", action="store_true", help="write the damaged chunks again, and only these")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    """Check, repair if asked, and print the figures."""
    from tomat.base.progress import progress
    from tomat.base.reporting import console, counted, is_or_are, write_report
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
        len(shards.crystals)  # which refuses structures that are damaged
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
        console.print(
            "not compared with its densities: the set does not say where they lie (--input, or --source embedded, says "
            "it)"
        )
    write_report(args.json, figures | {"seconds": time.monotonic() - started})
    return 0


def _source(shards: Any, args: argparse.Namespace) -> Callable[[str], Any] | None:
    """Reads the densities of the set; None if it is not known where they are."""
    from tomat.base.reporting import console
    from tomat.base.storage import Store
    from tomat.data.tokens.pipeline.config import RetokenizeConfig
    from tomat.data.tokens.pipeline.driver import REQUEST_NAME, request_content, rules_without_use
    from tomat.data.tokens.pipeline.sources import find_materials

    settings: dict[str, Any] = {}
    # With both given there is nothing left to learn from the request.
    content = None if args.input and args.source else Store(shards.url).read(REQUEST_NAME)
    if content is not None:
        name, remedy = f"{shards.url}{REQUEST_NAME}", "Say where the densities lie with --input and --source."
        settings = request_content(content, name, remedy).get("source", {})
        places, rules = ("source", "input", "filelist", "split_file"), ("species", "accept")
        good = isinstance(settings, dict) and set(settings) <= {*places, *rules}
        good = good and all(isinstance(settings.get(name), str | None) for name in places)
        lists = [settings.get(name, []) for name in rules] if good else []
        if not good or not all(isinstance(each, list) and all(isinstance(x, str) for x in each) for each in lists):
            raise TomatError(f"{name} is damaged: it says {settings!r:.200} of where the densities lie. {remedy}")
        settings = {
            key: value for key, value in settings.items() if key not in rules_without_use(settings.get("source"))
        }
    elif args.input is None and args.source is None:
        from tomat.data.density.demo.embedded import demo_materials

        named = {entry.material_id for entry in (*shards.manifest.materials, *shards.manifest.skipped)}
        # What `tomat tokenize --input` wrote says how it was read.
        known = shards.manifest.read_rules is None and named <= {each.material_id for each in demo_materials()}
        if not known:
            refuse_rules(args.species, args.accept, f"{shards.url}, which does not say where its densities lie")
            return None
        settings["source"] = "embedded"
    if args.source == "embedded" and args.input is None:
        settings = {}
    if args.input is not None:
        settings["input"] = args.input
    if args.source is not None:
        settings["source"] = args.source
    settings |= {key: value for key in ("species", "accept") if (value := getattr(args, key)) is not None}
    if args.input is not None and args.source is None and "://" not in args.input:
        return _local_source(args.input, settings.get("species"), settings.get("accept"))
    embedded = settings.get("source") == "embedded"
    # Whatever the split is called, the names find the embedded densities.
    split = "" if embedded else shards.manifest.split
    # The codec is not read here; naming one keeps the configuration from asking for a fit on validation data.
    config = RetokenizeConfig(output=shards.url, split=split, codec="codec.json", **settings)
    if embedded and args.sample:
        console.print("compared with the embedded densities")
    by_id = {material.material_id: material for material in find_materials(config)}

    def get_grid(material_id: str) -> Any:
        if material_id not in by_id:
            place = config.input or "the embedded set"
            raise TomatError(f"{place} has no material {material_id}; is it where the set came from?")
        return by_id[material_id].read(config.storage_tries)

    return get_grid


def _local_source(place: str, species: Sequence[str] | None, accept: Sequence[str] | None) -> Callable[[str], Any]:
    """The densities of a file or folder of this machine, of whatever kinds."""
    from tomat.data.codec.inputs import path_inputs
    from tomat.data.density.rules import rules_of

    inputs = path_inputs([place], rules_of(species, accept))

    def get_grid(material_id: str) -> Any:
        if material_id not in inputs.material_ids:
            raise TomatError(f"{place} has no material {material_id}; is it where the set came from?")
        return inputs.get_grid(material_id)

    return get_grid
