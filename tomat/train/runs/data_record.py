"""Which data a run was trained on: the hash of their content, recorded when it begins and compared when it goes on.

The configuration names a place. Another set put at that place, with the same codec and layout, would train on without a
word, in the middle of an epoch of other rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tomat.base.errors import TomatError
from tomat.train.runs.history import Event, last_event

DATA_EVENT = "data"
"""The event of a run's history that holds the hashes; the last one counts."""

Contents = dict[str, str | None]
"""Content hash by key of the configuration, `data.train` and `data.validation`; None where there is no such set."""

ContentChanges = dict[str, tuple[str | None, str | None]]
"""Old and new hash of each set whose content is another one, by key."""


def recorded_contents(events: Sequence[Event]) -> Contents | None:
    """The hashes that a run's history holds; None for a run from before they were recorded."""
    event = last_event(events, DATA_EVENT)
    return None if event is None else {f"data.{name}": event.get(name) for name in ("train", "validation")}


@dataclass(frozen=True)
class RecordedData:
    """Which data a run was trained on, as far as that is known."""

    whose: str
    """Names the run in errors, such as "run 'a'"."""
    contents: Contents | None
    """None: an earlier version left no record of them, and they are compared with nothing."""

    def changes(self, found: Contents, urls: Mapping[str, str | None], allow: Sequence[str]) -> ContentChanges:
        """What differs in the data that are there.

        Args:
            found: Their hashes.
            urls: Where they lie, by the same keys.
            allow: Keys that may differ.

        Raises:
            TomatError: With both hashes, if a set that differs is not named in `allow`.
        """
        if self.contents is None:
            return {}
        changed = {key: (self.contents.get(key), now) for key, now in found.items() if self.contents.get(key) != now}
        refused = {key: hashes for key, hashes in changed.items() if key not in allow}
        if refused:
            lines = "\n".join(
                f"  {key} ({urls[key] or 'none'}): content {_short(now)}, expected {_short(before)}"
                for key, (before, now) in refused.items()
            )
            raise TomatError(
                f"{self.whose} was trained on other data than lie there now:\n{lines}\n"
                "Put back the data it began with, or use another run_name. A change that is meant is taken by name and "
                f"recorded: --allow_change {','.join(refused)}"
            )
        return changed


def _short(sha256: str | None) -> str:
    return "none" if sha256 is None else sha256[:12]
