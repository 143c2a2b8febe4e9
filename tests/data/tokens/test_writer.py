import shutil
from unittest.mock import MagicMock

import numpy as np
import pytest
from retokenized import files

from tomat.base.errors import RetryableError, TomatError
from tomat.base.storage import Store
from tomat.data.density.crystal import Crystal
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.pipeline.config import ShardJob
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.structures import Structures
from tomat.data.tokens.writer import ChunkWriter, chunk_is_written, chunk_tokens, finalise, start_shards

LAYOUT = SequenceLayout("small", "v3", 4, 160)
SETTINGS = {"layout": LAYOUT, "patches_per_material": 10, "seed": 5, "block_rows": 8}
JOB = ShardJob(output="", codec=None, **SETTINGS)
NAMES = ["a", "b", "c"]


class Grids:
    """Reads densities, and counts how often."""

    def __init__(self, make_grid):
        self.make_grid = make_grid
        self.reads = []

    def __call__(self, name):
        self.reads.append(name)
        if name == "broken":
            raise TomatError("density 'broken': found NaN")
        return self.make_grid((5, 6, 7), n_atoms=2, seed=ord(name), material_id=name)


@pytest.fixture
def grids(make_grid):
    return Grids(make_grid)


@pytest.fixture
def whole(tmp_path, grids, codec):
    write_shards(tmp_path / "whole", NAMES, grids, codec=codec, **SETTINGS)
    grids.reads.clear()
    return files(tmp_path / "whole")


def start(place, grids, codec):
    """As `write_shards` starts."""
    structures = Structures.of([Crystal.of(grids(name)) for name in NAMES])
    grids.reads.clear()
    entries = [(name, (5, 6, 7)) for name in NAMES]
    plan = JOB.plan(entries, codec, clipped=(), structures_sha256=structures.sha256)
    store = Store(place)
    start_shards(store, plan, codec, structures)
    return plan, store


def write_chunks(store, plan, chunks, get_grid, codec):
    with ChunkWriter(store, plan) as writer:
        for chunk in chunks:
            writer.write(chunk, chunk_tokens(plan, chunk, get_grid, codec))


def test_finished_chunks_are_not_made_again_and_damaged_ones_are(tmp_path, grids, codec, whole):
    place = tmp_path / "set"
    plan, store = start(place, grids, codec)
    write_chunks(store, plan, (3, 0, 1), grids, codec)
    # Chunk 0 holds rows of a alone, chunk 1 of a and b, chunk 3 of c alone.
    assert grids.reads == ["c", "a", "a", "b"]
    path = place / "tokens.zarr" / "c" / "0" / "0"
    path.write_bytes(path.read_bytes()[:-1])
    record = place / "progress" / "00000001"  # a record that is damaged is none
    record.write_bytes(bytes([record.read_bytes()[0] ^ 1, *record.read_bytes()[1:]]))
    grids.reads.clear()
    write_shards(place, NAMES, grids, codec=codec, **SETTINGS)
    # Chunks 0 and 1 again, and chunk 2, which has rows of b and c.
    assert grids.reads == ["a", "b", "c"]
    assert files(place) == whole


def test_nothing_is_left_behind_when_nothing_can_be_tokenized(tmp_path, grids, codec):
    with pytest.raises(TomatError, match="nothing to tokenize"):
        write_shards(tmp_path / "set", ["broken"], grids, codec=codec, **SETTINGS)
    assert not (tmp_path / "set").exists()


def test_density_that_changed_since_the_plan_is_refused(tmp_path, grids, codec):
    plan = JOB.plan([("a", (5, 6, 8))], codec)
    with pytest.raises(TomatError, match="Its density has changed"):
        chunk_tokens(plan, 0, grids, codec)


def test_array_of_unknown_origin_is_refused(tmp_path, grids, codec, whole):
    place = tmp_path / "whole"
    (place / "manifest.json").unlink()
    with pytest.raises(TomatError, match="token array but no manifest"):
        write_shards(place, NAMES, grids, codec=codec, **SETTINGS)
    shutil.rmtree(place / "tokens.zarr")
    write_shards(place, NAMES, grids, codec=codec, **SETTINGS)
    assert files(place) == whole


def test_outage_while_records_are_read_is_no_traceback_and_no_damage(tmp_path, grids, codec, monkeypatch):
    plan = JOB.plan([(name, (5, 6, 7)) for name in NAMES], codec, clipped=())
    store = Store(tmp_path / "set")
    start_shards(store, plan, codec)
    write_chunks(store, plan, range(4), grids, codec)

    def open_array():
        raise RetryableError("Cannot open: UNAVAILABLE")

    assert chunk_is_written(store, plan, 0)
    with monkeypatch.context() as patch:
        patch.setattr(store, "open_array", open_array)
        with pytest.raises(RetryableError, match="UNAVAILABLE"):  # and not: the chunk has to be made again
            chunk_is_written(store, plan, 0)
    objects = MagicMock(wraps=store.objects)
    silent = MagicMock(**{"result.side_effect": ValueError("UNAVAILABLE: no answer")})
    read = store.objects.read
    objects.read.side_effect = lambda name: silent if name.startswith("progress/") else read(name)
    with monkeypatch.context() as patch:
        patch.setattr(store, "objects", objects)
        with pytest.raises(RetryableError, match="Cannot read .*/set/progress/: UNAVAILABLE: no answer"):
            finalise(store)
    assert finalise(store).complete


def test_rows_do_not_depend_on_the_block(tmp_path, grids, codec, whole):
    chunks = [f"tokens.zarr/c/{k}/0" for k in range(4)]
    assert set(whole) == {"manifest.json", "codec.json", "structures.npz", "tokens.zarr/zarr.json", *chunks}
    write_shards(tmp_path / "other", NAMES, grids, codec=codec, **(SETTINGS | {"block_rows": 5}))
    rows = [open_shards(tmp_path / name).read_rows(0, 30) for name in ("whole", "other")]
    np.testing.assert_array_equal(*rows)
