"""Runs that others made with Levanter and published, as steps to plan. They are read from a table, row by row.

A row says what was run. This module adds what the table leaves out, the state of Levanter on that day, with sources:

- loss: the logits of all positions at once until marin-community/marin's pull request 2521 (2026-01-28) brought the
  fused cross-entropy, whose XLA form is the default on TPUs since pull request 3248 (2026-03-04);
- attention: splash where the head size is a multiple of 128. With other head sizes JAX's kernel raised an error until
  its release 0.7.2 (jax-ml/jax issue 30861 of 2025-08-08), and Levanter then used its JAX flash attention. Sinks in
  splash need the same release, and a run of 2025-11-11 has them: from that day on, all head sizes count as splash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any, TypedDict

from tomat.base.errors import TomatError
from tomat.base.records import Positive, typed
from tomat.base.reporting import write_json
from tomat.base.shipped import shipped_folder
from tomat.hardware.chips import slice_named
from tomat.perf.timed_kernels.timings import csv_rows
from tomat.perf.tuning.sweep_config import SweepConfig, SweepRow
from tomat.perf.tuning.sweep_record import RECORD_FORMAT, Seconds, read_record

NAME = "levanter-runs"
"""Name of the sweep, its record and its page."""
TEMPLATE = shipped_folder("compare") / "levanter-run.yaml"

FUSED_LOSS = date(2026, 1, 28)
SPLASH_ANY_HEAD = date(2025, 11, 11)
LANES = 128

DENSE = {"llama": "llama", "qwen3": "qwen3", "hackable": "llama"}
"""Families that are planned, with the `model.type` of each. `hackable` is the speedruns' own copy of Llama."""
REFUSED = {
    "moe(mixtral)": "a mixture of experts, whose router tomat does not train",
    "hackable_gdn": "gated DeltaNet layers, which Levanter 0.2.227 has in no decoder",
    "hackable_attn_gate": "gates on attention, which no configuration of a decoder of Levanter 0.2.227 can ask for",
    "hackable_attnsink": "attention sinks, which no configuration of a decoder of Levanter 0.2.227 can ask for",
    "hackable_nanogpt": "skips of its own between layers, which no decoder of Levanter 0.2.227 has",
}
"""Families that are not planned, with the reason for each."""

ADAMC = {"optimizer.adamc_weight_decay": True}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.type": "adam"},
    "adamc": {"optimizer.type": "adam", **ADAMC},
    "cautious adamw": {"optimizer.type": "cautious"},
    "c-adamc(cautious)": {"optimizer.type": "cautious", **ADAMC},
    "adamh": {"optimizer.type": "adamH"},
    "muon": {"optimizer.type": "muon"},
    "muon(kimi scaling)": {"optimizer.type": "muon", "optimizer.use_kimi_scaling": True},
    "muonc": {"optimizer.type": "muon"},  # its decay follows the learning rate, a scalar: no other operation
    "muonh": {"optimizer.type": "muonH"},
}
SAME_WORK = {
    **dict.fromkeys(("adamw", "adamc", "cautious adamw", "c-adamc(cautious)"), "adam"),
    **dict.fromkeys(("muon", "muon(kimi scaling)", "muonc"), "muon"),
}
"""Optimizers that differ only by elementwise operations, and their common name."""
RUNS_FILE = f"{NAME}.json"
"""File in a tracking folder with the measured times of the runs. Their plans are in the sweep's record."""

SLIP = 0.01
"""Share by which `step_seconds` may differ from `training_time_s` over `steps` by rounding. More is another unit."""


@dataclass(frozen=True, kw_only=True)
class _OnRecord:
    id: str
    source: str
    date: str
    family: str
    chip: str
    slice: str
    optimizer: str
    steps: Positive
    step_seconds: Seconds
    """The run's total time divided by its steps, with its compiles and all else that the time includes."""


@dataclass(frozen=True, kw_only=True)
class _Row(_OnRecord):
    num_layers: Positive
    hidden_dim: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    intermediate_dim: Positive
    vocab: Positive
    tied: bool
    seq_len: Positive
    batch: Positive
    num_chips: Positive
    gradient_checkpointing: bool
    qk_norm: str
    hybrid_norm: str
    training_time_s: Seconds

    def __post_init__(self) -> None:
        by_total = self.training_time_s / self.steps
        if abs(self.step_seconds / by_total - 1) > SLIP:
            said = f"step_seconds is {self.step_seconds:g}, and training_time_s over steps is {by_total:g}"
            raise ValueError(f"{said}; expected the same seconds")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not divide by {self.num_kv_heads} of keys and values")


@dataclass(frozen=True, kw_only=True)
class PublishedRun(_OnRecord):
    """A run on record, with the step to plan, or the reason why it is not planned."""

    step: str = ""
    """Describes a step. Runs with one text differ in no operation that takes time, except by Levanter's version."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Overrides of `TEMPLATE`; empty if it is not planned."""
    refused: str = ""
    """Why it is not planned; empty if it is."""
    assumed: str = ""
    """What the plan assumes because the table does not say it."""
    kept_aside: bool = False
    """Whether its shape is left out of all choices: about every third shape, by the hash of its dimensions."""


class _Kept(TypedDict):
    runs: list[PublishedRun]


def read_published_runs(path: Path) -> tuple[list[PublishedRun], list[str]]:
    """The valid rows of a table (CSV with the columns of `_Row`; other columns are ignored), and for each invalid row,
    what is wrong with it. A file that is no such table, or has no valid row, is refused."""
    needed = list(_Row.__dataclass_fields__)
    columns, lines = csv_rows(path, "published runs")
    if missing := [name for name in needed if name not in columns]:
        raise TomatError(f"{path} has no column {missing[0]}; expected {', '.join(needed)}.")
    runs: dict[str, PublishedRun] = {}
    wrong: list[str] = []
    for number, cells in lines:
        place = f"line {number} ({cells['id']})"
        try:
            row = typed(cells, _Row, place, "Correct or delete it; the others count.", text=True)
            if row.id in runs:
                raise TomatError(f"line {number}: another row is called {row.id} too; the first one counts.")
            runs[row.id] = _run(row)
        except TomatError as error:
            wrong.append(str(error))
    if not runs:
        raise TomatError(
            f"{path} has no row that can be used; {wrong[0] if wrong else 'there is none below the header'}"
        )
    return list(runs.values()), wrong


def keep_runs(tracking_dir: Path, runs: Sequence[PublishedRun]) -> None:
    write_json(tracking_dir / RUNS_FILE, {"record_format": RECORD_FORMAT, "runs": [asdict(run) for run in runs]})


def kept_runs(tracking_dir: Path) -> list[PublishedRun]:
    """The runs on record; none if there is no record."""
    path = tracking_dir / RUNS_FILE
    if not path.is_file():
        return []
    return read_record(path, _Kept)["runs"]


def published_sweep(runs: Sequence[PublishedRun]) -> SweepConfig:
    rows = [SweepRow(run.id, TEMPLATE, run.overrides, None, None) for run in runs if not run.refused]
    return SweepConfig(NAME, tuple(rows), "Planned beside real runs")


def _run(row: _Row) -> PublishedRun:
    shape = (row.num_layers, row.hidden_dim, row.num_heads, row.num_kv_heads, row.head_dim, row.intermediate_dim)
    digest = hashlib.sha256(repr(shape).encode()).digest()
    known = {one.name: getattr(row, one.name) for one in fields(_OnRecord)}
    optimizer = row.optimizer.split("(default")[0]
    dims = f"{row.num_layers} x {row.hidden_dim}, {row.batch} x {row.seq_len} tokens"
    step = f"{row.family} {dims}, {SAME_WORK.get(optimizer, optimizer)}, {row.slice}"
    known |= {"optimizer": optimizer, "kept_aside": digest[0] % 3 == 0, "step": step}
    if why := _why_not(row, optimizer):
        return PublishedRun(**known, refused=why)
    day = date.fromisoformat(row.date)
    other_head = row.head_dim % LANES != 0
    splash = not other_head or day >= SPLASH_ANY_HEAD
    overrides: dict[str, Any] = {
        "slice": row.slice,
        "data.seq_len": row.seq_len,
        "data.vocabulary_rows": row.vocab,
        "model.type": DENSE[row.family],
        "model.num_layers": row.num_layers,
        "model.hidden_dim": row.hidden_dim,
        "model.num_heads": row.num_heads,
        "model.num_kv_heads": row.num_kv_heads,
        "model.intermediate_dim": row.intermediate_dim,
        "model.tie_word_embeddings": row.tied,
        "model.gradient_checkpointing": row.gradient_checkpointing,
        "model.attn_backend": "splash" if splash else "jax_flash",
        "trainer.train_batch_size": row.batch,
        "trainer.num_train_steps": row.steps,
        **OPTIMIZERS[optimizer],
    }
    if row.head_dim * row.num_heads != row.hidden_dim:
        overrides["model.head_dim"] = row.head_dim
    if row.family == "llama" and row.qk_norm.startswith("true"):
        overrides["model.use_qk_norm"] = True
    if row.hybrid_norm == "true":
        overrides["model.hybrid_norm"] = True
    fused = day >= FUSED_LOSS
    if fused:
        overrides |= {"loss.kernel": "levanter", "loss.preamble_weight": 0.0}
    else:
        overrides["loss.block_positions"] = row.seq_len
    assumed = [f"loss: {'fused' if fused else 'all logits at once'}"]
    if other_head:
        assumed.append(f"heads of {row.head_dim}: {'splash' if splash else 'JAX flash'}")
    if row.family == "hackable":
        assumed.append("as Levanter's Llama of the same shape")
    return PublishedRun(**known, overrides=overrides, assumed="; ".join(assumed))


def _why_not(row: _Row, optimizer: str) -> str:
    """Why a row is not planned; empty if it is. Raises an error for a row that contradicts itself."""
    if row.family not in (*DENSE, *REFUSED):
        return f"family {row.family} is not known; planned are {', '.join(DENSE)}"
    if row.family in REFUSED:
        return REFUSED[row.family]
    try:
        date.fromisoformat(row.date)
    except ValueError:
        raise TomatError(f"{row.id}: date is {row.date!r}; expected YYYY-MM-DD.") from None
    try:
        slice_ = slice_named(row.slice)
    except TomatError as error:
        is_tpu = row.chip.lower().startswith(("v", "tpu"))
        return str(error) if is_tpu or not row.chip else "a GPU's step, which is not planned"
    if slice_.n_chips != row.num_chips:
        raise TomatError(
            f"{row.id}: num_chips is {row.num_chips}, and a {row.slice} has {slice_.n_chips}; correct one."
        )
    if optimizer not in OPTIMIZERS:
        return f"optimizer {optimizer}, which Levanter 0.2.227 does not have; planned are {', '.join(OPTIMIZERS)}"
    return ""
