"""A folder becomes the data of a run once, whatever stops it, and no other folder does under that name."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from density_folder import small_grid, write_folder

from tomat.base.errors import TomatError
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.dataset import folder, survey
from tomat.data.dataset.folder import FolderRequest, choose_codec, held_out_by_record, prepare_folder
from tomat.data.dataset.survey import Material
from tomat.data.density.grid import DensityGrid
from tomat.data.density.outputs import write_density
from tomat.data.tokens.shards import open_shards

REQUEST = FolderRequest("v3-p7", 2, 64, "absolute", 0.05, 0.3, 0)


@pytest.fixture
def densities(tmp_path):
    return write_folder(tmp_path / "in")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    place = tmp_path_factory.mktemp("kept")
    prepare(write_folder(place / "in"), place)
    return place


@pytest.fixture
def prepared(tmp_path, kept):
    """Densities whose data are made already."""
    return shutil.copytree(kept, tmp_path, dirs_exist_ok=True) / "in"


def prepare(densities, tmp_path, request=REQUEST):
    return prepare_folder(str(densities), request, tmp_path / "run" / "data", "r")


def contents(data):
    return {split: open_shards(str(data.folder / split)).content_sha256 for split in data.splits}


def test_a_folder_becomes_two_sets(densities, tmp_path, capsys):
    data = prepare(densities, tmp_path)
    words = " ".join(capsys.readouterr().out.split())
    assert "7 read, 3 ignored: " in words and "a/INCAR (its name is that of no density);" in words
    assert "NaCl/POSCAR (a structure without a density)" in words and "in/cut.CHGCAR (is not a complete CHGCAR" in words
    assert "2 duplicates: copy (of NaF), same (of NaF)" in words
    every = [name for split in data.splits.values() for name in split]
    assert sorted(every) == ["Mg", "MgCl2", "MgF2", "MgO", "NaCl", "NaF", "NaF-strained"]
    train, held = ({data.load(name).formula for name in data.splits[split]} for split in ("train", "validation"))
    assert held and not held & train
    train, validation = (open_shards(str(data.folder / split)) for split in ("train", "validation"))
    assert train.codec.sha256 == validation.codec.sha256 and train.promolecule is not None
    assert train.codec.n_density_tokens == data.n_density_tokens <= 64
    assert train.rows == 2 * len(data.splits["train"])
    assert data.load("NaCl").formula == "ClNa"


def test_it_is_made_once_and_goes_on_wherever_it_was_stopped(densities, tmp_path, monkeypatch):
    whole = contents(prepare(densities, tmp_path))
    shutil.copytree(tmp_path / "run", tmp_path / "kept")

    def refuse(*args, **kwargs):
        raise AssertionError("nothing is read or written again")

    with monkeypatch.context() as patched:
        patched.setattr(folder, "open_density", refuse)
        patched.setattr(folder, "write_shards", refuse)
        assert contents(prepare(densities, tmp_path)) == whole

    class Stop(BaseException):
        pass

    shutil.rmtree(tmp_path / "run")
    read = []

    def stopping_after(true, most):
        calls = []

        def call(*args, **kwargs):
            calls.append(args)
            if len(calls) > most:
                raise Stop
            return true(*args, **kwargs)

        return call

    def remembered(file, *rest, look=survey._look):
        read.append(file.path)
        return look(file, *rest)

    monkeypatch.setattr(survey, "_look", stopping_after(remembered, 3))
    with pytest.raises(Stop):
        prepare(densities, tmp_path)
    monkeypatch.setattr(survey, "_look", remembered)
    for name, most in (("choose_codec", 0), ("write_shards", 1), ("open_shards", 0)):
        with monkeypatch.context() as patched, pytest.raises(Stop):
            patched.setattr(folder, name, stopping_after(getattr(folder, name), most))
            prepare(densities, tmp_path)
    assert contents(prepare(densities, tmp_path)) == whole
    assert len(set(read)) == len(read) == 10


def test_a_density_is_opened_once_a_stage(densities, tmp_path, monkeypatch):
    """Survey, fit, rows. Of a held-out density the voxels outside the codec are counted in place of the fit."""
    opened = []

    def remembered(path, *rest, true=folder.open_density):
        opened.append(Path(path).name)
        return true(path, *rest)

    monkeypatch.setattr(folder, "open_density", remembered)
    monkeypatch.setattr(folder, "CACHE_BYTES", 0)
    data = prepare(densities, tmp_path)
    times = {
        split: {opened.count(Path(data.load.paths[name]).name) for name in names}
        for split, names in data.splits.items()
    }
    # The last two of the count are still in memory when their rows are written.
    assert times == {"train": {3}, "validation": {2}}


def test_other_densities_under_the_same_name_are_refused(prepared, tmp_path):
    whole = contents(prepare(prepared, tmp_path))
    # Where they lie, what they are called and how they are packed is not what they are.
    moved = prepared.rename(tmp_path / "elsewhere")
    (moved / "c" / "d" / "MgF2.vasp").rename(moved / "renamed.vasp")
    shutil.copy(moved / "MgCl2.cube", moved / "again.cub")
    data = prepare(moved, tmp_path)
    assert contents(data) == whole and data.load("MgF2").formula == "F2Mg"
    shutil.rmtree(moved / "MgO.zarr")
    with pytest.raises(TomatError, match=r"run 'r' was begun with other densities than (?s:.*)gone: MgO\nUse another"):
        prepare(moved, tmp_path)
    (moved / "new.CHGCAR").write_bytes((moved / "a" / "NaF.CHGCAR").read_bytes().replace(b"3.200000", b"3.210000", 1))
    with pytest.raises(TomatError, match=r"new: new\n  gone: MgO"):
        prepare(moved, tmp_path)


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_what_was_held_out_is_found_by_its_record(prepared, tmp_path, monkeypatch):
    densities = prepared
    data = prepare(densities, tmp_path)
    names = data.splits["validation"]
    record = tmp_path / "run" / "data"
    before = sorted((path.name, path.stat().st_mtime_ns) for path in record.rglob("*"))

    def found(place=densities, folder=record):
        return held_out_by_record(str(place), folder, "r")

    with monkeypatch.context() as patched:  # files with the bytes recorded are not read
        patched.setattr(folder, "open_density", None)
        same = found()
    assert same.splits == {"validation": names} and same.n_density_tokens == data.n_density_tokens
    assert same.load.paths == {name: data.load.paths[name] for name in names}
    # Called otherwise and packed it is the same density; that others have gone says nothing of what was held out.
    shutil.copytree(densities, tmp_path / "other")
    for name, path in data.load.paths.items():
        path = tmp_path / "other" / Path(path).relative_to(densities)
        if name in names:
            path.rename(path.with_name(f"again-{name}{''.join(path.suffixes)}"))
        else:
            remove(path)
    moved = found(tmp_path / "other")
    assert moved.splits == same.splits and all("other/" in path for path in moved.load.paths.values())
    assert sorted((path.name, path.stat().st_mtime_ns) for path in record.rglob("*")) == before
    for name in names:
        np.testing.assert_array_equal(moved.load(name).rho, data.load(name).rho)

    # Changed, gone, all of it gone, no record.
    for path in (densities / "copy.CHGCAR.gz", densities / "same.cube"):
        path.unlink()
    changed, gone = names[0], names[-1]
    assert changed != gone
    for name in (changed, gone):
        remove(Path(same.load.paths[name]))
    other = replace(data.load(changed), rho=data.load(changed).rho * 1.5)
    write_density(other, Path(same.load.paths[changed]).with_name(f"{changed}.cube"), "cube")
    words = rf"does not hold what run 'r' held out of it:\n  changed: {changed}\n  gone: {gone}\nPut back"
    with pytest.raises(TomatError, match=words):
        found()
    with pytest.raises(TomatError, match=rf"nowhere, of which run 'r' held out {changed}, .*put it back"):
        found(tmp_path / "nowhere")
    with pytest.raises(TomatError, match=r"folder.json, the record of what run 'r' held out, is not there"):
        found(folder=tmp_path / "none")
    shutil.rmtree(record / "validation")
    with pytest.raises(TomatError, match=r"data/validation, the record of what run 'r' held out, is not there"):
        found()
    nothing = replace(REQUEST, validation_share=0.0, most_bins=32)
    everything = prepare_folder(str(densities), nothing, tmp_path / "all" / "data", "all")
    assert list(everything.splits) == ["train"]
    with pytest.raises(TomatError, match="run 'all' held nothing out of"):
        held_out_by_record(str(densities), everything.folder, "all")


def test_settings_decide_the_data(prepared, tmp_path):
    densities = prepared
    data = prepare(densities, tmp_path)
    for change, words in (
        ({"validation_share": 0.5}, "validation_share: 0.3 -> 0.5"),
        ({"split_seed": 1}, "split_seed: 0 -> 1"),
        ({"codec_floor": 0.02}, "codec_floor: 0.05 -> 0.02"),
        ({"patches_per_material": 3}, "patches_per_material: 2 -> 3"),
        ({"accept": ("zeros",)}, r"accept: \(\) -> \('zeros',\)"),
    ):
        with pytest.raises(TomatError, match=f"made with other settings:\n  {words}"):
            prepare(densities, tmp_path, replace(REQUEST, **change))
    # The number of bins is a limit: the configuration that the run left has those that were chosen.
    same = prepare(densities, tmp_path, replace(REQUEST, most_bins=data.n_density_tokens))
    assert contents(same) == contents(data)
    with pytest.raises(TomatError, match=f"with {data.n_density_tokens} ids, .* allows 4"):
        prepare(densities, tmp_path, replace(REQUEST, most_bins=4))
    # Without the POSCAR the elements of the VASP 4 file are those that are named.
    (densities / "NaCl" / "POSCAR").unlink()
    assert "NaCl" not in prepare(densities, tmp_path / "without").splits["train"]
    named = prepare(densities / "NaCl", tmp_path / "named", replace(REQUEST, species=("Na", "Cl")))
    assert named.load("NaCl").formula == "ClNa" and list(named.splits) == ["train"]


def test_damage_is_one_error(prepared, tmp_path):
    densities = prepared
    record = tmp_path / "run" / "data" / "folder.json"
    content = json.loads(record.read_text())
    content["validation_formulas"] = []
    record.write_text(json.dumps(content))
    with pytest.raises(TomatError, match="folder.json is damaged: its content hashes to"):
        prepare(densities, tmp_path)
    record.write_text(json.dumps({"request": {"species": 3}, "materials": [], "validation_formulas": []}))
    with pytest.raises(TomatError, match="folder.json is damaged: request"):
        prepare(densities, tmp_path)
    record.unlink()
    with pytest.raises(TomatError, match="has data from another source in"):
        prepare(densities, tmp_path)


def test_nothing_to_read_is_one_error(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "CHGCAR").write_text("no density")
    with pytest.raises(TomatError, match="holds no density that can be read: 0 read, 1 ignored: in/CHGCAR"):
        prepare(tmp_path / "in", tmp_path)


def test_the_fewest_bins_below_the_floor_are_taken(capsys):
    histogram = DensityHistogram()
    histogram.add(np.random.default_rng(0).lognormal(size=20_000).astype(np.float32))
    floors = {}
    for floor in (0.05, 0.02):
        codec = choose_codec(histogram, 4096, "absolute", floor)
        n = codec.n_density_tokens
        floors[n] = codec.fit["nmae_floor"]["absolute"]["median"]
        assert n & (n - 1) == 0 and floors[n] < floor <= 3 * floors[n]
    assert list(floors) == sorted(floors)
    assert choose_codec(histogram, 48, "absolute", 0.002).n_density_tokens == 48
    assert "0.2 % was asked for, and data.n_density_tokens allows no more" in capsys.readouterr().out


def test_densities_are_the_same_by_what_they_hold(tmp_path):
    rng = np.random.default_rng(0)
    rho = rng.uniform(0.1, 1.0, (6, 5, 4))
    lattice, coords = np.diag([3.0, 3.1, 3.2]), np.array([[0.0, 0.1, 0.2], [0.5, 0.6, 0.7]])
    rho *= 8 / (rho.mean() * np.linalg.det(lattice))

    def material(rho, lattice=lattice, coords=coords, numbers=(11, 9)):
        return Material.of(DensityGrid(rho, lattice, np.array(numbers), coords), "x", "0" * 64)

    one = material(rho)
    assert one.is_same(material(rho * (1 + 1e-7))) and one.is_same(material(rho, coords=coords + [1, 0, -1]))
    assert one.is_same(material(rho, lattice + 1e-6))
    for atoms, good in ((one.atoms, True), ({"Na": 1, "K": 1}, False), ({"Nax": 1, "F": 1}, False)):
        kept = {"file_sha256": "0" * 64, "found": asdict(replace(one, atoms=atoms))}
        (tmp_path / "survey.jsonl").write_text(json.dumps(kept))
        assert survey._answers(tmp_path / "survey.jsonl") == ({"0" * 64: one} if good else {})
    others = [rho * rng.uniform(0.99, 1.01, rho.shape), rho[:, :, :3]]
    assert not any(one.is_same(material(other)) for other in others)
    assert not one.is_same(material(rho, lattice * 1.001)) and not one.is_same(material(rho, numbers=(9, 11)))


def test_densities_that_are_alike_on_a_diagonal_are_two():
    """64 even steps through 64 x 64 x 64 voxels are all on it."""
    wave = 2 + np.sin(2 * np.pi * np.arange(64) / 64)
    along_x = np.broadcast_to(wave[:, None, None], (64, 64, 64))
    one, other = (
        Material.of(DensityGrid(rho, np.eye(3) * 4.0, np.array([11]), np.zeros((1, 3))), "x", "0" * 64)
        for rho in (along_x, along_x.swapaxes(0, 1))
    )
    assert one.is_same(one) and not one.is_same(other)


def test_a_refusal_that_is_lifted_is_looked_at_again(tmp_path, capsys):
    """All refused, nothing of a run is there yet: the same run with the flag that was named goes on."""
    grid = small_grid("NaF")
    odd = type(grid)(grid.rho * (9 / 8), grid.lattice, grid.atomic_numbers, grid.frac_coords, "NaF")
    write_density(odd, tmp_path / "in" / "NaF.cube", "cube")
    with pytest.raises(TomatError, match="9.0000 electrons, which no pseudopotentials in use"):
        prepare_folder(str(tmp_path / "in"), REQUEST, tmp_path / "run" / "data", "r")
    lifted = replace(REQUEST, accept=("electrons",))
    data = prepare_folder(str(tmp_path / "in"), lifted, tmp_path / "run" / "data", "r")
    assert data.splits["train"] == ("NaF",)
