"""Densities to fit or tokenize, by name: files, folders of them, or the embedded ones."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tomat.base.errors import RetryableError, TomatError
from tomat.base.progress import progress
from tomat.base.retries import with_retries
from tomat.data.density.demo.embedded import demo_materials, load_demo
from tomat.data.density.grid import DensityGrid
from tomat.data.density.io import check_species_apply, find_densities, open_density, read_density
from tomat.data.density.rules import DEFAULT_RULES, ReadRules

SAVE_EVERY_SECONDS = 30.0
"""Between two saves of what was added: each takes a few tenths of a second."""


@dataclass(frozen=True)
class DensityInputs:
    """Materials that can be read one by one."""

    material_ids: tuple[str, ...]
    get_grid: Callable[[str], DensityGrid]
    """Reads the density of one, by name; raises TomatError if that is impossible, and RetryableError if its place
    cannot be reached now."""

    def add_to(
        self,
        add: Callable[[str, DensityGrid], None],
        added: Iterable[str],
        save: Callable[[], None],
        *,
        what: str,
        kept: object,
    ) -> dict[str, str]:
        """Add the densities that are not added yet to sums; why others could not be, by name."""
        done = set(added)
        if extra := sorted(done - set(self.material_ids)):
            raise TomatError(f"{kept} has {extra[0]}, which is not among the inputs. Give the same, or another file.")
        skipped: dict[str, str] = {}
        saved = time.monotonic()
        with progress() as bar:
            left = [name for name in self.material_ids if name not in done]
            for name in bar.track(left, description=what):
                try:
                    add(name, self.get_grid(name))
                except RetryableError:
                    raise
                except MemoryError as error:
                    raise TomatError(f"Memory ran out at {name}: {error}. Leave this material out.") from error
                except TomatError as error:
                    skipped[name] = str(error)
                    continue
                if time.monotonic() - saved > SAVE_EVERY_SECONDS:
                    save()
                    saved = time.monotonic()
        save()
        if len(skipped) == len(self.material_ids):
            reason = next(iter(skipped.values()), "there is no input")
            raise TomatError(f"No density could be read, so there is nothing to fit. The first reason: {reason}")
        return skipped


def demo_inputs(split: Literal["train", "validation"] | None) -> DensityInputs:
    """The embedded densities of a split, "train" or "validation"; None for all."""
    names = tuple(material.material_id for material in demo_materials(split))
    return DensityInputs(names, lambda name: read_density(lambda: load_demo(name), f"the embedded {name}"))


def path_inputs(paths: Iterable[str], rules: ReadRules = DEFAULT_RULES) -> DensityInputs:
    """Densities in files, and in folders of files, as `find_densities` finds and names them."""
    found = {file.name: file.path for file in find_densities(paths, accept=rules.accept).files}
    check_species_apply(found.values(), rules)
    return DensityInputs(
        tuple(found), lambda name: with_retries(lambda: open_density(found[name], name, rules), found[name])
    )
