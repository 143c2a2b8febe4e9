"""A quality study whose rows are marked as exact or not exact, evaluated on the held-out embedded densities. Its report
has its own keys. `tomat lab quality` also checks `exact: true` for the rows of any sweep."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, config_file, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.overrides import read_yaml
from tomat.base.report.terminal import show
from tomat.base.reporting import console, to_jsonable, write_json, write_report
from tomat.measure.lab.curves import window_means
from tomat.measure.lab.quality import Quality, QualityRow, against_base, has_loss_of, seeds_of
from tomat.measure.lab.record import record_path
from tomat.perf.tuning.sweep_config import SweepConfig, check_keys, sweep_of
from tomat.report.pages.quality_page import page_path, quality_table, write_quality_page

HELD_OUT = ("held_out_nmae_median", "held_out_nemd")


def build_parser() -> Parser:
    """The argument parser of this script."""
    parser = Parser(
        prog="python profiling/numerics.py",
        description="Train every variant of a configuration with every seed, each in a process of its own, and compare "
        "loss curves and held-out NMAE and NEMD with the unchanged configuration. Finished runs are not repeated: the "
        "same command goes on where it was stopped. Exit status 1 if a variant that is meant to be exact is not.",
    )
    text = "the configuration and its variants, a file or the name of one that ships"
    add_flag(parser, "--variants", "demo", text, type=config_file("numerics"), metavar="FILE")
    add_flag(parser, "--seeds", "0,1,2", "at least two", metavar="N,N[,N...]")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="of every run (default: the configuration's)")
    parser.add_argument("--only", metavar="NAME[,NAME...]", help="train these variants and the base")
    parser.add_argument("--compare_only", action="store_true", help="train nothing; compare what has ended")
    add_flag(parser, "--output_dir", Path("runs/numerics"), "folder of the runs", type=Path, metavar="DIR")
    parser.add_argument("--docs", action="store_true", help="write the page into the tracking folder")
    add_flag(parser, "--tracking_dir", Path("docs/tracking"), "tracking folder, for --docs", type=Path, metavar="DIR")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} --variants demo --seeds 0,1 --steps 100",)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train the missing runs, compare, print, and write the requested outputs."""
    sweep, only = load_variants(args.variants), args.only.split(",") if args.only else []
    trained = [row.name for row in sweep.with_rows(only).rows]
    record_file = record_path(args.output_dir, page_path(args.tracking_dir, sweep.name).stem)
    study = Quality(sweep, seeds_of(args.seeds), args.output_dir, record_file, steps=args.steps, share=None)
    if args.compare_only:
        study.read()
    else:
        study.run(trained)
    if failed := [why for row in study.rows.values() for why in row.failed.values()]:
        raise TomatError(failed[0])
    record, report = study.record(), numerics_report(study)
    show(quality_table(record))
    write_report(args.json, report)
    if args.docs:
        page = write_quality_page(record, args.tracking_dir, args.tracking_dir / f"{sweep.name}.md")
        write_json(page.with_suffix(".json"), report)
        console.print(f"page: {page}")
    return 0 if report["exact_variants_are_the_same"] else 1


def load_variants(path: Path) -> SweepConfig:
    """Read a file of variants as a sweep. Its base is the configuration itself; the other rows are `variants`, each
    with `name`, `exact`, `reason` (the row's question) and `overrides`."""
    values = read_yaml(path, "numerics")
    rows: list[dict[str, Any]] = [{"name": "base"}]
    for variant in values.pop("variants", None) or ():
        where = f"{path}: variant {variant.get('name')}"
        check_keys(variant, {"name", "exact", "reason", "overrides"}, {"name", "reason"}, where)
        if not isinstance(variant.get("exact"), bool):
            raise TomatError(f"{where} has exact: {variant.get('exact')!r}; expected true or false.")
        rows.append({"question" if key == "reason" else key: value for key, value in variant.items()})
    if len(rows) == 1 or "rows" in values:
        raise TomatError(f"{path} has no variants; expected a list of them, and no rows.")
    return sweep_of({**values, "rows": rows}, path)


def numerics_report(study: Quality) -> dict[str, Any]:
    """The figures of every row that has finished all seeds, compared with the first row, which is the base."""
    base, *others = study.rows.values()
    ended = {row.name for row in study.rows.values() if row.figures.keys() >= set(study.seeds)}
    if base.name not in ended:
        raise TomatError("the base has not been trained with every seed; run without --compare_only.")
    sweep, config = study.sweep, study.plan()[base.name][0].config
    variants = [_variant(row, base, study) for row in others if row.name in ended]
    return to_jsonable(
        {
            "name": sweep.name,
            "title": sweep.title,
            "introduction": sweep.introduction,
            "config_path": os.path.normpath(sweep.rows[0].config_path),
            "overrides": base.overrides,
            "window_steps": sweep.window_steps,
            "first_step_tolerance": sweep.first_step_tolerance,
            **{key: study.config[key] for key in ("steps", "batch_sequences", "sequence_tokens", "loss", "loss_unit")},
            "seeds": study.seeds,
            "evaluation_patches_per_material": config.evaluation.patches_per_material,
            "not_trained_yet": [name for name in study.rows if name not in ended],
            "window_end_steps": study.record()["window_end_steps"],
            "base": _row(base, study),
            "variants": variants,
            "exact_variants_are_the_same": all(row["same_curve"] for row in variants if row["exact"]),
        }
    )


def _row(row: QualityRow, study: Quality) -> dict[str, Any]:
    own = {"parameters": row.parameters, "devices": row.devices}
    own["train_seconds"] = sum(row.values("wall_seconds").values())
    own["loss_window_means"] = [window_means(row.losses[seed], study.sweep.window_steps) for seed in study.seeds]
    return own | {key: _spread([row.figures[seed][key] for seed in study.seeds]) for key in HELD_OUT}


def _variant(row: QualityRow, base: QualityRow, study: Quality) -> dict[str, Any]:
    curves = against_base(row, base, study.sweep.window_steps, study.sweep.first_step_tolerance).curves
    values = _row(row, study)
    for key in HELD_OUT:
        less = np.array([row.figures[seed][key] - base.figures[seed][key] for seed in study.seeds])
        differences = {f"difference_{name}": value for name, value in _spread(less).items()}
        values[key] |= {**differences, "seeds_higher": (less > 0).sum()}
    own = {key: value for key, value in row.overrides.items() if base.overrides.get(key, row) != value}
    return {
        "name": row.name,
        "exact": row.exact,
        "reason": row.question,
        "overrides": own,
        **values,
        "same_loss": has_loss_of(row, base),
        **({"same_curve": False} if curves is None else vars(curves)),
    }


def _spread(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Statistics over seeds. The standard deviation is that of a sample (n - 1)."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1))}


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
