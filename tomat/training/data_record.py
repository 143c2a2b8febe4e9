"""Which data a run was trained on: the hash of their content, recorded when it begins and compared when it goes on.

The configuration names a place. Another set put at that place, with the same codec and layout, would train on without a
word, in the middle of an epoch of other rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tomat.base.errors import TomatError
from tomat.training.datasets import Datasets

DATA_EVENT = "data"
"""The event of a run's history that holds the hashes; the last one counts."""

Contents = dict[str, str | None]
"""Content hash by key of the configuration, `data.train` and `data.validation`; None where there is no such set."""


def data_contents(datasets: Datasets) -> Contents:
    """The hashes of the open data."""
    validation = datasets.validation
    return {
        "data.train": datasets.train.content_sha256,
        "data.validation": None if validation is None else validation.content_sha256,
    }


def recorded_contents(events: Sequence[Mapping[str, Any]]) -> Contents | None:
    """The hashes that a run's history holds; None for a run from before they were recorded."""
    event = next((event for event in reversed(events) if event["event"] == DATA_EVENT), None)
    return None if event is None else {f"data.{name}": event.get(name) for name in ("train", "validation")}


def changed_contents(
    recorded: Contents | None, datasets: Datasets, allow: Sequence[str], whose: str
) -> dict[str, tuple[str | None, str | None]]:
    """Old and new hash of each set whose content is not the recorded one, by key.

    Args:
        recorded: Of the run on record; None: nothing is compared.
        datasets: The open data.
        allow: Keys that may differ.
        whose: Names the run on record in the error, such as "run 'a'".

    Raises:
        TomatError: With both hashes, if a set that differs is not named in `allow`.
    """
    if recorded is None:
        return {}
    urls = {"data.train": datasets.train.url, "data.validation": datasets.validation and datasets.validation.url}
    found = data_contents(datasets)
    changed = {key: (recorded.get(key), now) for key, now in found.items() if recorded.get(key) != now}
    refused = {key: hashes for key, hashes in changed.items() if key not in allow}
    if refused:
        lines = "\n".join(
            f"  {key} ({urls[key] or 'none'}): content {_short(now)}, expected {_short(before)}"
            for key, (before, now) in refused.items()
        )
        raise TomatError(
            f"{whose} was trained on other data than lie there now:\n{lines}\n"
            "Put back the data it began with, or use another run_name. A change that is meant is taken by name and "
            f"recorded: --allow_change {','.join(refused)}"
        )
    return changed


def _short(sha256: str | None) -> str:
    return "none" if sha256 is None else sha256[:12]
