"""Densities to fit or tokenise, by name: files, folders of them, or the embedded ones."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from tomat.base.errors import TomatError
from tomat.base.retries import STORAGE_TRIES, with_retries
from tomat.density.demo.embedded import demo_materials, load_demo
from tomat.density.grid import DensityGrid
from tomat.density.io import check_species_apply, open_density, read_density
from tomat.density.rules import DEFAULT_RULES, ReadRules

_SUFFIXES = (".zarr", ".json.gz", ".json", ".gz", ".bz2", ".xz", ".vasp")
_PATTERNS = ("*.zarr", "*.json.gz", "CHGCAR*", "*.CHGCAR*", "*.vasp")


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
    """Densities in files, and in folders of files.

    Args:
        paths: CHGCAR files, `.json.gz` objects, `.zarr` groups, or folders (also `gs://`) that hold such. A material is
            called as its file without the suffixes; a file just called CHGCAR as its folder.
        rules: what may be assumed of them, and which refusals are lifted.

    Raises:
        TomatError: if a path does not exist, a folder holds no density, two files make one name, or the rules name
            elements and no file is of a kind that may lack them.
        UnreachableError: if a bucket cannot be reached.
    """
    found: dict[str, str] = {}
    for path in paths:
        for each in _expand(path):
            name = material_name(each)
            if name in found:
                raise TomatError(f"{found[name]} and {each} are both called {name}; rename one of them.")
            found[name] = each
    if not found:
        raise TomatError("No density was given; name files, folders, or the embedded data.")
    check_species_apply(found.values(), rules)

    def get_grid(name: str) -> DensityGrid:
        return with_retries(lambda: open_density(found[name], name, rules), found[name])

    return DensityInputs(tuple(found), get_grid)


def material_name(path: str) -> str:
    """The name of the material in a file: `mp-149` for `data/mp-149.zarr`, `mp-149.json.gz` and `mp-149/CHGCAR.gz`."""
    name = PurePosixPath(path.replace("\\", "/"))
    stem = name.name
    while (suffix := next((each for each in _SUFFIXES if stem.endswith(each)), None)) is not None:
        stem = stem.removesuffix(suffix)
    if stem in ("CHGCAR", "AECCAR0", "AECCAR2") and name.parent.name:
        return name.parent.name
    return stem


def _expand(path: str) -> list[str]:
    """The densities at a path: itself, or those in the folder, sorted."""
    path = path.rstrip("/")
    if path.endswith(".zarr"):
        return [path]
    if "://" in path:
        if path.endswith(_SUFFIXES):
            return [path]
        files = densities_below(path, ".zarr")
    else:
        folder = Path(path)
        if folder.is_file():
            return [path]
        if not folder.is_dir():
            raise TomatError(
                f"There is no file or folder {path}; expected CHGCAR files, .json.gz objects or .zarr groups."
            )
        files = {str(each) for pattern in _PATTERNS for each in folder.rglob(pattern)}
    if not files:
        raise TomatError(
            f"The folder {path} holds no density; expected CHGCAR files, .json.gz objects or .zarr groups."
        )
    return sorted(files)


def densities_below(root: str, suffix: str, tries: int = STORAGE_TRIES) -> list[str]:
    """The paths or URLs directly below a folder or URL that end in `suffix`.

    Raises:
        TomatError: as `asked`.
    """
    entries = asked(root, tries, lambda files, path: files.ls(path, detail=False))
    names = (str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries)
    return [f"{root}/{name}" for name in names if name.endswith(suffix)]


def asked[Answer](place: str, tries: int, ask: Callable[[Any, str], Answer]) -> Answer:
    """What `ask` says of the file system that a path or URL lies on, and its path there; tried again in an outage.

    Raises:
        TomatError: if there is no such place, or it cannot be read.
        UnreachableError: if it still cannot be reached after `tries` tries.
    """
    import fsspec

    def answer() -> Answer:
        try:
            return ask(*fsspec.core.url_to_fs(place))
        except FileNotFoundError as error:
            raise TomatError(f"There is no {place}. Give a path or URL that this user can read.") from error
        except (OSError, ValueError) as error:
            raise TomatError(f"Cannot read {place}: {type(error).__name__}: {error}.") from error

    return with_retries(answer, place, tries)
