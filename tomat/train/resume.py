"""Continuing a run as the run it was, and no other.

Four of the first generation's scripts in a row resumed on other data than the run had; the loss spiked and nobody knew
why. What decides what a model learns may therefore not change under a run's name, unless the change is named; what only
decides how fast or where it learns may: the keys whose field says so (`base/config_keys.py`), and no other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tomat.base.documents import flatten
from tomat.base.errors import TomatError
from tomat.base.storage import is_remote
from tomat.train.runs.checkpoints import survey
from tomat.train.runs.former_keys import former_key
from tomat.train.runs.record import read_config
from tomat.train.settings.config import TrainConfig
from tomat.train.settings.meanings import may_change, value_before

Changes = dict[str, tuple[Any, Any]]
"""Old and new value by dotted key."""


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Keys that decide what is learnt and whose value differs, each with its old and new value.

    A key that one side does not have counts as None there, or as what runs did before it was added. Keys that no
    longer are (`runs/former_keys.py`) are no difference.
    """
    flat_old, flat_new = flatten(old), flatten(new)
    changed = {}
    for key in sorted(flat_old.keys() | flat_new.keys()):
        before, after = (flat[key] if key in flat else value_before(key) for flat in (flat_old, flat_new))
        if before != after and not may_change(key) and former_key(key) is None:
            changed[key] = (before, after)
    return changed


def refuse_unnamed(what: str, lines: Mapping[str, str], allow: Sequence[str]) -> None:
    """Refuse differences, a line for each by its key, that are not all named in `allow`."""
    refused = {key: line for key, line in lines.items() if key not in allow}
    if refused:
        shown = "\n".join(f"  {line}" for line in refused.values())
        raise TomatError(
            f"{what}:\n{shown}\nPut back what the run began with, or use another run_name. A change that is meant is "
            f"taken by name and recorded: --allow_change {','.join(refused)}"
        )


def allowed_changes(old: Mapping[str, Any], config: TrainConfig, allow: Sequence[str], what: str) -> Changes:
    """The changes from the record `old` to `config`, all of which must be named by a key of the configuration; `what`
    names the run on record, such as "run 'a' exists"."""
    new = plain_values(config)
    changed = changed_keys(old, new)
    known = flatten(new).keys() | flatten(old).keys()
    for key in allow:
        if key not in known:
            below = sorted(name for name in changed if name.startswith(key + "."))
            hint = f"; below it these differ: {', '.join(below)}" if below else ""
            raise TomatError(
                f"--allow_change names '{key}', which is no key of the configuration{hint}. Give each key in full, "
                "such as optimizer.learning_rate."
            )
    lines = {key: f"{key}: {before!r} -> {after!r}" for key, (before, after) in changed.items()}
    refuse_unnamed(f"{what} with another configuration", lines, allow)
    return changed


def refuse_changes(recorded: Path, config: TrainConfig, allow: Sequence[str] = ()) -> Changes:
    """The changes since the `config.yaml` in a run's folder, all of which must be named; none where the run has no
    checkpoint."""
    run_url = config.run_dir if is_remote(config.output_dir) else str(recorded.parent)
    if survey(run_url, config.temporary_checkpoints) == (None, []):
        return {}
    if not recorded.exists() or not recorded.read_bytes().strip():
        raise TomatError(
            f"run '{config.run_name}' has checkpoints, but {recorded.name} in {run_url} is "
            f"{'empty' if recorded.exists() else 'missing'}, so that nothing shows whether this is the same run. Put "
            "it back from a copy (or start the command the run began with under a new run_name, and take the file that "
            "this writes), or use another run_name."
        )
    return allowed_changes(read_config(str(recorded)), config, allow, f"run '{config.run_name}' exists")


def plain_values(config: TrainConfig) -> dict[str, Any]:
    """The configuration as its `config.yaml` holds it, so that tuples and lists compare as what the file has."""
    return yaml.safe_load(yaml.safe_dump(config.to_dict()))
