"""`tomat retokenize`: densities to a shard set, by all cores of a machine or by a cluster."""

import argparse
from pathlib import Path
from typing import Any

SETTINGS = ("input", "output", "source", "filelist", "split_file", "split", "layout", "codec", "max_skipped", "seed")
"""Settings with a flag of their own in `--help`; every other is an override alike, `--block_rows 128`."""


def register_retokenize(subparsers: argparse._SubParsersAction) -> None:
    """Add `tomat retokenize`."""
    parser = subparsers.add_parser(
        "retokenize",
        help="write a shard set from many densities: a process pool, or Zephyr on a cluster",
        description="Survey the densities, fit a codec (unless one is given), write the tokens. Stopped at any moment "
        "and started again with the same arguments it goes on, and ends with the same bytes, whatever the number of "
        "workers. Every setting of tomat/tokens/pipeline_config.py can be given as --name VALUE.",
    )
    parser.add_argument("--config_path", type=Path, metavar="FILE", help="YAML, see configs/tokenize/")
    for name in SETTINGS:
        parser.add_argument(f"--{name}", metavar="VALUE", help=argparse.SUPPRESS if name == "seed" else None)
    parser.add_argument("--runner", choices=("pool", "zephyr"), default="pool", help="default: %(default)s")
    parser.add_argument("--workers", type=int, metavar="N", help="default: one a core (pool), one a unit (zephyr)")
    parser.add_argument("--worker_memory", default=None, metavar="SIZE", help="of a Zephyr worker, such as 4g")
    parser.add_argument("--allow_cross_region", action="store_true", help="move data between regions knowingly")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.set_defaults(run=run_retokenize, takes_overrides=True)


def run_retokenize(args: argparse.Namespace) -> int:
    """Write or finish the set, and print what it holds, what was skipped, and the padding."""
    from tomat.reporting import console, write_json
    from tomat.tokens.pipeline_config import load_retokenize_config
    from tomat.tokens.pipeline_driver import retokenize, skipped_by_reason

    words = [word for name in SETTINGS if (value := getattr(args, name)) is not None for word in (f"--{name}", value)]
    config = load_retokenize_config(args.config_path, [*words, *args.overrides])
    runner: Any
    if args.runner == "zephyr":
        from tomat.tokens.pipeline_zephyr import WORKER_MEMORY, ZephyrRunner

        temporary = config.output.rstrip("/") + "-zephyr"
        runner = ZephyrRunner(temporary, args.workers, args.worker_memory or WORKER_MEMORY)
    else:
        from tomat.tokens.pipeline_pool import PoolRunner

        runner = PoolRunner(args.workers)
    result = retokenize(config, runner, allow_cross_region=args.allow_cross_region)
    manifest = result.manifest
    padding = padding_share(config.output, config.storage_tries, manifest)
    console.print(
        f"{config.output}: {manifest.rows:,} rows of {manifest.context:,} tokens from {len(manifest.materials):,} "
        f"materials, {100 * padding:.1f} % padding, {len(manifest.skipped):,} materials skipped"
    )
    for entry in manifest.skipped:
        console.print(f"skipped {entry.material_id}: {entry.reason}", markup=False)
    if args.json is not None:
        write_json(
            args.json,
            {
                "output": config.output,
                "rows": manifest.rows,
                "context_tokens": manifest.context,
                "chunks": manifest.n_chunks,
                "materials": len(manifest.materials),
                "materials_skipped": len(manifest.skipped),
                "skipped_reasons": dict(skipped_by_reason(manifest)),
                "padding_fraction": padding,
                "codec_sha256": manifest.codec_sha256,
                "materials_surveyed_by_this_run": result.surveyed,
                "rows_written_by_this_run": result.rows_written,
                "survey_seconds": result.survey_seconds,
                "write_seconds": result.write_seconds,
                "materials_surveyed_per_second": result.surveyed / max(result.survey_seconds, 1e-9),
                "rows_written_per_second": result.rows_written / max(result.write_seconds, 1e-9),
            },
        )
    return 0


def padding_share(output: str, tries: int, manifest: Any) -> float:
    """Part of all tokens that is padding, from the number of atoms of every material, 0 to 1."""
    import json

    from tomat.tokens.pipeline_driver import SURVEY_NAME
    from tomat.tokens.store import Store

    content = Store(output, tries).read(SURVEY_NAME)
    if content is None:
        return float("nan")
    shares = [manifest.layout.padding_share(each["n_atoms"]) for each in json.loads(content)["materials"]]
    return sum(shares) / len(shares)
