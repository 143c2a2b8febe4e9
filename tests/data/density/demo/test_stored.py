import numpy as np
import pytest
from embedded_set import write_coefficients
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.data.density.demo.stored import read_coefficients


def plane_waves(shape, seed):
    """A density of a few waves, with vacuum where they cancel; band-limited on grids of odd sides."""
    rng = np.random.default_rng(seed)
    spectrum = np.zeros(shape, complex)
    for _ in range(5):
        h = rng.integers(-1, 2, 3)
        spectrum[tuple(h)] += rng.normal() + 1j * rng.normal()
    return np.abs(np.fft.ifftn(spectrum)) ** 2 * spectrum.size**2


@given(st.tuples(*[st.integers(3, 8).map(lambda n: 2 * n + 1)] * 3), st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_a_density_comes_back_with_its_electrons(tmp_path_factory, shape, seed):
    path, rho = tmp_path_factory.mktemp("stored") / "cell.zarr", plane_waves(shape, seed)
    rounding = write_coefficients(rho, path)
    found = read_coefficients(path, 0.3)
    assert found.shape == shape and found.mean() == pytest.approx(0.3, rel=1e-13)
    error = np.abs(found * (rho.mean() / 0.3) - rho).sum() / rho.sum()
    assert error == pytest.approx(rounding, rel=1e-6, abs=1e-12) and error < 1.1e-5


def test_damage_is_found(tmp_path):
    write_coefficients(plane_waves((9, 9, 9), 1), tmp_path / "cell.zarr")
    (chunk,) = (path for path in (tmp_path / "cell.zarr" / "c").rglob("*") if path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-9] + b"012345678")
    with pytest.raises(TomatError, match="cell.zarr is damaged .*; install tomat again"):
        read_coefficients(tmp_path / "cell.zarr", 1.0)
    chunk.unlink()
    with pytest.raises(TomatError, match="is damaged"):
        read_coefficients(tmp_path / "cell.zarr", 1.0)
