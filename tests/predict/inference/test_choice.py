import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.predict.inference.decoding import chosen_bins, quantile_bin, sequence_keys
from tomat.predict.inference.predictor import Choice, check_kv_cache_dtype

P = np.array([0.05, 0.0, 0.4, 0.25, 0.3], np.float32)


def test_a_share_of_the_weight_is_reached_by_its_bin_and_not_before():
    shares = jnp.array([1e-9, 0.05, 0.06, 0.45, 0.46, 1.0], jnp.float32)
    np.testing.assert_array_equal(quantile_bin(jnp.tile(jnp.asarray(P), (6, 1)), shares), [0, 0, 2, 2, 3, 4])


def test_bins_are_drawn_as_often_as_they_are_probable():
    n = 20_000
    keys = sequence_keys(jnp.uint32(3), jnp.arange(n), jnp.zeros(n, jnp.int32))
    logits = jnp.tile(jnp.log(jnp.asarray(P)), (n, 1))

    def drawn(temperature: float, voxel: int) -> np.ndarray:
        return np.asarray(jax.jit(chosen_bins, static_argnums=1)(logits, "sampled", temperature, keys, voxel))

    for temperature in (1.0, 0.5):
        expected = P ** (1 / temperature) / np.sum(P ** (1 / temperature))
        found = np.bincount(drawn(temperature, 0), minlength=5) / n
        np.testing.assert_allclose(found, expected, atol=4 * np.sqrt(0.25 / n))
        assert found[1] == 0
    assert (drawn(1.0, 0) != drawn(1.0, 1)).any() and (drawn(1e-6, 0) == 2).all(), "the most probable"
    assert (np.asarray(chosen_bins(logits[:2], "greedy", jnp.float32(1), keys[:2], jnp.int32(0))) == 2).all()
    assert (np.asarray(chosen_bins(logits[:2], "median", jnp.float32(1), keys[:2], jnp.int32(0))) == 3).all()


def test_a_choice_that_makes_no_sense_is_refused():
    for fields in (dict(kind="mean"), dict(samples=0), dict(kind="sampled", temperature=0.0), dict(temperature=2.0)):
        with pytest.raises(TomatError):
            Choice(**fields)  # pyright: ignore[reportArgumentType]


def test_a_type_or_a_decoder_without_a_cache_is_refused_by_name():
    check_kv_cache_dtype("int8", "autoregressive")
    check_kv_cache_dtype("compute", "parallel")
    with pytest.raises(TomatError, match="kv_cache_dtype is int8, but the parallel decoder keeps no keys and values"):
        check_kv_cache_dtype("int8", "parallel")
    with pytest.raises(TomatError, match="kv_cache_dtype is 'int4'; expected one of compute, int8"):
        check_kv_cache_dtype("int4", "autoregressive")
