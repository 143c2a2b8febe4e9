"""From a structure to a density: predictors, the structures they read, the files they leave.

`load(run).predict(structure)`: see `predictor.py`. Nothing heavy is imported before that call.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tomat.predict.inference.predictor import RunPredictor


def load(run_dir: str, **options: Any) -> "RunPredictor":
    """The predictor of a trained run; options as those of `tomat.predict.inference.predictor.load`."""
    from tomat.predict.inference.predictor import load as load_run

    return load_run(run_dir, **options)
