"""Densities to fit or tokenize, by name. A broken density is skipped. A place that cannot be reached is tried again,
and then ends the run."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tomat.base.errors import RetryableError, TomatError
from tomat.base.progress import progress
from tomat.base.reporting import write_bytes
from tomat.base.retries import STORAGE_TRIES, with_retries
from tomat.data.density import io
from tomat.data.density.demo.embedded import demo_materials, load_demo
from tomat.data.density.grid import DensityGrid
from tomat.data.density.rules import DEFAULT_RULES, ReadRules
from tomat.data.tokens.manifest import check_material_id
from tomat.data.tokens.pipeline.config import RetokenizeConfig

SUFFIXES = {"rho_gga": ".zarr", "materials_project": ".json.gz"}
"""Suffix of the file of a listed id below the input."""
SAVE_EVERY_SECONDS = 30.0
"""Time between two saves of sums; a save takes a few tenths of a second."""


@dataclass(frozen=True)
class Material:
    material_id: str
    location: str
    """Path or URL; `embedded:<id>` for one that ships with tomat."""
    n_electrons: float | None = None
    """Valence electrons that its source states."""
    rules: ReadRules = DEFAULT_RULES
    get_grid: Callable[[str], DensityGrid] | None = None
    """Reads the density by name in this process, with its own retries; raises TomatError if this is impossible."""

    def read(self, tries: int) -> DensityGrid:
        if self.get_grid is not None:
            get_grid = self.get_grid
            return io.read_density(lambda: get_grid(self.material_id), self.location)
        if self.location.startswith("embedded:"):
            return io.read_density(lambda: load_demo(self.location.removeprefix("embedded:")), self.location)
        return with_retries(lambda: io.open_density(self.location, self.material_id, self.rules), self.location, tries)


@dataclass(frozen=True)
class DensityInputs:
    materials: Mapping[str, Material]

    @property
    def material_ids(self) -> tuple[str, ...]:
        return tuple(self.materials)

    def get_grid(self, name: str) -> DensityGrid:
        return self.materials[name].read(STORAGE_TRIES)

    def add_to(
        self,
        add: Callable[[DensityGrid, str], None],
        added: Iterable[str],
        to_bytes: Callable[[], bytes],
        *,
        what: str,
        kept: Path | None,
    ) -> dict[str, str]:
        """Add the densities that are not added yet to sums. The file `kept`, if given, holds the sums as they grow.
        Returns by name why densities could not be added."""

        def save() -> None:
            if kept is not None:
                write_bytes(kept, to_bytes())

        done = set(added)
        if extra := sorted(done - set(self.materials)):
            raise TomatError(f"{kept} has {extra[0]}, which is not among the inputs. Give the same, or another file.")
        skipped: dict[str, str] = {}
        saved = time.monotonic()
        with progress() as bar:
            left = [name for name in self.materials if name not in done]
            for name in bar.track(left, description=what):
                try:
                    add(self.get_grid(name), name)
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
        if len(skipped) == len(self.materials):
            reason = next(iter(skipped.values()), "there is no input")
            raise TomatError(f"No density could be read, so there is nothing to fit. The first reason: {reason}")
        return skipped


def demo_inputs(split: str | None) -> DensityInputs:
    """The embedded densities of a split, "train" or "validation"; None for all."""
    return DensityInputs({each.material_id: each for each in _embedded(split)})


def path_inputs(paths: Iterable[str], rules: ReadRules = DEFAULT_RULES) -> DensityInputs:
    """Densities in files, and in folders of files, as `find_densities` finds and names them."""
    files = io.find_densities(paths, accept=rules.accept).files
    io.check_species_apply((file.path for file in files), rules)
    return DensityInputs({file.name: Material(file.name, file.path, rules=rules) for file in files})


def _embedded(split: str | None) -> list[Material]:
    found = demo_materials(split)
    return [Material(each.material_id, f"embedded:{each.material_id}", each.n_electrons) for each in found]


def find_materials(config: RetokenizeConfig) -> tuple[Material, ...]:
    """The materials that a configuration names, in the order of their rows."""
    if config.source == "embedded":
        materials = _embedded(config.split or None)
    elif config.filelist is not None:
        materials = _listed(config)
    else:
        materials = _found(config)
    # The survey compares the electron count with what source or `valences` state.
    rules = ReadRules(tuple(config.species), tuple(config.accept), count_electrons=False)
    materials = [replace(material, rules=rules) for material in materials]
    seen: dict[str, Material] = {}
    for material in materials:
        check_material_id(material.material_id)
        if material.material_id in seen:
            places = f"{seen[material.material_id].location} and {material.location}"
            raise TomatError(f"Material {material.material_id} is named twice: {places}. Name each material once.")
        seen[material.material_id] = material
    if not seen:
        raise TomatError(f"The split '{config.split}' is empty; expected at least one material.")
    return tuple(materials)


def _listed(config: RetokenizeConfig) -> list[Material]:
    assert config.filelist is not None
    if config.source not in SUFFIXES:
        raise TomatError(f"A filelist needs source rho_gga or materials_project; found '{config.source}'.")
    lines = io.text_at(_below(config.filelist, config.input), config.storage_tries).splitlines()
    names = [io.material_name(line.strip()) for line in lines if line.strip()]
    chosen = range(len(names))
    if config.split_file is not None:
        place = _below(config.split_file, config.input)
        try:
            splits = json.loads(io.text_at(place, config.storage_tries))
            chosen = splits[config.split]
            bad = [index for index in chosen if not (isinstance(index, int) and 0 <= index < len(names))]
        except (ValueError, KeyError, TypeError) as error:
            raise TomatError(
                f"{place} has no list of indices for the split '{config.split}' ({type(error).__name__}: {error}); "
                'expected JSON such as {"train": [0, 2], "validation": [1]}.'
            ) from error
        if bad:
            raise TomatError(
                f"{place} names the index {bad[0]!r} in the split '{config.split}'; {config.filelist} has 0 to "
                f"{len(names) - 1}. Is it the split of another list?"
            )
    root, suffix = _density_folder(config), SUFFIXES[config.source]
    return [Material(names[index], f"{root}/{names[index]}{suffix}") for index in chosen]


def _density_folder(config: RetokenizeConfig) -> str:
    """Where the densities lie: the input, or the folder `label` of a `rho_gga` tree."""
    root = config.input.rstrip("/")
    if config.source != "rho_gga":
        return root
    is_tree = io.asked(root, config.storage_tries, lambda files, path: files.isdir(f"{path.rstrip('/')}/label"))
    return f"{root}/label" if is_tree else root


def _found(config: RetokenizeConfig) -> list[Material]:
    """Every density below the input, in the order of their paths."""
    root = _density_folder(config)
    if config.source in SUFFIXES:
        paths = sorted(io.densities_below(root, SUFFIXES[config.source], config.storage_tries))
        found = [Material(io.material_name(path), path) for path in paths]
    elif config.source == "chgcar" and "://" in root:
        raise TomatError(f"CHGCARs are read from a local folder; found {root}. Copy them, or convert them to Zarr.")
    else:
        files = io.find_densities([root], config.storage_tries, config.accept).files
        found = [
            Material(file.name, file.path) for file in files if config.source == "folder" or io.is_chgcar(file.path)
        ]
    if not found:
        raise TomatError(f"{root} holds no density of the kind '{config.source}'; check --input and --source.")
    return found


def _below(place: str, root: str) -> str:
    """`place` itself, or its place below `root` if it is a relative path that does not exist here."""
    if "://" in place or Path(place).is_absolute() or Path(place).exists():
        return place
    return f"{root.rstrip('/')}/{place}"
