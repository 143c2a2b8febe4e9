"""Compares a model with its versions in few bits (sizes, errors, seconds), and writes a page about that."""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from tomat.app.cli import main
from tomat.base.arguments import Parser, report_file, run_folder
from tomat.base.documents import mapping, parse_checked
from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE, EVALUATION_FILE, WEIGHTS_FOLDER
from tomat.base.records import Amount, typed
from tomat.base.report.formats import number, share
from tomat.base.report.markdown import update_page
from tomat.base.report.model import Column, Report, Section, Table
from tomat.base.report.terminal import show
from tomat.base.reporting import console, to_jsonable, write_json, write_report, writing

if TYPE_CHECKING:
    from tomat.predict.weights.quantise import Quantised


def build_parser() -> Parser:
    """The argument parser of this script."""
    parser = Parser(
        prog="python profiling/small_models.py",
        description="Sizes on disk and in memory, errors and seconds of a run and of its folders in few bits, before "
        "and after distillation. A folder without evaluation.json is evaluated first, as at the end of its run.",
    )
    parser.add_argument("--run", dest="run_dir", type=run_folder, required=True, metavar="DIR", help="the run")
    text = "folders of weights, and distilled runs, to compare with it"
    parser.add_argument("--folders", nargs="+", type=run_folder, required=True, metavar="DIR", help=text)
    parser.add_argument("--page", type=Path, metavar="FILE", help="page to write, docs/tracking/small-models.md")
    parser.add_argument("--about", default="", metavar="TEXT", help="how and where it was measured, for the page")
    text = "copy each folder in few bits here, named by its result"
    parser.add_argument("--keep", type=Path, metavar="DIR", help=text)
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} --run runs/demo --folders demo-4bit --page small-models.md",)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure the models that are not measured yet, print, and write the requested outputs."""
    models = []
    folders = [args.run_dir, *args.folders]
    for folder in folders:
        console.print(f"measuring {folder}", highlight=False)
        measure(folder)
        models.append(small_model(folder))
        if models[-1].materials != models[0].materials:
            found = f"{models[-1].materials} materials, that of {args.run_dir} of {models[0].materials}"
            raise TomatError(f"the evaluation of {folder} is of {found}; expected the same ones. {_how(folder)}")
        if other := sorted({*models[-1].material_ids} ^ {*models[0].material_ids}):
            found = f"the evaluations of {folder} and {args.run_dir} do not both have {other[0]}"
            raise TomatError(f"{found}; expected the same materials. {_how(folder)}")
    show(models_table(models))
    if args.page is not None:
        write_small_models_page(models, args.page, args.about)
        console.print(f"page: {args.page}")
    if args.keep is not None:
        for folder, model in zip(folders[1:], models[1:], strict=True):
            console.print(f"kept: {keep_named(folder, model, args.keep)}", soft_wrap=True)
    write_report(args.json, {"models": [asdict(model) for model in models]})
    return 0


@dataclass(frozen=True)
class SmallModel:
    """One row of the table. Errors and seconds are medians over the materials."""

    name: str
    bits: str
    """Bits of a code, by part if they differ; 32 for a model that is not quantised."""
    scheme: str
    trained: str
    """What was trained after the conversion, and for how many steps; empty: nothing."""
    disk_bytes: int
    """Size of the arrays as stored."""
    memory_bytes: int
    """Size of the arrays after loading for prediction."""
    float32_bytes: int
    """Size of the same arrays in float32."""
    teacher_forced_nmae: float
    free_running_nmae: float
    seconds_per_cell: float
    materials: int
    material_ids: tuple[str, ...]


COLUMNS = (
    Column("folder"),
    Column("bits"),
    Column("scheme"),
    Column("trained"),
    Column("on disk, of float32", number(3)),
    Column("in memory, of float32", number(3)),
    Column("NMAE, structure only", share),
    Column("of the first", number(2)),
    Column("NMAE, teacher-forced", share),
    Column("of the first", number(2)),
    Column("seconds a cell", number(1)),
)


def models_table(models: Sequence[SmallModel]) -> Table:
    """A table that compares models with the first one."""
    first = models[0]
    rows = []
    for one in models:
        of_float32 = (one.disk_bytes / one.float32_bytes, one.memory_bytes / one.float32_bytes)
        alone = (one.free_running_nmae, one.free_running_nmae / first.free_running_nmae)
        forced = (one.teacher_forced_nmae, one.teacher_forced_nmae / first.teacher_forced_nmae)
        rows.append((one.name, one.bits, one.scheme, one.trained, *of_float32, *alone, *forced, one.seconds_per_cell))
    return Table("", COLUMNS, rows)


def small_model(folder: Path) -> SmallModel:
    """The row of a run, a folder of weights, or a run with `distillation`. Errors come from its `evaluation.json`."""
    from tomat.predict.inference.trained import load_trained
    from tomat.predict.weights.arrays import named_arrays
    from tomat.predict.weights.folder import read_weights
    from tomat.predict.weights.quantise import Quantised
    from tomat.predict.weights.record import is_weights_folder
    from tomat.train.settings.config import recorded_config

    measured = _measured(folder)
    run = load_trained(folder, packed=True)
    place = folder / WEIGHTS_FOLDER if is_weights_folder(folder / WEIGHTS_FOLDER) else folder
    bits, scheme, trained = "32", "", ""
    if is_weights_folder(place):
        stored = read_weights(place)
        bits, scheme = _bits(stored.quantised)
        whole = [its for its in stored.stored.values() if not isinstance(its, Quantised)]
        few = [part for its in stored.quantised.values() for part in its.arrays().values()]
        disk = sum(array.nbytes for array in (*whole, *few))
        float32 = sum(4 * prod(array.shape) for array in stored.stored.values())
    else:
        disk = float32 = sum(4 * array.size for array in named_arrays(run.model).values())
    distillation = recorded_config(place / CONFIG_FILE).distillation
    if distillation is not None:
        trained = f"{distillation.train}, {run.step + 1:,} steps"
    return SmallModel(folder.resolve().name, bits, scheme, trained, disk, memory_bytes(run.model), float32, *measured)


def memory_bytes(model: Any) -> int:
    """Size of a model's arrays."""
    import equinox as eqx
    import jax

    return sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))


def measure(folder: Path) -> None:
    """Evaluate a model on the held-out embedded densities and write `evaluation.json`, unless it exists. The evaluation
    is that of the end of a run."""
    if (folder / EVALUATION_FILE).exists():
        return
    from tomat.app.workflow.held_out import evaluate_held_out, held_out_materials
    from tomat.base.documents import with_checksum
    from tomat.train.settings.config import recorded_config

    config = recorded_config(folder / CONFIG_FILE)
    config = replace(config, evaluation=replace(config.evaluation, picture=False))
    held = held_out_materials(config, None) if config.data.source == "embedded" else None
    if held is None:
        raise TomatError(f"{folder} was not trained on the embedded densities: {_how(folder)}")
    teacher_forced, free_running = evaluate_held_out(config, folder, held)
    if teacher_forced is None or free_running is None:
        why = "its configuration leaves one out (evaluation.*), or its model cannot predict from a structure alone"
        raise TomatError(f"{folder} has no whole evaluation: {why}.")
    found = {**teacher_forced.to_dict(), "free_running": free_running.to_dict()}
    write_json(folder / EVALUATION_FILE, with_checksum(to_jsonable(found)))


def write_small_models_page(models: Sequence[SmallModel], page: Path, words: str) -> None:
    """Write or update the page, which compares models with the first one. `words`: how and where they were measured."""
    said = (
        f"Errors are medians over {models[0].materials} held-out materials; sizes are those of the weights, "
        f"{models[0].float32_bytes:,} bytes in float32. {words}"
    )
    verdict = "<!-- What follows from it. The text outside tomat's markers is yours. -->"
    sections = (Section("", [said, models_table(models)], "small-models"), Section("Verdict", by_hand=verdict))
    update_page(page, Report("Small models", sections))


def keep_named(folder: Path, model: SmallModel, output: Path) -> Path:
    """Copy a model's folder of weights to a name with its result, such as `demo-2bit-nmae2.81`, unless that exists.
    Returns the copy."""
    place = folder / WEIGHTS_FOLDER if (folder / WEIGHTS_FOLDER).is_dir() else folder
    if not (place / "weights.json").is_file():
        raise TomatError(f"{folder} has no folder of weights to keep; `tomat export` makes one.")
    kept = output / f"{model.name}-nmae{100 * model.free_running_nmae:.2f}"
    if not kept.exists():
        work = kept.with_name(f".{kept.name}.part")
        with writing(kept):
            output.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(place, work)
            work.rename(kept)
    return kept


class _Spread(TypedDict):
    median: Amount


class _Material(TypedDict):
    material_id: NotRequired[str]
    seconds: Amount


class _Cells(TypedDict):
    materials: Annotated[list[_Material], Meta(min_length=1)]


def _measured(folder: Path) -> tuple[float, float, float, int, tuple[str, ...]]:
    """Teacher-forced and free-running NMAE, seconds a cell, number and names of the materials."""
    path = folder / EVALUATION_FILE
    how = _how(folder)
    if not path.is_file():
        raise TomatError(f"{path} is missing: {how}")
    report, _ = parse_checked(path.read_bytes(), str(path), "an evaluation", how)
    remedy = f"For a report of whole predicted cells: {how}"
    cells = mapping(report.get("free_running"))

    def median(holder: Mapping[str, Any], name: str) -> float:
        figures = mapping(holder.get("over_materials")).get(name)
        return typed(figures, _Spread, f"{name} of {path}", remedy)["median"]

    materials = typed(cells, _Cells, f"free_running of {path}", remedy)["materials"]
    seconds = statistics.median(each["seconds"] for each in materials)
    names = tuple(each["material_id"] for each in materials if "material_id" in each)
    errors = median(report, "teacher_forced_nmae_median"), median(cells, "free_running_nmae")
    return *errors, seconds, len(materials), names


def _how(folder: Path) -> str:
    return f"`tomat eval --run {folder} --free_running --json {folder / EVALUATION_FILE}` measures it."


def _bits(quantised: dict[str, Quantised]) -> tuple[str, str]:
    """Bits of the matrices and their schemes, in words."""
    from tomat.predict.weights.arrays import part_of

    by_part: dict[str, set[int]] = {}
    for name, its in quantised.items():
        by_part.setdefault(str(part_of(name, its.shape)), set()).add(its.bits)
    if not by_part:
        return "32", ""
    schemes = "/".join(sorted({its.scheme for its in quantised.values()}))
    every = set.union(*by_part.values())
    if len(every) == 1:
        return str(every.pop()), schemes
    most = max(every, key=lambda bits: sum(bits in its for its in by_part.values()))
    others = [f"{part} {'/'.join(map(str, sorted(its)))}" for part, its in sorted(by_part.items()) if its != {most}]
    return f"{', '.join(others)}, rest {most}", schemes


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
