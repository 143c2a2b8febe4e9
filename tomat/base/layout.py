"""The names of a run's files, the statuses its process ends with, and where its hosts meet: what one room writes and
another reads."""

import re
import signal
from pathlib import Path

CONFIG_FILE = "config.yaml"
CODEC_FILE = "codec.json"
PROMOLECULE_FILE = "promolecule.json"
"""The promolecule of the data that the run was trained on, where they have one."""
METRICS_FILE = "metrics.jsonl"
HISTORY_FILE = "history.jsonl"
"""One JSON object for each event: starts, ends, changes, what the guards found."""
LOG_FILE = "log.jsonl"
"""Log of a folder that holds runs: one JSON object for each start, continuation and end of a run, and for each measured
row of a sweep."""
LOG_FOLDER = "log"
"""The same log in a bucket, where nothing can be appended to: an object for each entry."""
LOCK_FILE = "train.lock"
"""Locked by the process that trains a run in a folder."""
LEASE_FILE = "lease.json"
"""Renewed by the process that trains a run in a bucket."""

PAGE_FILE = "README.md"
LOSS_FIGURE = "loss.svg"
DENSITY_FIGURE = "density.png"
"""A slice of one held-out density, shown in the page: reference, prediction, difference."""
PREDICTION_FIGURE = "prediction.png"
REFERENCE_DENSITY = "held-out.reference.cube.gz"
"""The density of the first held-out material that was predicted from its structure."""
PREDICTED_DENSITY = "held-out.prediction.cube.gz"
HTML_FILE = "index.html"
"""The run's page for a browser: curves, tables, densities in one file."""
EVALUATION_FILE = "evaluation.json"
PROFILER_FOLDER = "profiler"
TRACKING_FOLDER = "tracking"
"""In a run's bucket: the page of its profile. The only other copy is on the machine, which is deleted."""

WEIGHTS_FOLDER = "weights"
"""Packed weights that a distillation ends with."""

CHECKPOINT_FOLDER = "checkpoints"
"""Holds a folder `step-N` for each checkpoint; the files below lie in those."""
METADATA_FILE = "metadata.json"
"""Written last by Levanter: step, time, and whether the checkpoint is temporary."""
UNMARKED_FILE = "metadata.partial.json"
"""What `METADATA_FILE` is renamed to in a checkpoint that is not whole, so that no other reader takes it for one."""
MANIFEST_FILE = "manifest.json"
"""Every array that the checkpoint holds, with its shape; written first by Levanter."""
CHECKSUM_FILE = "checksums.json"
"""Size and CRC32C of every file of the checkpoint."""

RUN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
"""Valid names of a run or sweep with a page in the tracking folder: its files have that name."""
DATA_DIR, FIGURES_DIR, SWEEPS_DIR, ARCHIVE_DIR, INDEX_FILE = "data", "figures", "sweeps", "archive", "index.md"
"""In the tracking folder: records of runs and plans, SVGs, records of sweeps, pages that are not made again, and the
table of all pages."""

REFUSED_STATUS = 2
"""Exit status of a `TomatError`: the same command would be refused again."""
RETRY_STATUS = 75
"""Exit status of a `RetryableError`: EX_TEMPFAIL of sysexits.h, "temporary failure; the user is invited to retry"."""
LOST_STATUS = 76
"""Exit status of a process whose run has lost another host. Starting the same command again, on all hosts, is right."""
HUNG_STATUS = 124
"""Exit status of a process that made no progress, ended by Levanter's watchdog (its `EXIT_STALL`, and that of
`timeout`). Starting the same command again is right."""
INTERRUPTED_STATUS = 128 + signal.SIGINT
"""Exit status after Ctrl-C: 130."""
STOPPED_STATUS = 128 + signal.SIGTERM
"""Exit status after SIGTERM: 143. The training was stopped in good order; start it again."""

COORDINATOR_PORT = 8476
"""Port of the coordination service on host 0 of a TPU slice. Google opens tcp 8470, 8471, 8474, 8476 and 11211 between
the hosts of a slice; jax 0.11.1 (`cloud_tpu_cluster.py`) takes 8482 instead, and waits there in silence (jax-ml/jax
35905). `JAX_COORDINATOR_PORT`, JAX's own variable, sets another."""

PACKAGED_MODEL = Path(__file__).parents[1] / "predict" / "packaged"
"""The packaged model: a folder of weights that `tomat compress` wrote from a run of `configs/train/packaged.yaml`."""
