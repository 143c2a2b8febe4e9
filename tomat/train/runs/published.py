"""A run's small files in its bucket: fetched before a run, published after it.

With `output_dir` in a bucket the checkpoints go there by themselves. Log, metrics and configuration are written on
local disk, where they can be appended to; a machine that takes over a preempted run needs them too. Which copy is ahead
is told by the events in it, never by a clock: those of two machines differ.
"""

from collections.abc import Sequence
from pathlib import Path

import fsspec

from tomat.base import layout
from tomat.base.reporting import write_bytes, writing
from tomat.base.storage import explaining_storage
from tomat.train.runs.history import file_content, read_events

PAGE_FILES = (layout.EVALUATION_FILE, layout.PAGE_FILE, layout.LOSS_FIGURE, layout.DENSITY_FIGURE,
              layout.PREDICTION_FIGURE, layout.REFERENCE_DENSITY, layout.PREDICTED_DENSITY,
              layout.HTML_FILE)  # fmt: skip
"""The run's page, and what is made with it after the training."""
PUBLISHED = (layout.CONFIG_FILE, layout.CODEC_FILE, layout.PROMOLECULE_FILE, layout.METRICS_FILE, layout.HISTORY_FILE,
             *PAGE_FILES)  # fmt: skip
"""What of a run's folder is published, where it is there."""


def fetch(run_url: str, run_dir: Path) -> list[str]:
    """Copy the published files that `run_dir` lacks, or all where another machine went on with the run; their names."""
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    fsspec.core.url_to_fs(run_url)[0].invalidate_cache()
    events, known = read_events(run_url), read_events(run_dir)
    # Every start, and every end that could be told, is an event: the bucket has one that this machine has not.
    overtaken = known[: len(events)] != events
    copied = []
    for name in PUBLISHED:
        local = run_dir / name
        kept = local.exists() and not overtaken
        # Lines that were cut for a resume which never began may come back: the next resume cuts them again.
        if kept and (name != layout.METRICS_FILE or events != known):
            continue
        content = file_content(f"{run_url}/{name}")
        if content is not None and not (kept and len(content) <= local.stat().st_size):
            write_bytes(local, content)
            copied.append(name)
    return copied


def publish(run_url: str, run_dir: Path, names: Sequence[str] = PUBLISHED) -> None:
    """Copy the files of `run_dir` to its bucket.

    Args:
        names: Which of them, where they are there; log and history only while no other process can write theirs
            (`train/runs/lock.py`).
    """
    files, root = fsspec.core.url_to_fs(run_url)
    for name in (name for name in names if (run_dir / name).exists()):
        content = (run_dir / name).read_bytes()
        remedy = "Give this user the right to write it, or set another --output_dir."
        with explaining_storage(f"{run_url}/{name} cannot be written", remedy):
            files.pipe_file(f"{root}/{name}", content)
