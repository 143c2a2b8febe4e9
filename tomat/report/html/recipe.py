"""Where the configuration of a run differs from the shipped one that is nearest to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tomat.base.overrides import read_yaml
from tomat.base.shipped import shipped_configurations


@dataclass(frozen=True)
class Recipe:
    """A shipped configuration beside a run's."""

    name: str
    settings: Mapping[str, Any]
    """What it sets, by dotted key."""

    def differences(self, settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Dotted key -> (of the recipe, of the run), of what the recipe sets otherwise."""
        return {
            key: (value, settings.get(key))
            for key, value in self.settings.items()
            if key not in ("run_name", "purpose") and not _same(value, settings.get(key))
        }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def nearest_recipe(settings: Mapping[str, Any], paths: Iterable[Path] | None = None) -> Recipe | None:
    """The shipped configuration with the smallest share of settings that differ; None where none ships.

    Of several the one that says most: a recipe made of another one agrees with that too.

    A run does not record the file that it began with.
    """
    found = shipped_configurations("train").values() if paths is None else paths
    recipes = [Recipe(path.stem, flat(read_yaml(path))) for path in found]
    counted = [recipe for recipe in recipes if recipe.settings]
    return min(
        counted,
        key=lambda recipe: (
            len(recipe.differences(settings)) / len(recipe.settings),
            -len(recipe.settings),
            recipe.name,
        ),
        default=None,
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two values say the same setting: 1 and 1.0, a list and a tuple do, and a number as text (`1e-3`)."""
    if one == other:
        return True
    try:
        return float(one) == float(other)
    except (TypeError, ValueError):
        return str(one) == str(other)
