"""A run's small files in its bucket: fetched before a run, published after it.

With `output_dir` in a bucket the checkpoints go there by themselves. Log, metrics and configuration are written on
local disk, where they can be appended to; a machine that takes over a preempted run needs them too.
"""

from pathlib import Path

import fsspec

from tomat.training.history import HISTORY_FILE, read_events

CONFIG_FILE = "config.yaml"
CODEC_FILE = "codec.json"
PUBLISHED = (
    CONFIG_FILE,
    CODEC_FILE,
    "metrics.jsonl",
    HISTORY_FILE,
    "evaluation.json",
    "README.md",
    "loss.svg",
    "density.png",
)
"""What of a run's folder is published, where it is there."""


def is_remote(output_dir: str) -> bool:
    """Whether `output_dir` names a bucket and not a folder."""
    return "://" in output_dir


def fetch(run_url: str, run_dir: Path) -> list[str]:
    """Copy the published files that `run_dir` lacks, or all of them where another machine went on with the run since.

    Returns:
        The names that were copied.
    """
    files, root = fsspec.core.url_to_fs(run_url)
    files.invalidate_cache()
    copied = []
    run_dir.mkdir(parents=True, exist_ok=True)
    overtaken = _last_time(run_url) > _last_time(run_dir)
    for name in PUBLISHED:
        if (overtaken or not (run_dir / name).exists()) and files.exists(f"{root}/{name}"):
            (run_dir / name).write_bytes(files.cat_file(f"{root}/{name}"))
            copied.append(name)
    return copied


def publish(run_url: str, run_dir: Path) -> list[str]:
    """Copy the files of `run_dir` to its bucket.

    Returns:
        The names that were copied.
    """
    files, root = fsspec.core.url_to_fs(run_url)
    copied = [name for name in PUBLISHED if (run_dir / name).exists()]
    for name in copied:
        files.pipe_file(f"{root}/{name}", (run_dir / name).read_bytes())
    return copied


def _last_time(run: Path | str) -> str:
    """When the last event of a run's history was written; empty where it has none."""
    events = read_events(run)
    return str(events[-1].get("time", "")) if events else ""
