"""Runs beside each other: what differs in their settings, their losses by step, where their time went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tomat.base.documents import flatten, is_figure, mapping
from tomat.base.errors import TomatError
from tomat.base.layout import CODEC_FILE
from tomat.base.reporting import counted, is_or_are
from tomat.data.codec.files import codec_from_text
from tomat.train.runs.devices import NOT_ON_RECORD, devices_sentence
from tomat.train.runs.former_keys import former_key
from tomat.train.runs.history import file_content, recorded_contents
from tomat.train.runs.record import RunRecord, read_record
from tomat.train.runs.run_log import NAMES
from tomat.train.runs.summary import SEQUENCES, Figures, read_evaluation, run_figures, step_breakdown, validated

MOST_RUNS = 8
WINDOWS = 20
SAME_LOSS = ("loss.", "data.vocabulary_rows", "data.seq_len", "density_dropout", "distillation.")
"""Settings that decide what a loss is, or over which voxels; if one differs, losses cannot be compared."""
ONLY_SPEED = ("loss.block_positions", "loss.kernel", "loss.tiles", "loss.interpret")
"""Keys below these that decide only how the loss is computed."""
DATA_PLACES = ("data.source", "data.input", "data.train", "data.validation")


@dataclass(frozen=True)
class RunView:
    name: str
    """Unique in the comparison."""
    url: str
    figures: Figures
    breakdown_seconds: Mapping[str, float]
    losses: Mapping[int, float]
    validation: Mapping[int, float]
    devices: str = NOT_ON_RECORD
    """The devices that its speeds are measured on (`devices_sentence`)."""


@dataclass(frozen=True)
class Comparison:
    """Two runs or more; the others are compared with the first."""

    runs: tuple[RunView, ...]
    settings: Mapping[str, tuple[Any, ...]]
    """Values, run by run, of each dotted key in which they differ; None where a run does not have it."""
    not_comparable: tuple[str, ...]
    """Why their losses must not be compared; empty where they may be."""
    common_steps: tuple[int, ...]
    windows: tuple[tuple[int, int, tuple[float, ...]], ...]
    """First and last step of each window of common steps, and the mean training loss of each run over it."""

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "url", "devices", "figures", "breakdown_seconds")
        return {
            "runs": [
                {name: getattr(run, name) for name in names}
                | {"validation_loss_by_step": {str(step): loss for step, loss in run.validation.items()}}
                for run in self.runs
            ],
            "settings_that_differ": self.settings,
            "losses_comparable": not self.not_comparable,
            "not_comparable": self.not_comparable,
            "common_steps": len(self.common_steps),
            "windows": [
                {"first_step": first, "last_step": last, "training_loss": losses}
                for first, last, losses in self.windows
            ],
        }


def compare_runs(urls: Sequence[str]) -> Comparison:
    places = [url.rstrip("/") or "/" for url in urls]
    if not 2 <= len(places) <= MOST_RUNS or len(set(places)) < len(places):
        said = f"{counted(len(places), 'run')} {is_or_are(len(places))} named"
        raise TomatError(f"{said}; expected 2 to {MOST_RUNS}, each once.")
    records = [read_record(url) for url in places]
    names = [record.name for record in records]
    if len(set(names)) < len(names):
        names = places
    views = []
    for name, record in zip(names, records, strict=True):
        losses, validation = (
            {row["step"]: float(row[key]) for row in record.rows if is_figure(row.get(key))}
            for key in ("train/loss", "eval/validation/loss")
        )
        figures = run_figures(record.rows, read_evaluation(record.url), record.ran.rows)
        devices = devices_sentence(record.ran.devices, record.asked_slice)
        views.append(RunView(name, record.url, figures, step_breakdown(record.rows), losses, validation, devices))
    left_out = {key for record in records for key in flatten(record.config) if key in NAMES or former_key(key)}
    flat = [{key: value for key, value in flatten(record.config).items() if key not in left_out} for record in records]
    settings = {key: tuple(one.get(key) for one in flat) for key in sorted(set().union(*flat))}
    settings = {key: values for key, values in settings.items() if any(value != values[0] for value in values[1:])}
    common = sorted(set.intersection(*(set(view.losses) for view in views)))
    # At most `WINDOWS` parts, all of one size but the last.
    size = max(1, -(-len(common) // WINDOWS))
    windows = tuple(
        (part[0], part[-1], tuple(sum(view.losses[step] for step in part) / len(part) for view in views))
        for part in (common[start : start + size] for start in range(0, len(common), size))
    )
    return Comparison(tuple(views), settings, _not_comparable(records, settings), tuple(common), windows)


def _not_comparable(records: Sequence[RunRecord], settings: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """Why a loss of one run means something else than a loss of another."""
    reasons, codecs = [], []
    for record in records:
        content = file_content(url := f"{record.url}/{CODEC_FILE}")
        codec = None if content is None else codec_from_text(content.decode(errors="replace"), url)
        codecs.append("not recorded" if codec is None else codec.sha256[:12])
    if len(set(codecs)) > 1:
        sizes = [str(mapping(record.config.get("data")).get("n_density_tokens")) for record in records]
        reasons.append(f"their vocabularies differ: codecs {', '.join(codecs)} with {', '.join(sizes)} density ids")
    for key, values in settings.items():
        # A run from before there was such a key lacks it, and did what 0 does.
        if key.startswith(SAME_LOSS) and not key.startswith(ONLY_SPEED) and any(values):
            reasons.append(f"{key} differs: {', '.join(map(str, values))}")
    recorded = [recorded_contents(record.events) for record in records]
    if recorded.count(None) == len(records) and (places := [key for key in DATA_PLACES if key in settings]):
        reasons.append(f"the content of their data is not recorded, and {', '.join(places)} differs")
    contents = [one or {} for one in recorded]
    for key, words in (("data.train", "training"), ("data.validation", "validation")):
        hashes = [str(one.get(key) or "not recorded")[:12] for one in contents]
        if len(set(hashes)) > 1:
            reasons.append(f"their {words} data differ in content: {', '.join(hashes)}")
    newest = [next(reversed(validated(record.rows)), {}).get(SEQUENCES) for record in records]
    counts = [f"{count:,.0f}" if is_figure(count) else "unknown" for count in newest]
    if len({*counts} - {"unknown"}) > 1:
        reasons.append(f"their validation losses are means over other sequences: {', '.join(counts)} of them")
    return tuple(reasons)
