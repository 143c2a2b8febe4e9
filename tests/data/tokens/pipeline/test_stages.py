"""The stages of re-tokenizing: the same bytes whatever happens on the way."""

import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from chgcar_files import write_chgcar
from retokenized import StoppingRunner, files, rewrite

from tomat.base.errors import TomatError
from tomat.data.codec.files import write_codec
from tomat.data.codec.relative import RelativeCodec
from tomat.data.density.demo.embedded import demo_materials, load_demo
from tomat.data.density.promolecule import Promolecule, PromoleculeFit, RadialBasis
from tomat.data.density.zarr_store import read_zarr, write_zarr
from tomat.data.tokens.layouts import layout_named
from tomat.data.tokens.pipeline.config import RetokenizeConfig
from tomat.data.tokens.pipeline.driver import retokenize, write_shards
from tomat.data.tokens.pipeline.runners import PoolRunner
from tomat.data.tokens.pipeline.sources import find_materials
from tomat.data.tokens.pipeline.stages import unit_size
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.source_check import compare_with_source


def grids_of(config):
    """The densities of a configuration, in the order of their rows."""
    return [material.read(1) for material in find_materials(config)]


def test_rows_are_of_the_split_and_agree_with_the_source(tmp_path, retokenize_config, whole):
    shards = open_shards(tmp_path / "whole")
    assert [each.material_id for each in shards.manifest.materials] == ["mp-4", "mp-0", "mp-1", "mp-2", "mp-5"]
    assert (shards.rows, shards.n_blocks, shards.manifest.split) == (100, 13, "train")
    materials = {each.material_id: each for each in find_materials(retokenize_config(tmp_path / "whole"))}
    sample = compare_with_source(shards, range(shards.rows), lambda name: materials[name].read(1))
    assert sample["rows_compared"] == 100 and sample["voxels_compared"] == 100 * 343
    # 199 bins over two orders of magnitude are 2 % wide or so, half of it the largest error.
    assert 1e-4 < sample["nmae_fraction"] < 0.02
    survey = json.loads(whole["survey.json"])["materials"]
    assert [each["n_electrons"] for each in survey] == pytest.approx([8] * 5, abs=1e-3)
    assert not [name for name in whole if name.startswith(("survey/", "progress/"))]


def test_structures_and_promolecule_are_those_of_the_densities(tmp_path, retokenize_config, whole):
    config = retokenize_config(tmp_path / "whole")
    shards, grids = open_shards(tmp_path / "whole"), grids_of(config)
    fit = PromoleculeFit()
    for grid, crystal in zip(grids, shards.crystals, strict=True):
        np.testing.assert_array_equal(crystal.lattice, grid.lattice)
        np.testing.assert_array_equal(crystal.frac_coords, grid.frac_coords)
        part = PromoleculeFit()  # as many units as materials
        part.add(grid)
        fit.merge(part)
    assert shards.promolecule is not None and shards.promolecule.to_text() == fit.solve().to_text()
    assert shards.manifest.promolecule_sha256 == shards.promolecule.sha256


def test_promolecule_is_given_fitted_or_none(tmp_path, retokenize_config, whole):
    place = tmp_path / "whole" / "promolecule.json"
    settings = {"split": "validation", "codec": str(tmp_path / "whole" / "codec.json")}
    retokenize(retokenize_config(tmp_path / "none", **settings), PoolRunner(1))
    shards = open_shards(tmp_path / "none")
    assert shards.promolecule is None and [each.name for each in shards.crystals] == ["mp-3"]
    assert shards.codec.sha256 == open_shards(tmp_path / "whole").codec.sha256
    settings["promolecule"] = str(place)
    retokenize(retokenize_config(tmp_path / "given", **settings), PoolRunner(1))
    assert (tmp_path / "given" / "promolecule.json").read_bytes() == place.read_bytes()
    with pytest.raises(TomatError, match="holds another data set: it differs in promolecule"):
        retokenize(retokenize_config(tmp_path / "given", **(settings | {"promolecule": None})), PoolRunner(1))
    with pytest.raises(TomatError, match="layout v2-p14 goes with none"):
        retokenize_config(tmp_path / "v2", layout="v2-p14", promolecule=str(place))


def test_a_survey_of_before_there_were_structures_and_promolecules_goes_on(tmp_path, retokenize_config, whole):
    place = tmp_path / "set"
    config = retokenize_config(place)
    with pytest.raises(KeyboardInterrupt):
        retokenize(config, StoppingRunner(3, seed=1))
    identity = json.loads((place / "request.json").read_text())["identity"]
    del identity["promolecule"]
    rewrite(place / "request.json", identity=identity)
    for path in [*place.rglob("*structures.npz"), *place.rglob("*promolecule*")]:
        path.unlink()
    # Not planned yet: everything is looked at again, and the set has both.
    assert retokenize(config, PoolRunner(1)).surveyed == 5
    assert {**files(place), "request.json": b""} == {**whole, "request.json": b""}


@pytest.mark.parametrize("stop_after", [4, 5, 17])
def test_stopped_anywhere_it_goes_on(tmp_path, retokenize_config, whole, stop_after):
    config = retokenize_config(tmp_path / "set")
    stopped = StoppingRunner(stop_after, seed=1)
    with pytest.raises(KeyboardInterrupt):
        retokenize(config, stopped)
    again = StoppingRunner(seed=2)
    retokenize(config, again)
    assert files(tmp_path / "set") == whole
    # 5 units of the survey and 13 of a chunk each: none is done twice.
    assert len(stopped.units) + len(again.units) == 18
    retokenize(config, StoppingRunner(0))


def test_lost_chunk_of_an_unfinished_set_is_written_again(tmp_path, retokenize_config, whole):
    config = retokenize_config(tmp_path / "set")
    with pytest.raises(KeyboardInterrupt):
        retokenize(config, StoppingRunner(12, seed=1))
    chunks = sorted((tmp_path / "set" / "tokens.zarr" / "c").iterdir())
    shutil.rmtree(chunks[0])
    retokenize(config, StoppingRunner(seed=2))
    assert files(tmp_path / "set") == whole


def damage(tree, name, how):
    place = tree / "label" / f"{name}.zarr"
    grid = read_zarr(place, name)
    if how == "truncated":
        chunk = next(path for path in (place / "charge_density_total" / "c").rglob("*") if path.is_file())
        chunk.write_bytes(chunk.read_bytes()[:-20])
        return
    shutil.rmtree(place)
    if how != "missing":
        write_zarr(replace(grid, rho=grid.rho * np.float32({"electrons": 1.006, "rounding": 1.004}[how])), place)


@pytest.mark.parametrize(("how", "reason"), [("missing", "no density at"), ("truncated", "does not decode")])
def test_bad_material_is_skipped_with_its_reason(tmp_path, tree, kept_tree, kept_set, retokenize_config, how, reason):
    damage(tree, "mp-1", how)
    config = retokenize_config(tmp_path / "set")
    with pytest.raises(TomatError, match=f"1 of 5 materials would be skipped, more than the 0.*mp-1: .*({reason})"):
        retokenize(config, PoolRunner(1))
    # Allowed, the rest is written.
    result = retokenize(retokenize_config(tmp_path / "rest", max_skipped=0.2), PoolRunner(1))
    assert [each.material_id for each in result.manifest.skipped] == ["mp-1"] and result.manifest.rows == 80
    # Repaired, the same command goes on, and looks again at the one that was bad.
    shutil.rmtree(tree / "label")
    shutil.copytree(kept_tree / "label", tree / "label")
    assert retokenize(config, PoolRunner(1)).surveyed == 1
    assert files(tmp_path / "set") == files(kept_set)


def test_electron_count_is_compared_with_a_tolerance(tmp_path, tree, kept_tree, retokenize_config):
    def skipped(place, **settings):
        return retokenize(retokenize_config(tmp_path / place, **settings), PoolRunner(1)).manifest.skipped

    with pytest.raises(TomatError, match="8.0000 electrons, expected 10: off by 20.00 %"):
        skipped("valences", valences={"Si": 5})
    damage(tree, "mp-1", "rounding")
    assert not skipped("rounding")
    shutil.rmtree(tree / "label" / "mp-1.zarr")
    shutil.copytree(kept_tree / "label" / "mp-1.zarr", tree / "label" / "mp-1.zarr")
    damage(tree, "mp-1", "electrons")
    with pytest.raises(TomatError, match="mp-1.zarr: .*8.0480 electrons, 0.048 off.*--accept fractional_electrons"):
        skipped("electrons")
    assert not skipped("accepted", accept=("fractional_electrons",))
    # Where the count is stated, it must be that count.
    with pytest.raises(TomatError, match="mp-1: .*8.0480 electrons, expected 8: off by 0.60 %"):
        skipped("stated", valences={"Si": 4}, accept=("fractional_electrons",))


def test_a_part_of_the_electrons_is_let_in_by_its_name_or_title_alone(tmp_path, tree, retokenize_config):
    grid = read_zarr(tree / "label" / "mp-1.zarr")
    folder = tmp_path / "in"
    folder.mkdir()
    write_chgcar(grid, folder / "mp-1.vasp")
    lines = (folder / "mp-1.vasp").read_text().splitlines()
    head = next(k for k, line in enumerate(lines) if line.split() == list(map(str, grid.grid_shape))) + 1
    part = "\n".join([*lines[:head], *(f"{0.8 * value:.11E}" for value in grid.rho_times_volume().ravel(order="F"))])
    for name in ("mp-1_PARCHG.vasp", "mp-2.vasp"):
        (folder / name).write_text(part + "\n")
    (folder / "mp-3.vasp").write_text("spin density\n" + part.partition("\n")[2] + "\n")
    settings = {"input": str(folder), "source": "chgcar", "filelist": None, "split_file": None, "bins": 50}
    settings |= {"max_skipped": 3, "accept": ("not_total",)}
    manifest = retokenize(retokenize_config(tmp_path / "set", **settings), PoolRunner(1)).manifest
    assert [each.material_id for each in manifest.materials] == ["mp-1", "mp-1_PARCHG", "mp-3"]
    ((name, reason),) = [(each.material_id, each.reason) for each in manifest.skipped]
    assert name == "mp-2" and "6.4000 electrons, 0.4 off a whole number" in reason


def test_output_of_another_configuration_or_program_is_refused(tmp_path, kept_set, whole, retokenize_config):
    kept = files(kept_set)
    for change, differs in (
        ({"seed": 1}, "seed"),
        ({"bins": 199}, "codec"),
        ({"layout": "v3-p11"}, "layout"),
        ({"split_file": None}, "materials"),
        ({"electron_tolerance": 0.01}, "electron_tolerance"),
        ({"patches_per_material": 11}, "patches_per_material"),
        ({"block_rows": 4}, "block_rows"),
    ):
        with pytest.raises(TomatError, match=f"holds another data set: it differs in {differs}"):
            retokenize(retokenize_config(kept_set, **change), PoolRunner(1))
    assert files(kept_set) == kept
    (tmp_path / "whole" / "request.json").unlink()
    with pytest.raises(TomatError, match="did not write"):
        retokenize(retokenize_config(tmp_path / "whole"), PoolRunner(1))


def test_validation_takes_the_training_codec(tmp_path, retokenize_config, whole):
    with pytest.raises(TomatError, match="fitted to training data alone"):
        retokenize_config(tmp_path / "validation", split="validation")
    codec = str(tmp_path / "whole" / "codec.json")
    with pytest.raises(TomatError, match="Layout v2-p14 writes 2 tokens a voxel, the codec makes 1"):
        retokenize(retokenize_config(tmp_path / "v2", codec=codec, layout="v2-p14"), PoolRunner(1))


def test_units_depend_on_the_number_of_materials_alone():
    assert [unit_size(n) for n in (1, 128, 129, 77_498)] == [1, 1, 2, 256]


def test_a_codec_relative_to_the_promolecule_is_fitted_and_stopped_anywhere_goes_on(tmp_path, retokenize_config):
    config = retokenize_config(tmp_path / "set", relative=True, bins=60)
    retokenize(config, PoolRunner(1))
    shards, grids = open_shards(tmp_path / "set"), {each.material_id: each for each in grids_of(config)}
    assert isinstance(shards.codec, RelativeCodec) and shards.promolecule is not None
    assert shards.codec.promolecule.sha256 == shards.promolecule.sha256 == shards.manifest.promolecule_sha256
    assert shards.codec.fit["n_voxels"] == sum(grid.rho.size for grid in grids.values())
    sample = compare_with_source(shards, range(shards.rows), grids.__getitem__)
    assert sample["nmae_fraction"] == pytest.approx(shards.codec.fit["nmae_floor"]["absolute"]["median"], rel=0.2)
    other = retokenize_config(tmp_path / "stopped", relative=True, bins=60)
    with pytest.raises(KeyboardInterrupt):
        retokenize(other, StoppingRunner(7, seed=1))  # two of the five units that count ratios
    again = StoppingRunner(seed=2)
    retokenize(other, again)
    assert files(tmp_path / "stopped") == files(tmp_path / "set") and len(again.units) == 23 - 7


def test_a_relative_codec_brings_its_promolecule(tmp_path, retokenize_config):
    training = tmp_path / "training"
    retokenize(retokenize_config(training, relative=True, bins=40, patches_per_material=2), PoolRunner(1))
    settings = {"split": "validation", "codec": str(training / "codec.json")}
    retokenize(retokenize_config(tmp_path / "validation", **settings), PoolRunner(1))
    shards = open_shards(tmp_path / "validation")
    assert shards.codec.sha256 == open_shards(training).codec.sha256
    kept = (training / "promolecule.json").read_bytes()
    assert (tmp_path / "validation" / "promolecule.json").read_bytes() == kept
    other = Promolecule.load(training / "promolecule.json")
    (tmp_path / "other.json").write_text(replace(other, n_materials=9).to_text())
    settings |= {"promolecule": str(tmp_path / "other.json")}
    with pytest.raises(TomatError, match="set to write has a codec relative to the promolecule"):
        retokenize(retokenize_config(tmp_path / "none", **settings), PoolRunner(1))
    # A promolecule that lacks an element of the densities.
    (tmp_path / "carbon.json").write_text(Promolecule(other.basis, {6: np.ones(other.basis.n)}).to_text())
    with pytest.raises(TomatError, match="has Si, which no training density had; the model knows C"):
        given = {"relative": True, "bins": 40, "promolecule": str(tmp_path / "carbon.json")}
        retokenize(retokenize_config(tmp_path / "none", **given), PoolRunner(1))
    for given in ({"codec": str(training / "codec.json")}, {"layout": "v2-p14"}):
        with pytest.raises(TomatError, match="relative is set, and"):
            retokenize_config(tmp_path / "none", relative=True, **given)


DIGESTS = {
    "v3-p7": ("bdf1f8864a4e9bf5", "0b310256e8e0e4c2"),
    "v3-fill8k": ("ec36512bc3f0eaa0", "ef6fa0ae095cd306"),
}
"""By layout: of the ids, and of what the manifest says."""


def digests(place):
    """Of the array of ids; and of the manifest's own hash fields, codec, structures and chunks."""
    shards = open_shards(place)
    manifest = json.loads((place / "manifest.json").read_text())
    fields = {key: manifest[key] for key in ("codec_sha256", "structures_sha256", "chunk_checksums", "materials")}
    ids = shards.read_rows(0, shards.rows).astype("<u2").tobytes()
    return tuple(hashlib.sha256(each).hexdigest()[:16] for each in (ids, json.dumps(fields, sort_keys=True).encode()))


@pytest.mark.parametrize("layout", DIGESTS)
def test_ids_and_manifest_are_those_of_before(tmp_path, codec, layout):
    """By both ways to write a set; a promolecule lies beside the rows and decides none."""
    write_codec(codec, tmp_path / "codec.json")
    promolecule = Promolecule(RadialBasis(4, 3.0), {14: np.arange(4.0)}, 1)
    (tmp_path / "promolecule.json").write_text(promolecule.to_text())
    settings = {"patches_per_material": 2, "seed": 0, "split": "validation"}
    names = [material.material_id for material in demo_materials("validation")]
    write_shards(tmp_path / "one", names, load_demo, layout=layout_named(layout), codec=codec, **settings)
    config = RetokenizeConfig(
        source="embedded",
        output=str(tmp_path / "two"),
        layout=layout,
        codec=str(tmp_path / "codec.json"),
        promolecule=str(tmp_path / "promolecule.json"),
        **settings,
    )
    retokenize(config, PoolRunner(1))
    assert digests(tmp_path / "one") == digests(tmp_path / "two") == DIGESTS[layout]
    assert open_shards(tmp_path / "two").manifest.promolecule_sha256 == promolecule.sha256
