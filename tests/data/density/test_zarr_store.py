import dataclasses
import gzip
import json

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs import Blosc, Zstd

from tomat.base.errors import TomatError
from tomat.data.density.io import open_density
from tomat.data.density.rules import ReadRules
from tomat.data.density.zarr_store import TOTAL, read_zarr, write_zarr
from tomat.data.tokens.pipeline.sources import path_inputs


@given(st.integers(0, 1000), st.tuples(*[st.integers(1, 9)] * 3), st.sampled_from([None, 2, 4, 16]))
@settings(max_examples=12, deadline=None)
def test_round_trip(tmp_path_factory, make_grid, seed, shape, chunks):
    grid = make_grid(shape, seed)
    path = tmp_path_factory.mktemp("store") / "mp-1.zarr"
    write_zarr(grid, path, chunks=chunks)
    back = read_zarr(path, rules=ReadRules(accept=("atoms",)))  # random values lie on no atoms
    np.testing.assert_allclose(back.rho, grid.rho, rtol=3e-7)
    np.testing.assert_allclose(back.lattice, grid.lattice)
    np.testing.assert_allclose(back.frac_coords, grid.frac_coords)
    assert back.atomic_numbers.tolist() == grid.atomic_numbers.tolist() and back.material_id == "LiF"
    array = zarr.open_group(path, mode="r")[TOTAL]
    assert array.chunks == tuple(min(chunks or n, n) for n in shape)


def test_the_layout_is_rho_gga(tmp_path, grid):
    write_zarr(grid, tmp_path / "a.zarr", metadata={"source": "test"})
    group = zarr.open_group(tmp_path / "a.zarr", mode="r", zarr_format=3)
    assert group[TOTAL].dtype == np.float32
    assert np.asarray(group[TOTAL]).mean() == pytest.approx(10, rel=1e-5)
    assert json.loads(str(group.attrs["metadata"])) == {"task_id": "LiF", "source": "test"}
    from pymatgen.core import Structure

    structure = Structure.from_str(str(group.attrs["structure"]), fmt="json")
    np.testing.assert_allclose(structure.lattice.matrix, grid.lattice)


def test_through_a_url_and_with_a_spin_density_beside_it(tmp_path, grid):
    """The path that `gs://` takes, on fsspec's memory file system."""
    write_zarr(grid, tmp_path / "mp-9.zarr", chunks=4)
    group = zarr.open_group(tmp_path / "mp-9.zarr", mode="a")
    group.create_array("charge_density_diff", data=-np.ones(grid.grid_shape, np.float32))
    fsspec.filesystem("memory").put(str(tmp_path / "mp-9.zarr"), "/bucket/set/mp-9.zarr", recursive=True)
    for place in (tmp_path / "mp-9.zarr", "memory://bucket/set/mp-9.zarr"):
        np.testing.assert_allclose(read_zarr(place).rho, grid.rho, rtol=3e-7)
    with pytest.raises(TomatError, match="not a readable Zarr group"):
        read_zarr("memory://bucket/set/absent.zarr")


def test_what_is_there_is_kept_and_another_unit_not_written(tmp_path, grid, make_grid):
    with pytest.raises(TomatError, match="check its unit"):
        write_zarr(dataclasses.replace(grid, rho=grid.rho * grid.volume_a3), tmp_path / "a.zarr")
    assert list(tmp_path.iterdir()) == []
    write_zarr(grid, tmp_path / "a.zarr")
    with pytest.raises(TomatError, match="is there already"):
        write_zarr(make_grid((3, 3, 3), 5), tmp_path / "a.zarr")
    assert read_zarr(tmp_path / "a.zarr").grid_shape == grid.grid_shape


def test_an_all_zero_chunk_is_no_loss(tmp_path, make_grid):
    grid = make_grid((16, 8, 8))
    # As a slab's density: it falls off on both sides of the vacuum, whose last digits are clipped to zero.
    fall_off = np.clip(np.exp(-(((np.arange(16) - 8) / 2.5) ** 2)) - 5e-4, 0, None)
    rho = grid.rho * fall_off[:, None, None]
    rho *= 10 / (rho.mean() * grid.volume_a3)
    assert not rho[:2].any()
    write_zarr(dataclasses.replace(grid, rho=rho), tmp_path / "a.zarr", chunks=2)
    np.testing.assert_array_equal(read_zarr(tmp_path / "a.zarr").rho == 0, rho == 0)


def test_a_store_without_checksums_is_read(tmp_path, grid):
    group = zarr.open_group(tmp_path / "old.zarr", mode="w")
    write_zarr(grid, tmp_path / "new.zarr")
    new = zarr.open_group(tmp_path / "new.zarr", mode="r")
    array = group.create_array(
        TOTAL, shape=grid.grid_shape, dtype="float32", compressors=[zarr.codecs.ZstdCodec(level=19)]
    )
    array[...] = grid.rho_times_volume()
    group.attrs.update({key: new.attrs[key] for key in ("structure", "metadata")})
    np.testing.assert_array_equal(read_zarr(tmp_path / "old.zarr").rho, read_zarr(tmp_path / "new.zarr").rho)


def test_what_was_changed_behind_the_checksum_is_refused(tmp_path, grid):
    path = tmp_path / "a.zarr"
    write_zarr(grid, path)
    group = zarr.open_group(path, mode="a")
    before = str(group.attrs["structure"])
    group.attrs["structure"] = before.replace('"Li"', '"Na"')
    with pytest.raises(TomatError, match="values, structure or metadata are not what was written .sha256"):
        read_zarr(path)
    group.attrs["structure"] = before
    read_zarr(path)
    group[TOTAL][0, 0, 0] = np.asarray(group[TOTAL][0, 0, 0]) * np.float32(1.0001)
    with pytest.raises(TomatError, match="values, structure or metadata are not what was written .sha256"):
        read_zarr(path)


def test_metadata_that_would_take_all_memory(tmp_path, grid):
    write_zarr(grid, tmp_path / "a.zarr")
    place = tmp_path / "a.zarr" / TOTAL / "zarr.json"
    metadata = json.loads(place.read_text())

    def changed(shape, chunks):
        grid_of_chunks = {"name": "regular", "configuration": {"chunk_shape": chunks}}
        return metadata | {"shape": shape, "chunk_grid": grid_of_chunks}

    for wrong, message in (
        (changed([10**8] * 3, list(grid.grid_shape)), "at most .* voxels"),
        (changed(list(grid.grid_shape), [10**6] * 3), "expected at most"),
        (changed([600] * 3, [1, 1, 1]), "expected at most"),
        ({"zarr_format": 3, "node_type": "group", "attributes": {}}, "of group; expected 3-D floats"),
    ):
        place.write_text(json.dumps(wrong))
        with pytest.raises(TomatError, match=message):
            read_zarr(tmp_path / "a.zarr")


def zstd_without_size(data):
    """A zstd frame as streaming writers leave it, whose header does not state the size."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("chunks", [None, 2])
def test_chunks_whose_size_is_not_stated_are_read(tmp_path, grid, chunks):
    path = tmp_path / "a.zarr"
    write_zarr(grid, path, chunks=chunks)
    for chunk in (file for file in (path / TOTAL / "c").rglob("*") if file.is_file()):
        streamed = zstd_without_size(Zstd().decode(chunk.read_bytes()))
        assert streamed[4] >> 6 == 0 and not streamed[4] & 32  # no content size, no single segment
        chunk.write_bytes(streamed)
    np.testing.assert_allclose(read_zarr(path).rho, grid.rho, rtol=3e-7)


@pytest.mark.parametrize(
    ("owner", "name"), [(zarr, "open_group"), (zarr.Group, "__getitem__"), (zarr.Array, "__getitem__")]
)
def test_memory_that_runs_out_is_no_damage(tmp_path, grid, monkeypatch, owner, name):
    write_zarr(grid, tmp_path / "a.zarr")

    def fail(*_, **__):
        raise MemoryError("Unable to allocate 343 MiB")

    monkeypatch.setattr(owner, name, fail)
    for read in (read_zarr, open_density):
        with pytest.raises(MemoryError, match="Unable to allocate"):
            read(tmp_path / "a.zarr")


PACKERS = {
    "zstd": Zstd(3).encode,
    "zstd of no stated size": zstd_without_size,
    "zstd in two frames": lambda data: Zstd(3).encode(b"1234") + Zstd(3).encode(data),
    "zstd, second frame of no stated size": lambda data: Zstd(3).encode(b"1234") + zstd_without_size(data),
    "zstd behind a skippable frame": lambda data: b"\x50\x2a\x4d\x18\x02\0\0\0ab" + Zstd(3).encode(data),
    "gzip": lambda data: gzip.compress(data, 1),
    "gzip in two members": lambda data: gzip.compress(b"1234") + gzip.compress(data),
    "blosc": Blosc("zstd").encode,
}


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)
def test_a_chunk_that_is_a_bomb(tmp_path, grid, pack):
    path = tmp_path / "a.zarr"
    write_zarr(grid, path)
    (chunk,) = [file for file in (path / TOTAL / "c").rglob("*") if file.is_file()]
    chunk.write_bytes(pack(bytes(1 << 20)))  # which packs to less than a chunk of this array takes
    with pytest.raises(TomatError, match="a.zarr: the chunk .* decompresses to .* bytes or more; expected"):
        read_zarr(path)


@pytest.fixture
def bucket(bucket, monkeypatch):
    """`gs://` for real: gcsfs against the bucket server."""
    import gcsfs

    for key, value in bucket.environment.items():
        monkeypatch.setenv(key, value)
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield bucket
    gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture
def put_density(bucket, grid, tmp_path):
    """Store the density under a name of the bucket."""

    def put(name: str, **how: int) -> None:
        write_zarr(grid, tmp_path / name, **how)
        for path in (tmp_path / name).rglob("*"):
            if path.is_file():
                bucket.put("bucket", str(path.relative_to(tmp_path)), path.read_bytes())

    return put


def test_materials_are_listed_and_read(put_density, grid):
    put_density("rho_gga/mp-1.zarr", chunks=4)
    put_density("rho_gga/mp-2.zarr")
    inputs = path_inputs(["gs://bucket/rho_gga/"])
    assert inputs.material_ids == ("mp-1", "mp-2")
    for name in inputs.material_ids:
        np.testing.assert_allclose(inputs.get_grid(name).rho, grid.rho, rtol=3e-7)


def test_a_lost_object_is_noticed(bucket, put_density):
    put_density("mp-1.zarr", chunks=2)
    lost = [name for name in sorted(bucket.objects) if "/c/" in name][3]
    del bucket.stored["bucket", lost]
    with pytest.raises(TomatError, match=r"'charge_density_total' is not whole .*: 1 chunk\(s\) not found"):
        read_zarr("gs://bucket/mp-1.zarr")
