"""A small analytic density, a codec fitted to it, and a small decoder: real parts, of a size that takes seconds."""

import dataclasses
import functools

import numpy as np
import pytest
from fitted_codec import fitted_codec
from ionic_density import gaussians

from tomat.data.codec.base import DensityCodec
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import SequenceLayout

N_BINS = 64


def gaussian_grid(shape: tuple[int, int, int], material_id: str = "gaussians") -> DensityGrid:
    """Two atoms and a floor in a triclinic cell; smooth, positive, without symmetry."""
    lattice = [[3.0, 0.0, 0.0], [0.7, 2.8, 0.0], [0.2, 0.4, 3.3]]
    atoms = gaussians(lattice, [14, 8], [[0.1, 0.2, 0.3], [0.55, 0.6, 0.8]], {14: 4, 8: 6}, shape, material_id)
    return dataclasses.replace(atoms, rho=atoms.rho + np.float32(0.05))


@pytest.fixture(scope="session")
def make_grid():
    """`gaussian_grid`, for tests that need several."""
    return gaussian_grid


@pytest.fixture(scope="session")
def grid() -> DensityGrid:
    """7 x 5 x 4 voxels: no side is a multiple of the layout's 3."""
    return gaussian_grid((7, 5, 4))


@pytest.fixture(scope="session")
def codec() -> DensityCodec:
    """64 Lloyd-Max bins fitted to a finer sampling of the same density."""
    return fitted_codec(N_BINS, gaussian_grid((24, 20, 22)).rho)


@pytest.fixture(scope="session")
def layout() -> SequenceLayout:
    """27 voxels; two atoms and the brackets take 41 of 72 tokens."""
    return SequenceLayout("v3-p3", "v3", 3, 72)


@pytest.fixture(scope="session")
def make_decoder():
    """Builds a two-layer decoder with random weights, with some fields of its configuration changed."""
    import equinox as eqx
    import haliax as hax
    import jax

    from tomat.data.tokens.vocabulary import Vocabulary
    from tomat.model.decoder import DensityDecoderConfig

    plain = DensityDecoderConfig(
        max_seq_len=72, hidden_dim=32, intermediate_dim=48, num_layers=2, num_heads=2, num_kv_heads=2
    )

    def build(config=None, **changes):
        config = dataclasses.replace(plain, **changes) if config is None else config
        vocab = hax.Axis("vocab", Vocabulary(N_BINS).size)
        return eqx.filter_jit(lambda key: config.build(vocab, key=key))(jax.random.PRNGKey(0))

    return build


@pytest.fixture(scope="session")
def decoder(make_decoder):
    """The decoder that most tests share."""
    return make_decoder(attn_backend="vanilla")


@pytest.fixture(scope="session")
def make_oracle():
    """Builds a model that looks at the next token and is all but certain of it: its error is the codec's floor."""
    import haliax as hax
    import jax.numpy as jnp

    from tomat.data.tokens.vocabulary import DENSITY_START
    from tomat.model.decoder import DensityDecoderConfig

    @functools.cache
    class Oracle:
        def __init__(self, n_bins=N_BINS):
            wide = dict(max_seq_len=72, hidden_dim=n_bins, num_heads=1, num_kv_heads=1, head_dim=2)
            self.config = DensityDecoderConfig(**wide)
            self.Pos, self.Embed = self.config.max_Pos, self.config.Embed
            self.Vocab = hax.Axis("vocab", DENSITY_START + n_bins)

        def activations(self, input_ids, attn_mask=None, *, key=None):
            return 200.0 * hax.nn.one_hot(hax.roll(input_ids, -1, "position") - DENSITY_START, self.Embed)

        def get_lm_head(self):
            head = jnp.eye(self.Vocab.size, self.Embed.size, -DENSITY_START)
            return hax.named(head, (self.Vocab, self.Embed))

    return Oracle
