"""`tomat plan` for one step or for the decoders of a model: compiles them, looks for what fits, writes outputs."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE
from tomat.base.progress import DONE, Stages
from tomat.base.report.terminal import rich_table
from tomat.base.reporting import console, replacing, write_report, write_text
from tomat.hardware.mfu import slice_dict, step_report
from tomat.perf.cost.chip_model import untimed_share, untimed_text
from tomat.perf.plan.compile.compiler import EXECUTABLE_FILE, compile_step
from tomat.perf.plan.compile.process import Limits
from tomat.perf.plan.compile.topology import planned_slice
from tomat.perf.plan.host import host_dict
from tomat.perf.plan.plan import Plan, make_plan
from tomat.perf.plan.plan_cache import GIB
from tomat.perf.tuning.search import largest_batch, nearest_fits
from tomat.report.pages.report import write_run_page
from tomat.report.plan import largest_table

if TYPE_CHECKING:  # these import JAX, which the first stage announces
    from tomat.hardware.chips import Slice
    from tomat.train.settings.config import TrainConfig


def compile_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Cache and limits of a compile, as arguments of `compile_step`."""
    limits = Limits(args.time_limit_seconds, int(args.memory_limit_gib * GIB), int(args.cache_gib * GIB))
    return {"cache_dir": args.cache_dir, "limits": limits}


@contextlib.contextmanager
def stages_of(
    args: argparse.Namespace, path: Path, overrides: list[str], what: str | None = None
) -> Iterator[tuple[TrainConfig, Slice, Callable[[str], None]]]:
    """The configuration, its slice, and a function that shows the stage of `what` (default: the run on its slice)."""
    with Stages() as stages:
        stages.show("plan", "importing JAX and reading the configuration")
        from tomat.train.settings.config import load_config

        config = load_config(path, overrides)
        if args.decode is None:
            config.check_step()
        slice_ = planned_slice(config, args.slice)
        stages.done("plan")
        yield config, slice_, partial(stages.show, what or f"{config.run_name} on {slice_.name}")


def compile_plan(args: argparse.Namespace, path: Path, overrides: list[str]) -> tuple[Plan, dict[str, Any]]:
    with stages_of(args, path, overrides) as (config, slice_, show):
        table = None
        if args.codec is not None:
            from tomat.data.codec.files import load_codec
            from tomat.data.codec.relative import relative_to
            from tomat.train.datasets import value_table

            codec = load_codec(str(args.codec))
            if (relative_to(codec) is not None) != config.data.codec_relative:
                said = f"{args.codec} and data.codec_relative {config.data.codec_relative} do not go together"
                raise TomatError(f"{said}; set the key to what the codec is.")
            table = value_table(codec)
        show("looking into the cache, else starting the compiler")
        how = {"value_table": table, "executable": args.executable is not None, "on_stage": show}
        plan = make_plan(config, slice_, **compile_arguments(args), **how)
        show("estimating")
        host = host_dict(config.dispatch_ahead, plan.step_seconds) if plan.step_seconds is not None else {}
        return plan, plan.to_dict() | host


def compile_decoders(args: argparse.Namespace, path: Path, overrides: list[str]) -> dict[str, Any]:
    with stages_of(args, path, overrides) as (config, slice_, show):
        from tomat.model.any_decoder import is_field
        from tomat.perf.plan.decode import cell_of, plan_decoder
        from tomat.predict.inference.structures import read_structure

        cell = cell_of(config, tuple(args.grid), args.atoms or read_structure(args.structure)[0])
        plans = {}
        both = ("parallel",) if is_field(config.model) else ("parallel", "autoregressive")
        for decoder in both if args.decode == "both" else (args.decode,):

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


def search(args: argparse.Namespace, path: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """The nearest changes that were tried for a step that does not fit."""
    with stages_of(args, path, overrides, "looking for what fits") as (config, slice_, show):
        trials = nearest_fits(config, slice_, partial(compile_step, **compile_arguments(args), on_stage=show), show)
    return [trial.to_dict() for trial in trials]


def max_batch(args: argparse.Namespace, path: Path, overrides: list[str]) -> int:
    """Find, print and write the largest batch for each remat policy. Returns 1 if a policy has no batch that fits."""
    words = [word for word in args.policies.split(",") if word]
    policies = [{"true": True, "false": False}.get(word, word) for word in words] or None
    with stages_of(args, path, overrides, "largest batch") as (config, slice_, show):
        compile = partial(compile_step, **compile_arguments(args), on_stage=show)
        found = largest_batch(config, slice_, compile, policies, show)
    console.print(rich_table(largest_table(found)))
    write_report(args.json, {"slice": slice_.name, "largest_batches": [one.to_dict() for one in found]})
    return 0 if all(one.fits is not None for one in found) else 1


def write_outputs(args: argparse.Namespace, plan: Plan) -> None:
    """Write the page (`<run_name>-plan.md`), the configuration and the executable that were asked for."""
    if args.docs:
        from tomat.train.settings.config import config_hash

        config = plan.config
        figures = None
        if plan.step is not None and plan.step_seconds is not None:
            figures = step_report(plan.work, plan.slice_, plan.step_seconds.estimate)
            spans = {"step_seconds": plan.step_seconds, **plan.utilisation}
            figures["ranges"] = {key: asdict(span) for key, span in spans.items()}
            figures["untimed_step_share"] = untimed_share(plan.step.supports)
            figures["untimed"] = untimed_text(plan.step.supports)
            del figures["tokens_per_second"]  # the page of a plan has the rate per chip
        of_run = {"run_name": f"{config.run_name}-plan", "baseline": config.baseline, "kind": "predicted"}
        of_run["config_hash"] = config_hash(config)
        with tempfile.TemporaryDirectory() as folder:
            write_text(Path(folder) / CONFIG_FILE, yaml.safe_dump(config.to_dict(), sort_keys=False))
            page = write_run_page(Path(folder), Path(config.tracking_dir), plan.breakdown, figures, **of_run)
        console.print(f"wrote {page}", highlight=False)
    if args.emit is None and args.executable is None:
        return
    seconds, memory = plan.step_seconds, plan.compiled.memory
    if seconds is None:
        raise TomatError("the step does not fit: nothing was emitted. Without --no_search, changes that do are listed.")
    if args.emit is not None:
        head = (
            f"# Planned for {plan.slice_.name} with {plan.compiled.compiler}: "
            f"{memory.required_bytes / GIB:.2f} of {memory.capacity_bytes / GIB:.2f} GiB, "
            f"step {seconds.estimate:.3f} s ({seconds.low:.3f} to {seconds.high:.3f}), program {plan.compiled.key}.\n"
        )
        values = {**plan.config.to_dict(), "slice": plan.slice_.name}
        write_text(args.emit, head + yaml.safe_dump(values, sort_keys=False))
        console.print(f"wrote {args.emit}", highlight=False)
    if args.executable is not None:
        with replacing(args.executable) as temporary:
            shutil.copyfile(plan.compiled.folder / EXECUTABLE_FILE, temporary)
        console.print(f"wrote {args.executable}", highlight=False)
