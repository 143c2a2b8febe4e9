"""Every epoch is a bijection, batches look truly shuffled, and any position can be read without what came before."""

import asyncio
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from fitted_codec import fitted_codec
from hypothesis import given, settings
from hypothesis import strategies as st
from levanter.data.dataset import ListAsyncDataset
from scipy import stats

from tomat.base.errors import TomatError
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import BlockShuffleConfig, SequenceLayout
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.shards import ShardSet, open_shards
from tomat.data.tokens.shuffle import ShuffledIndex
from tomat.train.loader import READ_AHEAD_BLOCKS, ShardDataset, token_loader

ALPHA = 1e-4
"""A correct shuffle would fail one statistical test for one choice of seeds in 10,000. The seeds are fixed."""

LAYOUT = SequenceLayout("v3-p3", "v3", 3, 64)
MATERIALS, PATCHES, BLOCK_ROWS = 5, 37, 8
ROWS = MATERIALS * PATCHES  # 185: 23 whole blocks and one row
BLOCKS = 24
SHUFFLE = BlockShuffleConfig(io_block_size=BLOCK_ROWS, window_blocks=4)


def density(name: str) -> DensityGrid:
    """An atom in a cell of 4 Å; another density for every name."""
    rng = np.random.default_rng(int(name[1:]))
    return DensityGrid(rng.random((8, 8, 8)), np.eye(3) * 4.0, np.array([6]), rng.random((1, 3)), name)


@pytest.fixture(scope="module")
def shard_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    codec = fitted_codec(256, np.linspace(0, 1, 10_000))
    names = [f"m{i}" for i in range(MATERIALS)]
    write_shards(
        folder, names, density, layout=LAYOUT, codec=codec, patches_per_material=PATCHES, seed=0, block_rows=BLOCK_ROWS
    )
    return folder


@pytest.fixture(scope="module")
def shards(shard_folder: Path) -> ShardSet:
    return open_shards(shard_folder)


@pytest.fixture(scope="module")
def reference(shards: ShardSet) -> np.ndarray:
    """All rows in the order of the disk; no two are alike, so a row says where it came from."""
    rows = shards.read_rows(0, shards.rows)
    assert np.unique(rows, axis=0).shape[0] == ROWS
    return rows


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))


def fetch(dataset: ShardDataset, positions: Sequence[int] | range) -> np.ndarray:
    examples = asyncio.run(dataset.get_batch(list(positions)))
    return np.stack([np.asarray(example.tokens.array) for example in examples])


# The index


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 10_007, 65_537, 65_536 * 2 + 1])
@pytest.mark.parametrize("perm_type", ["feistel", "none", "full"])
def test_every_epoch_is_a_bijection_at_the_default_sizes(rows: int, perm_type) -> None:
    index = ShuffledIndex(rows, BlockShuffleConfig(perm_type=perm_type), seed=4)
    for epoch in (1, 10**9):
        images = index(np.arange(epoch * rows, (epoch + 1) * rows))
        np.testing.assert_array_equal(np.sort(images), np.arange(rows))
        column = np.arange(epoch * rows, (epoch + 1) * rows)[:, None]  # rows have the shape of their positions
        np.testing.assert_array_equal(index(column), images[:, None])
        assert index(np.array(epoch * rows)) == images[0]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 3000),
    io_block_size=st.integers(1, 70),
    window_blocks=st.integers(1, 40),
    seed=st.integers(-5, 2**70),
    epoch=st.integers(0, 10**6),
)
def test_windows_tile_the_epoch_and_keep_to_their_blocks(
    rows: int, io_block_size: int, window_blocks: int, seed: int, epoch: int
) -> None:
    index = ShuffledIndex(rows, BlockShuffleConfig(io_block_size, window_blocks), seed)
    images = index(np.arange(epoch * rows, (epoch + 1) * rows))
    np.testing.assert_array_equal(np.sort(images), np.arange(rows))
    blocks_of_windows = []
    position = epoch * rows
    while position < (epoch + 1) * rows:
        start, stop = index.window_at(position)
        assert start == position < stop
        assert index.window_at(stop - 1) == (start, stop)
        blocks_of_windows.append(np.unique(images[start - epoch * rows : stop - epoch * rows] // io_block_size))
        position = stop
    assert position == (epoch + 1) * rows
    # A block belongs to one window, and no window is much smaller than the others.
    sizes = [blocks.size for blocks in blocks_of_windows]
    assert sum(sizes) == np.unique(np.concatenate(blocks_of_windows)).size == -(-rows // io_block_size)
    assert max(sizes) <= window_blocks and max(sizes) - min(sizes) <= 1


def test_epochs_and_seeds_shuffle_anew() -> None:
    rows = 10_007
    index = ShuffledIndex(rows, BlockShuffleConfig(64, 16), seed=0)
    first, second = index(np.arange(rows)), index(np.arange(rows, 2 * rows))
    other_seed = ShuffledIndex(rows, BlockShuffleConfig(64, 16), seed=1)(np.arange(rows))
    for one, other in ((first, second), (first, other_seed)):
        # Agreements of independent permutations: Poisson with mean 1.
        assert stats.poisson.sf(int(np.sum(one == other)) - 1, 1.0) > ALPHA
        # The blocks of the first window: of 157, each draws 15 or 16, so about 1.6 are common.
        common = np.intersect1d(one[: 15 * 64] // 64, other[: 15 * 64] // 64).size
        assert stats.hypergeom.sf(common - 1, 157, 16, 16) > ALPHA


def batch_p_values(batches: np.ndarray, window_rows: int, block_rows: int) -> dict[str, float]:
    """Two-sided p-values of what a batch looks like, against rows drawn without replacement from a window.

    Args:
        batches: rows int64 [batches, batch]; each batch lies in one window of `window_rows` rows in whole blocks.
    """
    n_batches, size = batches.shape
    blocks_in_window = window_rows // block_rows
    # Variances are smaller by this than those of drawing with replacement.
    finite = (window_rows - size) / (window_rows - 1)

    def unseen(blocks: int) -> float:
        """P(no row of the batch from `blocks` given blocks)."""
        return float(stats.hypergeom.pmf(0, window_rows, blocks * block_rows, size))

    def two_sided(survival: float) -> float:
        return 2 * min(survival, 1 - survival)

    in_block = np.stack([np.bincount(batch % block_rows, minlength=block_rows) for batch in batches])
    expected = size / block_rows
    pearson = float(((in_block - expected) ** 2 / expected).sum()) / finite
    pooled = float(((in_block.sum(0) - n_batches * expected) ** 2 / (n_batches * expected)).sum()) / finite
    distinct = np.array([np.unique(batch // block_rows).size for batch in batches])
    mean = blocks_in_window * (1 - unseen(1))
    variance = blocks_in_window * unseen(1) * (1 - unseen(1))
    variance += blocks_in_window * (blocks_in_window - 1) * (unseen(2) - unseen(1) ** 2)
    z = (distinct.mean() - mean) / math.sqrt(variance / n_batches)
    return {
        "in-block positions of each batch": two_sided(stats.chi2.sf(pearson, n_batches * (block_rows - 1))),
        "in-block positions of all batches": two_sided(stats.chi2.sf(pooled, block_rows - 1)),
        "materials of each batch": 2 * float(stats.norm.sf(abs(z))),
    }


@pytest.mark.parametrize("start", [None, 0, 65_536 + 65_280])
def test_batches_cannot_be_told_from_a_true_shuffle(start: int | None) -> None:
    """64 batches of one run, or one of each of 150 seeds, of 256; a material fills a block, as with 64 patches each."""
    config, rows = BlockShuffleConfig(io_block_size=64, window_blocks=1024), 3 * 65_536
    if start is None:
        batches = ShuffledIndex(rows, config, seed=0)(np.arange(64 * 256)).reshape(64, 256)
    else:
        taken = np.arange(start, start + 256)
        batches = np.stack([ShuffledIndex(rows, config, seed)(taken) for seed in range(150)])
    p_values = batch_p_values(batches, 65_536, 64)
    assert min(p_values.values()) > ALPHA, p_values


def test_the_statistics_reject_a_weak_shuffle() -> None:
    """Levanter's own block shuffle, whose round function is an affine map, fails each of them: they can fail."""
    batches = []
    for seed in range(12):
        shuffled = ListAsyncDataset(range(65_536)).block_shuffle(
            io_block_size=64, window_blocks=1024, key=jax.random.PRNGKey(seed)
        )
        batches.append(asyncio.run(shuffled.get_batch(range(256))))
    p_values = batch_p_values(np.array(batches), 65_536, 64)
    assert max(p_values.values()) < 1e-9, p_values


def test_impossible_shuffles_are_refused(shards: ShardSet) -> None:
    for wrong, message in (
        (lambda: BlockShuffleConfig(io_block_size=0), "io_block_size is 0"),
        (lambda: BlockShuffleConfig(perm_type="linear"), "perm_type is 'linear'"),
        (lambda: ShuffledIndex(0, BlockShuffleConfig(), 0), "no rows"),
        (lambda: ShardDataset(shards, BlockShuffleConfig(io_block_size=12)), "multiple of 8"),
    ):
        with pytest.raises(TomatError, match=message):
            wrong()
    with pytest.raises(IndexError):
        ShuffledIndex(5, BlockShuffleConfig(), 0)(np.array([-1]))
    # Without windows of blocks the size does not matter.
    ShardDataset(shards, BlockShuffleConfig(io_block_size=12, perm_type="none"))


# The data set


@pytest.mark.parametrize("perm_type", ["feistel", "none", "full"])
@pytest.mark.parametrize("io_blocks", [1, 3])
def test_examples_are_the_rows_of_the_index(shards: ShardSet, reference: np.ndarray, perm_type, io_blocks: int) -> None:
    shuffle = BlockShuffleConfig(io_blocks * BLOCK_ROWS, 4, perm_type)
    dataset = ShardDataset(shards, shuffle, seed=9)
    index = ShuffledIndex(ROWS, shuffle, seed=9)
    positions = np.random.default_rng(0).integers(0, 5 * ROWS, 300)
    np.testing.assert_array_equal(fetch(dataset, positions.tolist()), reference[index(positions)])
    shorter = ShardDataset(shards, shuffle, seed=9, seq_len=20)
    np.testing.assert_array_equal(fetch(shorter, positions.tolist()), reference[index(positions), :20])
    example = asyncio.run(dataset.getitem_async(3))
    assert [axis.name for axis in example.tokens.axes] == ["position"] and example.tokens.array.dtype == np.int32


@pytest.mark.parametrize("batch", [1, 16, 24])
def test_an_epoch_reads_each_block_once(shards: ShardSet, reference: np.ndarray, batch: int) -> None:
    dataset = ShardDataset(shards, SHUFFLE, seed=1, epochs=1)
    read = [fetch(dataset, range(start, min(start + batch, ROWS))) for start in range(0, ROWS, batch)]
    assert dataset.blocks_read == BLOCKS
    rows = np.concatenate(read)
    np.testing.assert_array_equal(np.unique(rows, axis=0), np.unique(reference, axis=0))


def test_the_next_window_is_read_by_the_time_it_is_needed(shards: ShardSet) -> None:
    dataset = ShardDataset(shards, SHUFFLE, seed=2)
    window = dataset.index.window_at(0)[1]
    started = []
    for start in range(0, window - window % 4, 4):
        fetch(dataset, range(start, start + 4))
        started.append(dataset.blocks_read)
    fetch(dataset, range(window - window % 4, window))
    # The window itself at once (it is shorter than READ_AHEAD_BLOCKS), then the next one block by block.
    assert started[0] == 4 + 1 and max(np.diff(started)) <= 1
    assert dataset.blocks_read == 8
    fetch(dataset, range(window, window + 1))
    assert dataset.blocks_read <= 8 + 1


def test_no_more_than_two_windows_are_kept(shards: ShardSet) -> None:
    dataset = ShardDataset(shards, BlockShuffleConfig(BLOCK_ROWS, 2, "full"), seed=0)
    assert dataset.cache_bytes == 2 * (2 + 1) * BLOCK_ROWS * LAYOUT.context * 2
    fetch(dataset, range(ROWS))
    assert dataset.blocks_read == BLOCKS
    # Of the 24 blocks only the last six are left.
    fetch(dataset, range(ROWS))
    assert dataset.blocks_read >= 2 * BLOCKS - 6
    assert ShardDataset(shards, BlockShuffleConfig(BLOCK_ROWS, 1000)).cache_bytes == BLOCKS * BLOCK_ROWS * 64 * 2


@pytest.mark.parametrize("position", [0, 10**3, 10**6 + 7, 10**9, 10**15])
def test_resuming_costs_the_same_anywhere(shards: ShardSet, reference: np.ndarray, position: int) -> None:
    """Counted in blocks, since a clock says little on a busy machine."""
    dataset = ShardDataset(shards, SHUFFLE, seed=3)
    asyncio.run(dataset.getitem_async(0))
    assert dataset.blocks_read == 1
    rows = fetch(dataset, range(position, position + 4))
    np.testing.assert_array_equal(rows, reference[dataset.index(np.arange(position, position + 4))])
    windows = len({dataset.index.window_at(p) for p in range(position, position + 4)})
    # Example 0, what is left of the current window (all of it at most), and as much of the next as is consumed of this.
    assert dataset.blocks_read <= 1 + SHUFFLE.window_blocks * (1 + windows) <= READ_AHEAD_BLOCKS


def test_blocks_that_are_kept_in_memory_are_read_once(shards: ShardSet) -> None:
    kept, plain = (ShardDataset(shards, SHUFFLE, seed=3, in_memory=in_memory) for in_memory in (True, False))
    for start in range(0, 3 * ROWS, 40):
        np.testing.assert_array_equal(fetch(kept, range(start, start + 40)), fetch(plain, range(start, start + 40)))
    assert kept.blocks_read == BLOCKS < plain.blocks_read and kept.cache_bytes >= plain.cache_bytes


def test_a_resumed_run_sees_what_an_unbroken_one_saw(shards: ShardSet, mesh: jax.sharding.Mesh) -> None:
    """Through Levanter's loader, batches of 16 on two devices, over the ends of windows and of two epochs."""

    def batches(start: int, count: int, ahead: int = 8) -> np.ndarray:
        dataset = ShardDataset(shards, SHUFFLE, seed=5)
        loader = token_loader(dataset, 16, mesh=mesh, axis_resources={"batch": "data"}, buffered_batches=ahead)
        assert loader.max_buffered_batches == ahead
        iterator = loader.iter_from_step(start)
        out = [next(iterator).tokens for _ in range(count)]
        iterator.close()
        assert [axis.name for axis in out[0].axes] == ["batch", "position"]
        assert len(out[0].array.sharding.device_set) == 2
        return np.stack([np.asarray(tokens.array) for tokens in out])

    unbroken = batches(0, 30)
    for step in (1, 5, 11, 12, 23, 28):
        np.testing.assert_array_equal(batches(step, 2, ahead=step % 4), unbroken[step : step + 2])


def test_a_finite_run_ends_and_its_last_batch_is_padded(shards: ShardSet, mesh: jax.sharding.Mesh) -> None:
    dataset = ShardDataset(shards, BlockShuffleConfig(perm_type="none"), epochs=2)
    assert dataset.is_finite() and asyncio.run(dataset.async_len()) == 2 * ROWS
    with pytest.raises(IndexError, match="370 rows"):
        fetch(dataset, [2 * ROWS])
    batches = [
        np.asarray(b.tokens.array) for b in token_loader(dataset, 64, mesh=mesh, axis_resources={"batch": "data"})
    ]
    assert len(batches) == 6
    assert np.all(batches[-1][: 2 * ROWS - 5 * 64, 0] != 0) and np.all(batches[-1][2 * ROWS - 5 * 64 :] == 0)
    endless = ShardDataset(shards, SHUFFLE)
    assert not endless.is_finite()
    with pytest.raises(ValueError, match="without end"):
        asyncio.run(endless.async_len())


def test_a_damaged_chunk_is_named(
    shard_folder: Path, tmp_path: Path, mesh: jax.sharding.Mesh, reference: np.ndarray
) -> None:
    shutil.copytree(shard_folder, tmp_path / "set")
    chunk = tmp_path / "set" / "tokens.zarr" / "c" / "7" / "0"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[: len(whole) // 2])
    dataset = ShardDataset(open_shards(tmp_path / "set"), BlockShuffleConfig(BLOCK_ROWS, 4, "none"), epochs=1)
    np.testing.assert_array_equal(fetch(dataset, range(7 * BLOCK_ROWS)), reference[: 7 * BLOCK_ROWS])
    with pytest.raises(TomatError, match="Chunk 7 "):
        fetch(dataset, range(7 * BLOCK_ROWS, 8 * BLOCK_ROWS))
    with pytest.raises(TomatError, match="Chunk 7 "):
        list(token_loader(dataset, 8, mesh=mesh, axis_resources={"batch": "data"}))
    # The failure is not kept: once the chunk is back, so are its rows.
    chunk.write_bytes(whole)
    np.testing.assert_array_equal(fetch(dataset, range(ROWS)), reference)
