"""`tomat bench tokenise`: patches and voxels a second, memory of a worker, two workers against one, kills survived.

Every figure stands beside what it is compared with, measured in the same run: on a machine that others use too, the
ratios hold and the absolute figures are a lower bound.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from tomat.base.arguments import count, positive_int, report_file

FIRST_GENERATION_PATCHES_PER_SECOND = 27.0
"""The first generation's tokeniser, one core of a machine of this kind, P = 19, M = 64."""
TRAINING_MATERIALS = 77_498
TRAINING_MEDIAN_VOXELS = 1.26e6
"""Materials Project training set; the grids of this benchmark have 1.00e6 voxels."""
CORE_HOUR_USD = 0.0335
"""An assumption, to be replaced by one's own price: about $0.134 an hour for the four vCPUs of an e2-standard-4
(list: cloud.google.com/compute/vm-instance-pricing). It enters only the projected cost."""


def register_bench(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `tomat bench tokenise`."""
    parser = subparsers.add_parser(
        "tokenise",
        help="speed, memory and restarts of re-tokenising",
        description="Patches and voxels a second of re-tokenising, by one worker and by two, the memory of a worker, "
        "and whether killed runs end with the same bytes.",
    )
    parser.add_argument("--materials", type=count, default=24, help="grids of 100^3 (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=positive_int, default=4, help="turns of one worker and of two (default: %(default)s)"
    )
    parser.add_argument("--largest", action="store_true", help="also the memory of a worker on 448 x 448 x 110")
    parser.add_argument("--kill_runs", type=count, default=0, metavar="N", help="runs killed at random moments")
    parser.add_argument("--seed", type=count, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    parser.set_defaults(run=run_bench)


def run_bench(args: argparse.Namespace) -> int:
    """Measure, print and write."""
    import os

    from tomat.base.reporting import console, write_report
    from tomat.bench.retokenize_kill import kill_test
    from tomat.bench.retokenize_speed import measure_largest, measure_speed

    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        figures: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0)), "load_average_1min": os.getloadavg()[0]}
        if args.materials:
            figures |= measure_speed(folder, args.materials, args.rounds)
            rate = figures["write_patches_per_cpu_second"]
            per_set = TRAINING_MATERIALS * 64 / rate / 3600
            survey = TRAINING_MATERIALS * TRAINING_MEDIAN_VOXELS / figures["survey_voxels_per_cpu_second"] / 3600
            scale = TRAINING_MEDIAN_VOXELS / 1e6
            figures |= {
                "against_first_generation_ratio": rate / FIRST_GENERATION_PATCHES_PER_SECOND,
                "training_set_core_hours": per_set * scale + survey,
                "training_set_cost_usd": (per_set * scale + survey) * CORE_HOUR_USD,
            }
        if args.largest:
            figures |= measure_largest(folder)
        if args.kill_runs:
            figures |= kill_test(folder, args.kill_runs, args.seed)
    for key, value in figures.items():
        console.print(f"{key:42s} {value:,.4g}" if isinstance(value, float) else f"{key:42s} {value}")
    write_report(args.json, figures)
    return 0
