"""`tomat plan --decode`: the decoders of a model on a slice."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from tomat.app.plan_step import compile_arguments, stages_of
from tomat.base.report.formats import percent, seconds
from tomat.base.reporting import console
from tomat.base.stages import DONE
from tomat.hardware.mfu import slice_dict
from tomat.perf.cost.memory import read_memory
from tomat.perf.cost.support import Support, untimed_share
from tomat.perf.profile.breakdown import Breakdown
from tomat.report.pages.plan_tables import gib, print_memory, print_support, table
from tomat.report.pages.profile_tables import print_breakdown

BOTH = "both"
"""Of `--decode` without a value."""


def compile_decoders(args: argparse.Namespace, path: Path, overrides: list[str]) -> dict[str, Any]:
    """Compile what `--decode` names.

    Args:
        args: Of `tomat plan`.
        path: The configuration.
        overrides: `--a.b VALUE`, word by word.

    Returns:
        The report.
    """
    with stages_of(args, path, overrides) as (config, slice_, show):
        from tomat.perf.plan.decode import cell_of, plan_decoder
        from tomat.predict.inference.structures import read_structure

        cell = cell_of(config, tuple(args.grid), args.atoms or read_structure(args.structure)[0])
        plans = {}
        for decoder in ("parallel", "autoregressive") if args.decode == BOTH else (args.decode,):

            def say(stage: str, decoder: str = decoder) -> None:
                show(stage if stage == DONE else f"{decoder} decoder, {stage}")

            rounds = (args.rounds or 1) if decoder == "parallel" else 1
            kept = (args.kv_cache_dtype or "compute") if decoder == "autoregressive" else "compute"
            plan = plan_decoder(config, slice_, cell, decoder, rounds, kept, **compile_arguments(args), on_stage=say)
            show("estimating")
            plans[decoder] = plan.to_dict()
            show(DONE)
    times = [plan["cell_seconds"]["estimate"] for plan in plans.values() if plan["fits"]]
    return {
        "run_name": config.run_name,
        **slice_dict(slice_),
        "grid": list(cell.grid_shape),
        "atoms": cell.atoms,
        "patch_shape_voxels": list(cell.patch_shape),
        "patches": cell.patches,
        "room_atoms_per_patch": cell.room.atoms,
        "room_elements_per_patch": cell.room.elements,
        "fits": all(plan["fits"] for plan in plans.values()),
        "decoders": plans,
        "times_faster_in_parallel": times[1] / times[0] if len(times) == 2 else None,
        "notes": list(cell.notes),
    }


def print_decoders(report: Mapping[str, Any], top: int) -> None:
    """What `compile_decoders` found: of each decoder memory and times, then both.

    Args:
        report: As made or as kept.
        top: Operations and buffers to print.
    """
    grid, patch = (" x ".join(map(str, report[key])) for key in ("grid", "patch_shape_voxels"))
    for plan in report["decoders"].values():
        how = "from the cache" if plan["cached"] else f"compiled in {plan['compile_seconds']:.0f} s"
        console.print(Text.assemble((f"{plan['decoder']} decoder", "bold"), f", {plan['compiler']}, {how}"))
        if plan["kv_cache_bytes"] is not None:
            kept = f"keys and values kept: {gib(plan['kv_cache_bytes'])}, kv_cache_dtype {plan['kv_cache_dtype']}"
            console.print(kept)
        print_memory(read_memory(plan["memory"]), 0 if plan["fits"] else top)
        if plan["fits"]:
            print_breakdown(Breakdown.from_dict(plan["breakdown"], "the plan"), top)
            print_support([Support(**part) for part in plan["rests_on"]])
    cell = f"a cell of {grid} voxels with {report['atoms']} atoms, {report['patches']:,} patches of {patch}"
    console.print(Text.assemble((report["run_name"], "bold"), f" on {report['slice']}: {cell}"))
    for note in report["notes"]:
        console.print(f"note: {note}")
    view = table(
        "a cell",
        "decoder", "rounds", "patches", "HBM", "a batch", "batches", "a cell", "from", "to", "without timings", "bound",
    )  # fmt: skip
    for plan in report["decoders"].values():
        row = [plan["decoder"], str(plan["rounds"]), str(plan["patches_at_a_time"]), gib(plan["hbm_required_bytes"])]
        if not plan["fits"]:
            view.add_row(*row, *["does not fit"], *["-"] * 6)
            continue
        cell, parts = plan["cell_seconds"], [Support(**part) for part in plan["rests_on"]]
        view.add_row(
            *row, seconds(plan["batch_seconds"]["estimate"]), str(plan["batches"]),
            *(seconds(cell[name]) for name in ("estimate", "low", "high")),
            percent(untimed_share(parts)), f"{parts[0].name} {percent(parts[0].step_share, 0)}",
        )  # fmt: skip
    console.print(view)
    if report["times_faster_in_parallel"] is not None:
        console.print(f"parallel is {report['times_faster_in_parallel']:.0f} times faster")
