"""Look at every density below a path once: what can be read, what is there twice, what is left out and why.

Each answer is kept as it is found, by the hash of the file, so that a survey that was stopped goes on, and one of a
folder with a new file reads that file alone.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tomat.base.errors import RetryableError, TomatError
from tomat.base.progress import progress
from tomat.base.records import Sha256, typed_text
from tomat.base.reporting import counted, first_line, writing
from tomat.data.dataset.contents import Material, file_sha256
from tomat.data.density.find import DensityFile, ignored_words
from tomat.data.density.grid import DensityGrid
from tomat.data.density.rules import ReadRules

SURVEY_FILE = "survey.jsonl"

Reader = Callable[[DensityFile], DensityGrid]


@dataclass(frozen=True)
class Survey:
    """What lies below a path."""

    materials: tuple[Material, ...]
    """That can be read, each density once, in the order of their files."""
    duplicates: Mapping[str, str]
    """Name of each further file of a density, to the name that it is kept under."""
    ignored: Mapping[str, str]
    """Why, by path, of every other file."""

    def words(self) -> str:
        """`10 read, 8 ignored: ..., 2 duplicates: b (of a)`."""
        twice = counted(len(self.duplicates), "duplicate")
        if self.duplicates:
            shown = [f"{name} (of {kept})" for name, kept in list(self.duplicates.items())[:5]]
            twice += ": " + ", ".join([*shown, *(["..."] if len(self.duplicates) > 5 else [])])
        return f"{len(self.materials):,} read, {ignored_words(self.ignored)}, {twice}"

    def without(self, used: Collection[str], ignored: Mapping[str, str]) -> "Survey":
        """With files that were of use after all (`used`) no longer ignored, but for those in `ignored`."""
        kept = {path: why for path, why in self.ignored.items() if path not in used}
        return replace(self, ignored={**kept, **ignored})


def hash_files(files: Sequence[DensityFile]) -> dict[str, str]:
    """Hash of each file, by path."""
    with progress() as bar:
        return {file.path: file_sha256(file.path) for file in bar.track(files, description="Comparing files")}


def survey(
    files: Sequence[DensityFile],
    hashes: Mapping[str, str],
    ignored: Mapping[str, str],
    read: Reader,
    check: Callable[[Material], object],
    kept: Path,
    rules: ReadRules,
) -> Survey:
    """Read what was not read before."""
    rule_words = {"species": list(rules.species), "accept": sorted(rules.accept)}
    known = _answers(kept, rule_words)
    found: list[Material] = []
    left_out = dict(ignored)
    with writing(kept):
        answers = kept.open("a", encoding="utf-8")
    with answers, progress() as bar:
        for file in bar.track(files, description="Reading densities"):
            key = hashes[file.path]
            answer = known.get(key)
            if answer is None:
                answer = _look(file, key, read)
                words = answer if isinstance(answer, str) else answer.to_dict()
                with writing(kept):
                    line = {"file_sha256": key, "read_rules": rule_words, "found": words}
                    answers.write(json.dumps(line) + "\n")
                    answers.flush()
            if isinstance(answer, Material):
                answer = replace(answer, name=file.name)
                try:
                    check(answer)
                except TomatError as error:
                    answer = first_line(error)
            if isinstance(answer, str):
                left_out[file.path] = answer
            else:
                found.append(answer)
    return _each_once(found, left_out)


def files_of_contents(
    wanted: Mapping[str, str], files: Sequence[DensityFile], hashes: Mapping[str, str], read: Reader, kept: Path
) -> dict[str, str]:
    """Paths of the files that hold given densities, whatever they are called and however they are packed. Nothing is
    written. Returns paths by material; one that no file holds is not in it.
    """
    known = _answers(kept)
    found: dict[str, str] = {}
    for file in files:
        if len(found) == len(wanted):
            break
        answer = known.get(hashes[file.path]) or _look(file, hashes[file.path], read)
        if isinstance(answer, Material) and answer.content_sha256 in wanted:
            found.setdefault(wanted[answer.content_sha256], file.path)
    return found


def _look(file: DensityFile, key: str, read: Reader) -> Material | str:
    """The density of a file, or why there is none."""
    try:
        return Material.of(read(file), file.name, key)
    except RetryableError:
        raise
    except MemoryError as error:
        raise TomatError(f"Memory ran out while {file.path} was read: {error}. Take it out of the folder.") from error
    except TomatError as error:
        return first_line(error).removeprefix(file.path).lstrip(" :")


def _each_once(found: Sequence[Material], ignored: Mapping[str, str]) -> Survey:
    """With the first of each density; only those of one formula and grid are compared."""
    groups: dict[tuple[object, ...], list[Material]] = {}
    duplicates: dict[str, str] = {}
    for material in found:
        group = groups.setdefault((material.formula, material.grid_shape), [])
        same = next((each for each in group if each.is_same(material)), None)
        if same is None:
            group.append(material)
        else:
            duplicates[material.name] = same.name
    return Survey(tuple(each for each in found if each.name not in duplicates), duplicates, ignored)


@dataclass(frozen=True)
class _Answer:
    file_sha256: Sha256
    found: Material | str
    read_rules: dict[str, list[str]] = field(default_factory=lambda: {"species": [], "accept": []})
    """Answers of before have none, and were asked for none."""

    def __post_init__(self) -> None:
        if isinstance(self.found, Material) and not self.found.is_whole:
            raise ValueError("expected sites and samples of every atom and voxel")


def _answers(kept: Path, rules: Mapping[str, list[str]] | None = None) -> dict[str, Material | str]:
    """What was found before, by the hash of the file, under the same rules (None: under any); a damaged line is passed
    over, and its file read again."""
    answers: dict[str, Material | str] = {}
    if not kept.exists():
        return answers
    for number, line in enumerate(kept.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        with contextlib.suppress(TomatError):
            answer = typed_text(line, _Answer, f"{kept}, line {number},", "")
            if rules is None or answer.read_rules == rules:
                answers[answer.file_sha256] = answer.found
    return answers
