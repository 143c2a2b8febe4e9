"""What `tomat bench numerics` trains: a YAML file of variants of one configuration.

```yaml
name: numerics                       # of the page and the record
config_path: ../train/demo.yaml      # beside the file; with `overrides` it is the base
overrides: {trainer.num_train_steps: 400}
window_steps: 20
variants:
  - {name: unrolled, exact: true, reason: the same layers without a loop, overrides: {model.scan_layers: false}}
```
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.base.layout import RUN_NAME
from tomat.base.overrides import read_yaml, tomat_cause
from tomat.measure.bench.processes import compile_cache
from tomat.perf.tuning.changes import checked_keys, override_words

if TYPE_CHECKING:
    from tomat.train.settings.config import TrainConfig

BASE = "base"
"""Name of the configuration that every variant is compared with."""


@dataclass(frozen=True)
class Variant:
    """One change of the base."""

    name: str
    """Names the variant's runs."""
    exact: bool
    """Whether it is meant to compute the same numbers: only their rounding may differ."""
    reason: str
    """Why it is meant to be exact, or why it is not."""
    overrides: Any = field(default_factory=dict)
    """Dotted keys and values on top of the base."""

    def __post_init__(self) -> None:
        if not RUN_NAME.match(self.name):
            raise TomatError(f"variant {self.name!r}: expected letters, digits, '.', '_' and '-' as a name.")
        if not self.reason.strip():
            raise TomatError(f"variant {self.name} has no reason; say why it is exact or not.")
        object.__setattr__(self, "reason", " ".join(self.reason.split()))
        object.__setattr__(self, "overrides", checked_keys(self.overrides, f"variant {self.name}"))


@dataclass(frozen=True)
class NumericsConfig:
    """The variants of one configuration."""

    name: str
    """Of the page and the record."""
    config_path: str
    """The training configuration, relative to the variants' file."""
    variants: list[Variant]
    """In the order they are trained, after the base."""
    title: str = ""
    """Of the page."""
    introduction: str = ""
    """The page's first paragraph."""
    overrides: Any = field(default_factory=dict)
    """Dotted keys and values of every run."""
    window_steps: int = 20
    """Steps over which losses are averaged before they are compared."""
    first_step_tolerance: float = 1e-5
    """Largest relative difference of the first step's loss, which rounding alone may make, of an exact variant. The
    loss of one step rounds to 6e-8 in float32; computing in bfloat16 needs more."""

    def __post_init__(self) -> None:
        if not RUN_NAME.match(self.name):
            raise TomatError(f"name is {self.name!r}; expected letters, digits, '.', '_' and '-': it names files.")
        if not self.variants:
            raise TomatError("there are no variants; give at least one.")
        names = [BASE, *(variant.name for variant in self.variants)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise TomatError(f"more than one variant is called {twice[0]!r} ('{BASE}' is the configuration itself).")
        if self.window_steps < 1:
            raise TomatError(f"window_steps is {self.window_steps}; expected at least 1.")
        if not 0 < self.first_step_tolerance < 1:
            raise TomatError(f"first_step_tolerance is {self.first_step_tolerance}; expected between 0 and 1.")
        object.__setattr__(self, "overrides", checked_keys(self.overrides, "the file"))


def load_variants(path: str | Path) -> NumericsConfig:
    """Read a file of variants; `config_path` comes back relative to the working directory.

    Raises:
        TomatError: A file that cannot be read, an unknown or missing key, or a value that is refused.
    """
    import draccus

    values = read_yaml(path, "numerics")
    try:
        config = draccus.decode(NumericsConfig, values)
    except Exception as error:  # draccus wraps what a dataclass raises, by version and by depth, in several classes
        cause = tomat_cause(error)
        raise TomatError(f"{path}: {cause or ' '.join(str(error).split())}") from None
    introduction = " ".join(config.introduction.split())
    place = os.path.normpath(Path(path).parent / config.config_path)
    return replace(config, config_path=place, introduction=introduction, title=config.title or config.name)


@dataclass(frozen=True)
class PlannedRun:
    """One variant with one seed."""

    seed: int
    words: tuple[str, ...]
    """Of the command line of `tomat train`."""
    config: TrainConfig
    """What those words come to."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.config.run_name


def plan_runs(
    numerics: NumericsConfig, seeds: Sequence[int], steps: int | None, output_dir: Path
) -> dict[str, list[PlannedRun]]:
    """Every run by variant, the base first.

    Args:
        numerics: The variants.
        seeds: One run of each variant for each; a seed decides the initial weights and the order of the data.
        steps: Instead of the configuration's; schedules that are fractions of the run scale with it.
        output_dir: Holds the runs, and the programs they compile, which the seeds of a variant share.

    Raises:
        TomatError: A configuration that cannot be read, or a variant called exact that changes what is learnt.
    """
    from tomat.train.resume import changed_keys, plain_values
    from tomat.train.settings.config import load_config

    def plan(name: str, overrides: dict[str, Any], seed: int) -> PlannedRun:
        own: dict[str, Any] = {
            "run_name": f"{name}-seed-{seed}",
            "output_dir": str(output_dir),
            "tracking_dir": str(output_dir / "tracking"),
            "trainer.seed": seed,
            "trainer.jax_config": compile_cache(output_dir / "compiled"),
        }
        if steps is not None:
            own["trainer.num_train_steps"] = steps
        words = ["--config_path", numerics.config_path, *override_words(numerics.overrides | overrides | own)]
        return PlannedRun(seed, tuple(words), load_config(numerics.config_path, words[2:]))

    runs = {BASE: [plan(BASE, {}, seed) for seed in seeds]}
    _check_evaluated(runs[BASE][0].config)
    for variant in numerics.variants:
        runs[variant.name] = [plan(variant.name, variant.overrides, seed) for seed in seeds]
        changed = changed_keys(plain_values(runs[BASE][0].config), plain_values(runs[variant.name][0].config))
        if variant.exact and changed:
            raise TomatError(
                f"variant {variant.name} is called exact, but changes what is learnt: {', '.join(changed)}. "
                "Set exact: false."
            )
    return runs


def _check_evaluated(config: TrainConfig) -> None:
    if config.data.source != "embedded" or config.evaluation.patches_per_material < 1:
        raise TomatError(
            f"data.source is {config.data.source} and evaluation.patches_per_material "
            f"{config.evaluation.patches_per_material}; expected embedded and at least 1: the variants are compared by "
            "their evaluation on held-out materials."
        )
