"""`gs://` for real: gcsfs against the bucket server."""

import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.density.zarr_store import read_zarr, write_zarr
from tomat.data.tokens.pipeline.sources import path_inputs


@pytest.fixture
def bucket(bucket, monkeypatch):
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
    with pytest.raises(TomatError, match=r"'charge_density_total' is not whole .* \(1 chunk\(s\) not found"):
        read_zarr("gs://bucket/mp-1.zarr")
