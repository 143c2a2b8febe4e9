import json

import import_first_generation as import_first_generation_module
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from import_first_generation import import_first_generation
from smooth_grid import smooth_grid

from tomat.base.errors import TomatError
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.ratios import fit_codec
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.patch import encode_rows
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.source_check import damaged_chunks
from tomat.data.tokens.vocabulary import PAD, Vocabulary

ROWS = {"mp-3": 7, "mp-1": 5, "mp-2": 7}
LAYOUTS = {"v3": SequenceLayout("first-v3", "v3", 4, 160), "v2": SequenceLayout("first-v2", "v2", 4, 260, 2)}


@pytest.fixture(scope="module")
def product_codec():
    histogram = DensityHistogram("rho_times_volume")
    for seed in range(3):
        histogram.add(smooth_grid(seed=seed).rho_times_volume())
    return fit_codec(histogram, 256)


def write(folder, layout, codec, name="lmq", shuffled=False):
    """A set as the first generation left it: files of unpadded rows, a material's rows together."""
    folder.mkdir()
    names, rows = [], []
    for k, (material, count) in enumerate(ROWS.items()):
        grid = smooth_grid((5, 6, 7), n_atoms=2, seed=k)
        anchors = np.random.default_rng(k).integers(0, 5, (count, 3))
        rows += list(encode_rows(grid, anchors, layout, codec))
        names += [material] * count
    if shuffled:
        names = names[1:] + names[:1]
    lists = [row[row != PAD].astype(np.int32) for row in rows]
    for part, (start, stop) in enumerate([(0, 6), (6, 19)]):
        columns = {"task_id": names[start:stop], "input_ids": pa.array(lists[start:stop], pa.list_(pa.int32()))}
        pq.write_table(pa.table(columns), folder / f"shard-{part:05d}.parquet")
    vocabulary = {"total_size": Vocabulary(codec.n_density_tokens).size}
    vocabulary |= {"density_codec": {"log_min": -4.127, "log_max": 4.967}}
    meta = {"split": "train", "patch_size": 4, "patches_per_material": 7, "seed": 42, "density_codec_name": name}
    meta |= {"vocab": vocabulary}
    (folder / "meta.json").write_text(json.dumps(meta))
    return np.stack(rows)


def test_rows_are_taken_over(tmp_path, product_codec):
    rows = write(tmp_path / "old", LAYOUTS["v3"], product_codec)
    import_first_generation(tmp_path / "old", tmp_path / "new", LAYOUTS["v3"], product_codec, block_rows=8)
    shards = open_shards(tmp_path / "new")
    np.testing.assert_array_equal(shards.read_rows(0, 19), rows)
    assert shards.n_blocks == 3 and not damaged_chunks(shards)
    found = {each.material_id: each.row_end - each.row_start for each in shards.manifest.materials}
    assert list(found.items()) == list(ROWS.items())
    assert (shards.manifest.seed, shards.manifest.split, shards.manifest.unit) == (42, "train", "rho_times_volume")
    with pytest.raises(TomatError, match="mp-3 were imported, so the places of their patches are not known"):
        shards.anchor_of_row(0)


@pytest.mark.parametrize("stopped", [False, True], ids=["finished", "stopped"])
def test_rows_that_have_changed_since_are_not_mixed_with_those_of_before(tmp_path, product_codec, monkeypatch, stopped):
    rows = write(tmp_path / "old", LAYOUTS["v3"], product_codec)
    arguments = (tmp_path / "old", tmp_path / "new", LAYOUTS["v3"], product_codec)
    with monkeypatch.context() as patch:
        if stopped:
            patch.setattr(import_first_generation_module, "finalise", lambda store: None)
        import_first_generation(*arguments, block_rows=8)
    file = tmp_path / "old" / "shard-00000.parquet"
    whole, table = file.read_bytes(), pq.read_table(file)
    pq.write_table(table.set_column(1, "input_ids", [table.column("input_ids").to_pylist()[::-1]]), file)
    with pytest.raises(TomatError, match="has other rows in chunk 0 than .*old; import it into another place"):
        import_first_generation(*arguments, block_rows=8)
    file.write_bytes(whole)
    import_first_generation(*arguments, block_rows=8)
    shards = open_shards(tmp_path / "new")
    np.testing.assert_array_equal(shards.read_rows(0, 19), rows)
    assert not damaged_chunks(shards)


def test_two_token_codec_is_in_the_metadata(tmp_path):
    codec = TwoTokenCodec("rho_times_volume", -4.127, 4.967)
    rows = write(tmp_path / "old", LAYOUTS["v2"], codec, "two_token_9_12")
    import_first_generation(tmp_path / "old", tmp_path / "new", LAYOUTS["v2"])
    shards = open_shards(tmp_path / "new")
    np.testing.assert_array_equal(shards.read_rows(0, 19), rows)
    assert shards.codec.sha256 == codec.sha256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("shuffled", "rows of mp-3 are not together"),
        ("no meta", "is no data set of the first generation"),
        ("path", "'../evil'; expected a name"),
        ({"task_id": [None, "mp-1"]}, "shard-00000.parquet"),
        ({"input_ids": [[-1], [2**40]]}, "expected BOS to EOS"),
        ({"input_ids": [[PAD, PAD], [PAD, PAD]]}, "expected BOS to EOS"),
    ],
)
def test_what_cannot_be_imported(tmp_path, product_codec, change, message):
    write(tmp_path / "old", LAYOUTS["v3"], product_codec, shuffled=change == "shuffled")
    if change == "no meta":
        (tmp_path / "old" / "meta.json").unlink()
    elif change == "path" or isinstance(change, dict):
        table = pq.read_table(tmp_path / "old" / "shard-00000.parquet").set_column(0, "task_id", [["../evil"] * 6])
        if isinstance(change, dict):
            table = pa.table({"task_id": ["mp-1", "mp-2"], "input_ids": [[1, 2], [1, 2]]} | change)
        pq.write_table(table, tmp_path / "old" / "shard-00000.parquet")
    with pytest.raises(TomatError, match=message):
        import_first_generation(tmp_path / "old", tmp_path / "new", LAYOUTS["v3"], product_codec)
    assert isinstance(change, dict) or not (tmp_path / "new").exists()
