"""The evaluations at the end of a training, on whole held-out materials: embedded ones, or those of a folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.base.layout import DENSITY_FIGURE, PREDICTED_DENSITY, PREDICTION_FIGURE, REFERENCE_DENSITY
from tomat.base.progress import progress
from tomat.base.reporting import counted, tell

if TYPE_CHECKING:
    from levanter.models.lm_model import LmHeadModel

    from tomat.data.dataset.folder import FolderData
    from tomat.data.density.grid import DensityGrid
    from tomat.predict.evaluation.free_running import FreeRunningResult
    from tomat.predict.evaluation.result import MaterialResult, TeacherForcedResult
    from tomat.predict.evaluation.teacher_forced import TeacherForcedEvaluator
    from tomat.predict.inference.predictor import RunPredictor
    from tomat.train.settings.config import TrainConfig

MOST_SHOWN = 20
"""Most files that are listed by name."""


@dataclass(frozen=True)
class HeldOut:
    names: Sequence[str]
    load: "Callable[[str], DensityGrid]"
    """Reads a density on the grid that it was tokenized on."""
    load_whole: "Callable[[str], DensityGrid]"
    """Reads a density on the grid that it is predicted on."""
    words: tuple[str, str]
    """Where the densities come from, in words: for the teacher-forced and for the free-running evaluation."""
    groups: Mapping[str, str] | None = None
    """Name of an embedded material -> its group."""


def held_out_materials(config: "TrainConfig", data: "FolderData | None") -> HeldOut | None:
    """The materials that a run is evaluated on: all held-out ones, or as many as `evaluation.materials` says. None for
    a run on shard sets, which hold densities only as tokens, and for a run that held nothing out."""
    asked = config.evaluation
    if data is not None:
        every = data.splits.get("validation", ())
        words = f"held out of {config.data.input}"
        held = HeldOut(every[: asked.materials], data.load, data.load, (words, words))
    elif config.data.source == "embedded":
        from tomat.data.density.demo.embedded import demo_materials, groups_of, load_demo, load_stored

        every = [material.material_id for material in demo_materials("validation")]
        words = "embedded validation", "embedded validation, stored grids"
        held = HeldOut(every[: asked.materials], load_demo, load_stored, words, groups_of(every))
    else:
        return None
    if len(held.names) < len(every):
        tell(f"evaluated on {len(held.names)} of {len(every):,} held-out materials (evaluation.materials)")
    return held if held.names else None


def held_out_of_run(config: "TrainConfig", run_dir: Path) -> HeldOut:
    """The materials that a run on a folder of densities was evaluated on at its end, from the record of its data. Their
    files are listed on the terminal."""
    from tomat.data.dataset.folder import FOLDER_FILE, held_out_by_record

    assert config.data.input is not None  # or `DataConfig` would have refused it
    data = held_out_by_record(config.data.input, run_dir / "data", config.run_name)
    held = held_out_materials(config, data)
    if held is None:
        raise TomatError(f"evaluation.materials of run '{config.run_name}' is 0; name densities with --input.")
    lines = [f"  {data.load.paths[name]}" for name in held.names[:MOST_SHOWN]]
    lines += [f"  and {len(held.names) - MOST_SHOWN:,} more"] if len(held.names) > MOST_SHOWN else []
    tell(
        f"{counted(len(held.names), 'density', 'densities')}, held out by the record of the run "
        f"({run_dir / 'data' / FOLDER_FILE}) and unchanged since:",
        *lines,
        sep="\n",
        soft_wrap=True,
    )
    return held


def evaluate_held_out(
    config: "TrainConfig", run_dir: Path, held: HeldOut
) -> "tuple[TeacherForcedResult | None, FreeRunningResult | None]":
    """Run the evaluations that were asked for and that the model can do, with pictures of the first material if set."""
    from tomat.data.density.crystal import Crystal
    from tomat.data.density.outputs import write_density
    from tomat.model.any_decoder import is_field
    from tomat.predict.evaluation.picture import draw_plane, predicted_plane, teacher_forced_plane
    from tomat.predict.evaluation.teacher_forced import TeacherForcedConfig, evaluator_of
    from tomat.predict.inference.decoding import can_predict
    from tomat.predict.inference.interface import ACCEPTABLE
    from tomat.predict.inference.predictor import RunPredictor
    from tomat.predict.inference.trained import load_trained

    asked = config.evaluation
    run = load_trained(run_dir, packed=True)
    names, (patch_words, cell_words) = held.names, held.words
    evaluation = free_running = None
    if asked.patches_per_material > 0 and not is_field(config.model):
        sampling = TeacherForcedConfig(patches_per_material=asked.patches_per_material, seed=asked.seed)
        with evaluator_of(run, sampling) as (evaluator, model):
            evaluation = evaluate_with_bar(evaluator, model, names, held.load, run.settings(patch_words))
            if asked.picture:
                plane = teacher_forced_plane(evaluator, model, held.load(names[0]))
                draw_plane(plane, run_dir / DENSITY_FIGURE)
    if asked.free_running and can_predict(run):
        predictor = RunPredictor(run)
        free_running = predict_with_bar(predictor, names, held.load_whole, run.settings(cell_words), held.groups)
        if asked.picture:
            truth, first = held.load_whole(names[0]), free_running.materials[0]
            crystal, accept = Crystal.of(truth), tuple(ACCEPTABLE)
            prediction = predictor.predict(crystal, truth.grid_shape, electrons=first.electrons, accept=accept)
            draw_plane(predicted_plane(prediction.rho, truth), run_dir / PREDICTION_FIGURE)
            # For the run's page, which draws both densities.
            write_density(truth, run_dir / REFERENCE_DENSITY, "cube")
            write_density(prediction, run_dir / PREDICTED_DENSITY, "cube")
    return evaluation, free_running


def evaluate_with_bar(
    evaluator: "TeacherForcedEvaluator",
    model: "LmHeadModel",
    names: Sequence[str],
    load: "Callable[[str], DensityGrid]",
    settings: Mapping[str, Any],
    report: Path | None = None,
    of: Mapping[str, str | None] | None = None,
) -> "TeacherForcedResult":
    """Evaluate under a progress bar. If there will be a report, finished materials are kept in a file beside it. `of`:
    hashes of weights and densities, without which those of an earlier start are not taken."""
    from tomat.predict.evaluation.result import PartialResults

    partial = None
    if report is not None:
        partial = PartialResults(partial_path(report), {**settings, **evaluator.sampling(model)}, of)
    done = partial.done if partial is not None else {}
    with progress() as bar:
        materials = bar.add_task("materials", total=len(names), completed=sum(name in done for name in names))
        sequences = bar.add_task("sequences", total=None)

        def on_material(result: "MaterialResult") -> None:
            if partial is not None:
                partial.add(result)
            bar.advance(materials)

        return evaluator.evaluate(
            model,
            names,
            load,
            settings=settings,
            done=done,
            on_material=on_material,
            on_sequences=lambda done, total: bar.update(sequences, completed=done, total=total),
        )


def predict_with_bar(
    predictor: "RunPredictor",
    names: Sequence[str],
    load: "Callable[[str], DensityGrid]",
    settings: Mapping[str, Any],
    groups: Mapping[str, str] | None = None,
) -> "FreeRunningResult":
    """Free-running evaluation under a progress bar. `groups`: material -> its group, whose figures are kept apart."""
    from tomat.predict.evaluation.free_running import evaluate_free_running

    with progress() as bar:
        materials = bar.add_task("whole cells", total=len(names))
        patches = bar.add_task("patches", total=None)
        return evaluate_free_running(
            predictor,
            predictor.run.codec,
            names,
            load,
            settings={**settings, "predictor": predictor.identity},
            groups=groups,
            on_material=lambda material: bar.advance(materials),
            on_patches=lambda done, total: bar.update(patches, completed=done, total=total),
        )


def partial_path(report: Path) -> Path:
    """The file for finished materials, beside a report that is not written yet."""
    return report.with_name(report.name + ".partial")
