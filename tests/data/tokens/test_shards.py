import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from relative_codec import PROMOLECULE, bonded, relative_codec
from retokenized import rewrite

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.codec.files import write_codec
from tomat.data.codec.relative import cell_codec
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.patch import decode_sequence
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.source_check import compare_with_source, damaged_chunks
from tomat.data.tokens.vocabulary import BOS

LAYOUT = SequenceLayout("small", "v3", 4, 160)
M = 10
BLOCK = 9
"""The last block is short."""


@pytest.fixture(scope="session")
def get_grid(make_grid):
    shapes = {"a": (6, 7, 8), "b": (10, 4, 5), "c": (3, 3, 3), "d": (12, 12, 12)}
    grids = {
        name: make_grid(shape, n_atoms=i + 1, seed=i, material_id=name)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return grids.__getitem__


@pytest.fixture(scope="session")
def written(tmp_path_factory, get_grid, codec):
    place = tmp_path_factory.mktemp("shards") / "set"
    settings = {"patches_per_material": M, "seed": 5, "split": "train", "block_rows": BLOCK}
    write_shards(place, "abcd", get_grid, layout=LAYOUT, codec=codec, **settings)
    return place


@pytest.fixture
def place(written, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(written, tmp_path / "set"))


def test_every_row_is_the_patch_it_is_said_to_be(written, get_grid, codec):
    shards = open_shards(written)
    assert (shards.rows, shards.context, shards.block_rows, shards.n_blocks) == (40, 160, BLOCK, 5)
    assert shards.layout == LAYOUT and shards.codec.sha256 == codec.sha256 and shards.manifest.split == "train"
    assert [shards.material_of_row(row).material_id for row in range(40)] == ["abcd"[row // M] for row in range(40)]
    assert compare_with_source(shards, range(40), get_grid)["voxels_compared"] == 40 * 64


def test_blocks_are_the_rows(written):
    shards = open_shards(written)
    rows = shards.read_rows(0, 40)
    blocks = [shards.read_block(block, verify=True).result() for block in range(shards.n_blocks)]
    assert [len(block) for block in blocks] == [9, 9, 9, 9, 4] and blocks[0].dtype == np.uint16
    np.testing.assert_array_equal(np.concatenate(blocks), rows)
    for start, stop in ((0, 0), (3, 5), (7, 9), (15, 34), (39, 40)):
        np.testing.assert_array_equal(shards.read_rows(start, stop), rows[start:stop])
    np.testing.assert_array_equal(shards.manifest.material_indices(np.arange(40)), np.arange(40) // M)


def test_place_may_be_a_url(written):
    shards = open_shards(f"file://{written}")
    assert shards.n_blocks == 5 and not damaged_chunks(shards)
    with pytest.raises(TomatError, match="s3://bucket/set is neither"):
        open_shards("s3://bucket/set")
    with pytest.raises(TomatError, match="tomat tokenize"):
        open_shards(written / "nowhere")
    assert not (written / "nowhere").exists()


def chunk_path(place, chunk):
    return place / "tokens.zarr" / "c" / str(chunk) / "0"


def test_missing_and_damaged_chunks_are_noticed_and_named(place):
    chunk_path(place, 2).unlink()
    shards = open_shards(place)
    shards.read_block(1).result()
    with pytest.raises(TomatError, match=r"Chunk 2 of .*c/2/0\) is missing"):
        shards.read_block(2).result()
    with pytest.raises(TomatError, match="Chunk 2"):
        shards.read_rows(0, 20)
    # Every damage: tests/fuzz/test_shard_files.py.
    chunk_path(place, 3).write_bytes(chunk_path(place, 3).read_bytes()[:-9])
    with pytest.raises(TomatError, match=r"Chunk 3 of .*cannot be read"):
        open_shards(place).read_block(3).result()
    assert list(damaged_chunks(shards)) == [2, 3]


def test_whole_chunk_in_the_wrong_place_is_noticed_when_verified(place):
    shutil.copy(chunk_path(place, 0), chunk_path(place, 3))
    shards = open_shards(place)
    assert np.all(shards.read_block(3).result()[:, 0] == BOS)
    with pytest.raises(TomatError, match="Chunk 3 .* its checksum is"):
        shards.read_block(3, verify=True).result()
    assert list(damaged_chunks(shards)) == [3]


def test_set_that_is_not_complete_is_refused(place):
    rewrite(place / "manifest.json", complete=False, chunk_checksums=[])
    (place / "progress").mkdir()
    (place / "progress" / "00000001").write_text("0")
    with pytest.raises(TomatError, match="not complete: 1 of 5 chunks written"):
        open_shards(place)


def test_other_versions_and_other_parts_are_refused(place, codec):
    def refused(message):
        with pytest.raises(TomatError, match=message):
            open_shards(place)

    # Damaged and lost files: tests/fuzz/test_shard_files.py.
    manifest = (place / "manifest.json").read_text()
    rewrite(place / "manifest.json", format_version=7)
    refused("format version 7")
    (place / "manifest.json").write_text(manifest)
    kept = (place / "codec.json").read_bytes()
    write_codec(dataclasses.replace(codec, means=codec.medians), place / "codec.json")
    refused("codec.json is not the set's: it hashes")
    (place / "codec.json").write_bytes(kept)
    zarr = place / "tokens.zarr" / "zarr.json"
    rewrite(zarr, checksum=False, shape=[48, 160])
    refused(r"is uint16 \(48, 160\)")
    zarr.unlink()
    refused("Cannot open the token array")


def test_opening_reads_no_tokens(place):
    shutil.rmtree(place / "tokens.zarr" / "c")
    assert open_shards(place).rows == 40


def test_rows_of_a_relative_codec_are_read_back_as_densities(tmp_path, capsys):
    grids = {f"bonded-{seed}": bonded(seed) for seed in range(2)}
    settings = {"codec": relative_codec(), "patches_per_material": 6, "seed": 1}
    write_shards(tmp_path / "set", grids, grids.__getitem__, layout=LAYOUT, **settings)
    shards = open_shards(tmp_path / "set")
    assert compare_with_source(shards, range(12), grids.__getitem__)["rows_compared"] == 12
    scale, anchor = shards.scale_of_row(7), shards.anchor_of_row(7)
    read = decode_sequence(shards.read_rows(7, 8)[0], LAYOUT, shards.codec, scale=scale)
    grid = grids["bonded-1"]
    whole = dataclasses.replace(grid, rho=cell_codec(shards.codec, grid).rounded(grid.rho))
    np.testing.assert_allclose(read.values, whole.patch(anchor, (4, 4, 4)), rtol=1e-5, atol=1e-7)
    ratios = decode_sequence(shards.read_rows(7, 8)[0], LAYOUT, shards.codec)
    assert (read.unit, ratios.unit) == ("e_per_A3", "ratio_to_sum_of_atoms")
    assert main(["tokens", "show", str(tmp_path / "set"), "--row", "7", "--voxels", "1"]) == 0
    assert f"= {read.values[0, 0, 0]:.5g} e/Å³" in capsys.readouterr().out
    # Another promolecule beside it, by hand.
    other = dataclasses.replace(PROMOLECULE, n_materials=5)
    (tmp_path / "set" / "promolecule.json").write_text(other.to_text())
    forged = dataclasses.replace(shards.manifest, promolecule_sha256=other.sha256)
    (tmp_path / "set" / "manifest.json").write_text(forged.to_text())
    with pytest.raises(TomatError, match="has a codec relative to the promolecule .* Use the promolecule that"):
        open_shards(tmp_path / "set")
