"""A folder of densities as the data of a run: read, split by composition, and tokenized with a codec of its own. The
run's folder keeps all results in `data/`: what each file is, what the data are (`folder.json`, written once all files
are read), the fitted codec and promolecule, and the shard sets. A stopped preparation goes on when it is restarted."""

import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from tomat.base.documents import parse_checked, with_checksum
from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.records import typed
from tomat.base.reporting import console, counted, tell, write_bytes, write_text, writing
from tomat.base.retries import with_retries
from tomat.base.storage import Store
from tomat.data.codec.files import load_codec, write_codec
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import LloydMaxCodec, Objective
from tomat.data.codec.ratios import RatioHistogram, fit_codec
from tomat.data.codec.relative import OFFSET_E_PER_A3
from tomat.data.dataset.split import held_out_compositions
from tomat.data.dataset.survey import SURVEY_FILE, Material, Survey, file_sha256, files_of_contents, hash_files, survey
from tomat.data.dataset.valences import Potcars, choose_valences, potcars_beside
from tomat.data.density.grid import DensityGrid
from tomat.data.density.io import check_species_apply, find_densities, open_density
from tomat.data.density.promolecule import Promolecule, PromoleculeFit
from tomat.data.density.rules import ReadRules
from tomat.data.tokens.layouts import layout_named
from tomat.data.tokens.patch import check_cell_encodable
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.pipeline.sources import SAVE_EVERY_SECONDS
from tomat.data.tokens.pipeline.stages import Findings, Surveyed, UnitSurvey
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.structures import Structures
from tomat.data.tokens.writer import read_plan

FOLDER_FILE, LOCK_FILE = "folder.json", "data.lock"
HISTOGRAM_FILE, SUMS_FILE = "histogram.npz", "promolecule.sums"
CODEC_FILE, PROMOLECULE_FILE = "codec.json", "promolecule.json"
SPLITS = ("train", "validation")
SEED = 0
"""Seed of the patches' anchors."""
CACHE_BYTES = 2**29
"""Most bytes of densities kept in memory, since the survey, the fits and the tokens all read them."""
FEWEST_BINS = 32
_AGAIN = "Remove the folder and run the same command again."


@dataclass(frozen=True)
class FolderRequest:
    """The settings that decide the data of a run, besides the densities."""

    layout: str
    patches_per_material: int
    most_bins: int
    """Most bins of the codec. It has fewer if fewer reach `codec_floor`."""
    codec_objective: Objective
    codec_floor: float
    """NMAE that rounding to the codec's bins may cost, a fraction."""
    validation_share: float
    split_seed: int
    species: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    codec_relative: bool = False
    """The codec is relative to the promolecule."""


@dataclass(frozen=True)
class FolderData:
    folder: Path
    splits: Mapping[str, tuple[str, ...]]
    """Names of the materials that have rows, by split. A split without materials has no entry."""
    n_density_tokens: int
    load: "DensityReader" = field(repr=False)


class DensityReader:
    """Reads densities by the name of their material, and keeps them in memory up to `CACHE_BYTES`."""

    def __init__(self, paths: Mapping[str, str], rules: ReadRules) -> None:
        self.paths, self.rules = dict(paths), rules
        self._kept: dict[str, DensityGrid] = {}
        self._bytes = 0

    def __call__(self, name: str) -> DensityGrid:
        if name in self._kept:
            return self._kept[name]
        path = self.paths[name]
        grid = with_retries(lambda: open_density(path, name, self.rules), path)
        if self._bytes + grid.rho.nbytes <= CACHE_BYTES:
            self._kept[name], self._bytes = grid, self._bytes + grid.rho.nbytes
        return grid


def prepare_folder(place: str, request: FolderRequest, folder: Path, run_name: str) -> FolderData:
    """Make the data of a run from the densities below a path. Existing data must be of these densities and settings."""
    rules, layout = ReadRules(request.species, request.accept), layout_named(request.layout)
    listed = find_densities([place], accept=request.accept)
    files = listed.files
    check_species_apply((file.path for file in files), rules)
    if not (folder / FOLDER_FILE).exists() and any(read_plan(Store(folder / split)) is not None for split in SPLITS):
        raise TomatError(f"run '{run_name}' has data from another source in {folder}; use another --run_name.")
    with writing(folder, "Set --output_dir to a folder that this user may write."):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        recorded = _recorded(folder)
        if recorded is not None:
            _refuse_other_request(recorded.request, request, run_name)
        hashes, paths = hash_files(files), {file.name: file.path for file in files}
        reader = DensityReader(paths, rules)

        def check(material: Material) -> None:
            cell = material.crystal
            check_cell_encodable(material.name, material.grid_shape, cell.lattice, cell.atomic_numbers, layout)

        kept = folder / SURVEY_FILE
        looked = survey(files, hashes, listed.ignored, lambda file: reader(file.name), check, kept, rules)
        potcars = potcars_beside(file.path for file in files if file.path not in looked.ignored)
        # A POTCAR that was used is not ignored. One that was not used has a reason of its own.
        others = {path: why for path, why in looked.ignored.items() if path not in potcars.paths}
        looked = replace(looked, ignored={**others, **potcars.ignored})
        tell(f"{place}: {looked.words()}", soft_wrap=True)
        if recorded is None:
            recorded = _begin(folder, request, looked, place)
        else:
            _refuse_other_content(recorded.materials, looked, place, run_name)
        # Folders may have been moved, and files packed.
        now = {each.content_sha256: paths[each.name] for each in looked.materials}
        reader = DensityReader({each.name: now[each.content_sha256] for each in recorded.materials}, rules)
        return _tokenized(folder, request, recorded, reader, potcars)


def held_out_by_record(place: str, folder: Path, run_name: str) -> FolderData:
    """The densities below a path that a run held out, by its record, with their present files. A file has the recorded
    bytes or, if it was renamed or packed since, the recorded density. Writes nothing."""
    recorded, plan = _recorded(folder), read_plan(Store(folder / "validation"))
    if recorded is not None and not recorded.validation_formulas:
        raise TomatError(f"run '{run_name}' held nothing out of {place}; name densities with --input.")
    if recorded is None or plan is None or not plan.complete:
        lost = folder / (FOLDER_FILE if recorded is None else "validation")
        raise TomatError(
            f"{lost}, the record of what run '{run_name}' held out, is not there or not whole; put it back, or name "
            "the densities with --input."
        )
    names = [each.material_id for each in plan.materials]
    if "://" not in place and not Path(place).exists():
        raise TomatError(
            f"{place}, of which run '{run_name}' held out {_some(names)}, is not there (looked for in {Path.cwd()}); "
            "put it back, or name these densities with --input."
        )
    rules = ReadRules(recorded.request.species, recorded.request.accept)
    files = find_densities([place], accept=rules.accept).files
    held = {each.name: each for each in recorded.materials}
    held = {name: held[name] for name in names}
    # Most files are still in their place. The other files are read only if one is missing.
    beside = {file.name: file for file in files if file.name in held}
    paths = {name: f.path for name, f in beside.items() if file_sha256(f.path) == held[name].file_sha256}
    if len(paths) < len(held):
        others = [file for file in files if file.path not in paths.values()]
        wanted = {each.content_sha256: name for name, each in held.items() if name not in paths}
        read = DensityReader({file.name: file.path for file in others}, rules)
        kept = folder / SURVEY_FILE
        paths |= files_of_contents(wanted, others, hash_files(others), lambda file: read(file.name), kept)
    if lost := [name for name in names if name not in paths]:
        changed, gone = ([name for name in lost if (name in beside) == there] for there in (True, False))
        raise TomatError(
            f"{place} does not hold what run '{run_name}' held out of it:\n{_lines(changed=changed, gone=gone)}\nPut "
            "back what the run began with, or name densities with --input."
        )
    bins = open_shards(str(folder / "validation")).codec.n_density_tokens
    return FolderData(folder, {"validation": tuple(names)}, bins, DensityReader(paths, rules))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")


def _lines(**names: Sequence[str]) -> str:
    return "\n".join(f"  {what}: {_some(some)}" for what, some in names.items() if some)


def _begin(folder: Path, request: FolderRequest, looked: Survey, place: str) -> "_Record":
    """Choose what is held out, and write down what the data are."""
    if not looked.materials:
        raise TomatError(f"{place} holds no density that can be read: {looked.words()}.")
    compositions = [(each.formula, each.atoms) for each in looked.materials]
    chosen = held_out_compositions(compositions, request.validation_share, request.split_seed)
    if request.validation_share > 0 and not chosen:
        console.print("nothing can be held out: each composition has an element that no other has")
    record = _Record(request, list(looked.materials), list(chosen))
    write_text(folder / FOLDER_FILE, json.dumps(with_checksum(asdict(record)), sort_keys=True) + "\n")
    return record


def _tokenized(
    folder: Path, request: FolderRequest, recorded: "_Record", reader: DensityReader, potcars: Potcars
) -> FolderData:
    """Fit and tokenize what is not there yet, and say how the compositions are split."""
    held = set(recorded.validation_formulas)
    formulas = {each.name: each.formula for each in recorded.materials}
    learnt = [each for each in recorded.materials if each.formula not in held]
    out = [name for name, formula in formulas.items() if formula in held]
    names = {"train": [each.name for each in learnt], "validation": out}
    plans = {split: read_plan(Store(folder / split)) for split in SPLITS if names[split]}
    if not all(plan is not None and plan.complete for plan in plans.values()):
        codec, promolecule = _fit(folder, request, learnt, reader, potcars)
        # The survey has read all densities that the codec is fitted to; none of their voxels exceeds its range.
        found = tuple(
            Surveyed(m.name, m.grid_shape, sum(m.atoms.values()), m.electrons, clipped_voxels=0) for m in learnt
        )
        surveyed = Findings(UnitSurvey(found), Structures.of(each.crystal for each in learnt))
        for split in plans:
            plans[split] = write_shards(
                folder / split,
                names[split],
                reader,
                layout=layout_named(request.layout),
                codec=codec,
                patches_per_material=request.patches_per_material,
                seed=SEED,
                split=split,
                read_rules={"species": list(request.species), "accept": sorted(request.accept)},
                promolecule=promolecule,
                surveyed=surveyed if split == "train" else None,
            )
    splits = {split: tuple(each.material_id for each in plan.materials) for split, plan in plans.items() if plan}
    for split, plan in plans.items():
        for skipped in plan.skipped if plan else ():
            console.print(f"{split}: skipped {skipped.material_id}: {skipped.reason}", soft_wrap=True)
    bins = open_shards(str(folder / "train")).codec.n_density_tokens
    if bins > request.most_bins:
        raise TomatError(
            f"{folder} was tokenized with {bins:,} ids, but data.n_density_tokens allows {request.most_bins:,}; "
            "use another --run_name."
        )
    compositions = {split: sorted({formulas[name] for name in splits[split]}) for split in splits}
    words = {
        split: f"{counted(len(splits[split]), 'material')} of {counted(len(compositions[split]), 'composition')}"
        for split in splits
    }
    rest = "nothing held out"
    if shown := compositions.get("validation"):
        rest = f"{words['validation']} held out ({', '.join(shown[:8])}{', ...' if len(shown) > 8 else ''})"
    tell(f"{words['train']} to learn from, {rest}; {bins:,} bins", soft_wrap=True)
    return FolderData(folder, splits, bins, reader)


def _fit(
    folder: Path, request: FolderRequest, learnt: Sequence[Material], load: DensityReader, potcars: Potcars
) -> tuple[LloydMaxCodec, Promolecule]:
    """Codec and promolecule of the training densities, as fitted before or fitted now. A fit is one pass over the
    densities, two for a relative codec. It can be stopped and continued."""
    if not learnt:
        raise TomatError("there is no density to learn from; lower data.validation_share.")
    codec_file, promolecule_file = folder / CODEC_FILE, folder / PROMOLECULE_FILE
    if codec_file.exists() and promolecule_file.exists():
        codec = load_codec(codec_file)
        assert isinstance(codec, LloydMaxCodec)
        return codec, Promolecule.load(promolecule_file)
    valences, words = choose_valences(learnt, potcars, request.accept)
    tell(f"valence electrons: {words}", soft_wrap=True)
    kept_histogram, kept_sums = folder / HISTOGRAM_FILE, folder / SUMS_FILE
    again, names = "Remove it and run the same command again.", [each.name for each in learnt]
    densities = None if request.codec_relative else DensityHistogram()
    if densities is not None and kept_histogram.exists():
        densities = DensityHistogram.from_bytes(kept_histogram.read_bytes(), str(kept_histogram), again)
    sums = PromoleculeFit()
    if kept_sums.exists():
        sums = PromoleculeFit.from_bytes(kept_sums.read_bytes(), str(kept_sums), again)
    saved = time.monotonic()
    with progress() as bar:
        for name in bar.track(names, description="Fitting codec and atoms"):
            grid = load(name)
            if densities is not None and name not in densities.material_ids:
                densities.add_grid(grid, name)
            if name not in sums.material_ids:
                sums.add(grid, name)
            if time.monotonic() - saved > SAVE_EVERY_SECONDS:
                if densities is not None:
                    write_bytes(kept_histogram, densities.to_bytes())
                write_bytes(kept_sums, sums.to_bytes())
                saved = time.monotonic()
        promolecule = replace(sums.solve(), valences=valences)
        histogram = densities
        if histogram is None:
            if kept_histogram.exists():
                given = str(kept_histogram), promolecule, OFFSET_E_PER_A3, again
                histogram = RatioHistogram.from_bytes(kept_histogram.read_bytes(), *given)
            else:
                histogram = RatioHistogram(promolecule)
                write_bytes(kept_sums, sums.to_bytes())
            for name in bar.track(names, description="Counting ratios"):
                if name not in histogram.material_ids:
                    histogram.add_grid(load(name), name)
                if time.monotonic() - saved > SAVE_EVERY_SECONDS:
                    write_bytes(kept_histogram, histogram.to_bytes())
                    saved = time.monotonic()
    codec = choose_codec(histogram, request.most_bins, request.codec_objective, request.codec_floor)
    write_text(promolecule_file, promolecule.to_text())
    write_codec(codec, codec_file)
    for kept in (kept_histogram, kept_sums):
        kept.unlink(missing_ok=True)
    return codec, promolecule


def choose_codec(
    histogram: DensityHistogram | RatioHistogram, most_bins: int, objective: Objective, floor: float
) -> LloydMaxCodec:
    """The codec with the fewest bins, a power of two or `most_bins`, whose NMAE floor is below `floor`, a fraction.
    Twice as many bins halve the floor, but every bin is one more answer to learn from the same patches."""
    bins = min(FEWEST_BINS, most_bins)
    while True:
        codec = fit_codec(histogram, bins, objective)
        found = codec.fit["nmae_floor"][objective]["median"]
        if found < floor or bins >= most_bins:
            break
        bins = min(2 * bins, most_bins)
    what = f"{bins:,} bins, whose rounding alone costs an NMAE of {100 * found:.2g} %"
    if found >= floor:
        what += f"; {100 * floor:g} % was asked for, and data.n_density_tokens allows no more"
    tell(f"codec: {what}")
    return codec


@dataclass(frozen=True)
class _Record:
    request: FolderRequest
    materials: list[Material]
    validation_formulas: list[str]


def _recorded(folder: Path) -> _Record | None:
    place = folder / FOLDER_FILE
    if not place.exists():
        return None
    content, _ = parse_checked(place.read_bytes(), str(place), "the record of a folder's densities", _AGAIN)
    return typed(content, _Record, place, _AGAIN)


def _refuse_other_request(recorded: FolderRequest, request: FolderRequest, run_name: str) -> None:
    # `most_bins` is only a limit: the run's own configuration has the number that was chosen.
    keys = sorted(each.name for each in fields(FolderRequest) if each.name != "most_bins")
    pairs = [(key, getattr(recorded, key), getattr(request, key)) for key in keys]
    lines = [f"  {key}: {before!r} -> {now!r}" for key, before, now in pairs if before != now]
    if lines:
        listed = "\n".join(lines)
        raise TomatError(
            f"the data of run '{run_name}' were made with other settings:\n{listed}\nUse another --run_name, or the "
            "settings that the run began with."
        )


def _refuse_other_content(recorded: Sequence[Material], looked: Survey, place: str, run_name: str) -> None:
    """Refuse other densities than those that the run began with. Names may have changed, and files may be packed."""
    before = {each.content_sha256: each.name for each in recorded}
    now = {each.content_sha256: each.name for each in looked.materials}
    new = [name for content, name in now.items() if content not in before]
    gone = [name for content, name in before.items() if content not in now]
    if new or gone:
        raise TomatError(
            f"run '{run_name}' was begun with other densities than {place} holds now:\n{_lines(new=new, gone=gone)}\n"
            "Use another --run_name, or put back what the run began with."
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder for one process. Another process waits, and then finds what the first has made."""
    with writing(folder):
        file = (folder / LOCK_FILE).open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            tell(f"waiting for the process that prepares {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
