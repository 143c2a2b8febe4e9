"""Evaluations under a progress bar."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a caller pays for these only when it runs
    from levanter.models.lm_model import LmHeadModel

    from tomat.data.density.grid import DensityGrid
    from tomat.predict.evaluation.free_running import FreeRunningResult
    from tomat.predict.evaluation.result import TeacherForcedResult
    from tomat.predict.evaluation.teacher_forced import TeacherForcedEvaluator
    from tomat.predict.inference.predictor import RunPredictor


def evaluate_with_bar(
    evaluator: "TeacherForcedEvaluator",
    model: "LmHeadModel",
    names: "Sequence[str]",
    load: "Callable[[str], DensityGrid]",
    settings: "Mapping[str, Any]",
    report: Path | None = None,
) -> "TeacherForcedResult":
    """Evaluate under a progress bar, keeping finished materials beside the report to be, if there is to be one."""
    from tomat.base.progress import progress
    from tomat.predict.evaluation.partial import PartialResults
    from tomat.predict.evaluation.result import MaterialResult

    partial = None
    if report is not None:
        partial = PartialResults(partial_path(report), {**settings, **evaluator.sampling(model)})
    done = partial.done if partial is not None else {}
    with progress() as bar:
        materials = bar.add_task("materials", total=len(names), completed=sum(name in done for name in names))
        sequences = bar.add_task("sequences", total=None)

        def on_material(result: MaterialResult) -> None:
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
    names: "Sequence[str]",
    load: "Callable[[str], DensityGrid]",
    settings: "Mapping[str, Any]",
) -> "FreeRunningResult":
    """Free-running evaluation under a progress bar."""
    from tomat.base.progress import progress
    from tomat.predict.evaluation.free_running import evaluate_free_running

    with progress() as bar:
        materials = bar.add_task("whole cells", total=len(names))
        patches = bar.add_task("patches", total=None)
        return evaluate_free_running(
            predictor,
            predictor.promolecule,
            predictor.run.codec,
            names,
            load,
            settings={**settings, "predictor": predictor.identity},
            on_material=lambda material: bar.advance(materials),
            on_patches=lambda done, total: bar.update(patches, completed=done, total=total),
        )


def partial_path(report: Path) -> Path:
    """Where finished materials are kept beside a report to be."""
    return report.with_name(report.name + ".partial")
