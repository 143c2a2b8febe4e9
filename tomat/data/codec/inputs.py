"""Densities to fit or tokenize, by name: files, folders of them, or the embedded ones."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tomat.base.retries import with_retries
from tomat.data.density.demo.embedded import demo_materials, load_demo
from tomat.data.density.find import find_densities
from tomat.data.density.grid import DensityGrid
from tomat.data.density.io import check_species_apply, open_density, read_density
from tomat.data.density.rules import DEFAULT_RULES, ReadRules


@dataclass(frozen=True)
class DensityInputs:
    """Materials that can be read one by one."""

    material_ids: tuple[str, ...]
    """Their names, all different."""
    get_grid: Callable[[str], DensityGrid]
    """Reads the density of one, by name; raises TomatError if that is impossible, and RetryableError if its place
    cannot be reached now."""


def demo_inputs(split: Literal["train", "validation"] | None) -> DensityInputs:
    """The embedded densities of a split, "train" or "validation"; None for all."""
    names = tuple(material.material_id for material in demo_materials(split))
    return DensityInputs(names, lambda name: read_density(lambda: load_demo(name), f"the embedded {name}"))


def path_inputs(paths: Iterable[str], rules: ReadRules = DEFAULT_RULES) -> DensityInputs:
    """Densities in files, and in folders of files, as `find_densities` finds and names them.

    Args:
        paths: files, folders, URLs.
        rules: what may be assumed of them, and which refusals are lifted.

    Raises:
        TomatError: as `find_densities`; or the rules name elements and no file is of a kind that may lack them.
        UnreachableError: if a bucket cannot be reached.
    """
    found = {file.name: file.path for file in find_densities(paths, accept=rules.accept).files}
    check_species_apply(found.values(), rules)

    def get_grid(name: str) -> DensityGrid:
        return with_retries(lambda: open_density(found[name], name, rules), found[name])

    return DensityInputs(tuple(found), get_grid)
