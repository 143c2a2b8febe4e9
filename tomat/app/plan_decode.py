"""`tomat plan --decode`: the decoders of a model on a slice."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tomat.app.plan_step import compile_arguments, stages_of
from tomat.base.stages import DONE
from tomat.hardware.mfu import slice_dict

BOTH = "both"
"""Of `--decode` without a value."""


def compile_decoders(args: argparse.Namespace, path: Path, overrides: list[str]) -> dict[str, Any]:
    """The report of the decoders that `--decode` names."""
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
