"""What several tests ask of the runs that they train, and the damage that they do to them."""

from pathlib import Path
from typing import Any

import numpy as np

from tomat.train.runs.history import read_events, read_metrics


def losses(run: Path) -> list[float]:
    """Of training, in order of step."""
    return [row["train/loss"] for row in read_metrics(run / "metrics.jsonl")]


def events(run: Path, *names: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] in names]


def arrays(tree: object) -> list[np.ndarray]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same_model(one: Path, other: Path, step: int | None = None, other_step: int | None = None) -> None:
    """Bit for bit, of their newest checkpoints or those of the steps."""
    from tomat.predict.inference.trained import load_trained

    models = load_trained(one, step).model, load_trained(other, other_step).model
    for ours, theirs in zip(*map(arrays, models), strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_array_equal(ours, theirs)


def flipped(folder: Path) -> Path:
    """The largest file of a folder, in the middle of which one bit is another now."""
    path = max((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path
