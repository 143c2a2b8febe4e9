"""The divergence of a student's distribution over the density bins from its teacher's, in blocks of positions."""

import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax import lax

from tomat.base.errors import TomatError
from tomat.model.any_decoder import HiddenHead
from tomat.model.loss.density_loss import plain
from tomat.model.loss.interface import DensityTarget


def teacher_divergence(
    student: HiddenHead,
    teacher: HiddenHead,
    tokens: NamedArray,
    *,
    target: DensityTarget,
    top_k: int,
    temperature: float,
    block_positions: int,
) -> jax.Array:
    """Kullback-Leibler divergence of the student from the teacher, in nats, a float32 scalar. It is the mean over
    sequences of the mean over a sequence's density positions, as in the loss on the data; a sequence without density
    positions counts as 0. The hidden state at position p predicts `tokens[p + 1]`, int [batch, position]. The teacher's
    `top_k` bins, and any as probable as the last of them, are compared one by one; the other bins are summed into one.
    All logits are divided by `temperature`. Only the student gets a gradient. The logits of at most `block_positions`
    positions of each model exist at once, in the backward pass too."""
    start, end = target.density_start, target.density_end
    hidden, t_hidden = (plain(each.hidden, ("batch", "position", "embed")) for each in (student, teacher))
    head, t_head = (plain(each.head, ("vocab", "embed")).astype(each.hidden.dtype) for each in (student, teacher))
    if head.shape[0] != t_head.shape[0]:
        said = f"the teacher's head has {t_head.shape[0]:,} rows and the student's {head.shape[0]:,}"
        raise TomatError(f"{said}; expected the same vocabulary.")
    head, t_head, t_hidden = head[start:end], lax.stop_gradient(t_head[start:end]), lax.stop_gradient(t_hidden)
    ids = plain(tokens, ("batch", "position"))
    n_sequences, positions = ids.shape
    targets = jnp.concatenate([ids[:, 1:], jnp.full((n_sequences, 1), target.pad_id, ids.dtype)], axis=1)
    is_density = ((targets >= start) & (targets < end)).astype(jnp.float32)
    weights = is_density / (jnp.maximum(is_density.sum(axis=1, keepdims=True), 1.0) * n_sequences)
    block = min(block_positions, positions)
    n_blocks = -(-positions // block)

    def cut(x: jax.Array, at: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, at, block, axis=1)

    @jax.checkpoint
    def one(index: jax.Array, hidden: jax.Array, head: jax.Array) -> jax.Array:
        # The last block ends with the sequence. Positions that it shares with the block before get weight 0 in it.
        at = jnp.minimum(index * block, positions - block)
        fresh = at + jnp.arange(block) >= index * block
        logits, t_logits = (
            jnp.einsum("bqe,ke->bqk", cut(x, at), each, preferred_element_type=jnp.float32) / temperature
            for x, each in ((hidden, head), (t_hidden, t_head))
        )
        return jnp.sum(cut(weights, at) * fresh * divergence(logits, t_logits, top_k))

    def step(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        return total + one(index, hidden, head), None

    total, _ = lax.scan(step, jnp.zeros((), jnp.float32), jnp.arange(n_blocks))
    return total


def divergence(logits: jax.Array, teacher: jax.Array, top_k: int) -> jax.Array:
    """sum_k p_k log(p_k / q_k), with p from the teacher's logits and q from `logits`, float32 [..., K] to [...]. All
    bins beyond the teacher's `top_k` form one term of the sum."""
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher)
    p = jnp.exp(log_p)
    if top_k >= teacher.shape[-1]:
        return jnp.sum(p * (log_p - log_q), axis=-1)
    apart = teacher >= lax.top_k(teacher, top_k)[0][..., -1:]
    each = jnp.sum(jnp.where(apart, p * (log_p - log_q), 0.0), axis=-1)
    lowest = jnp.finfo(log_p.dtype).min
    rest_p, rest_q = (jax.nn.logsumexp(jnp.where(apart, lowest, x), axis=-1) for x in (log_p, log_q))
    some = ~jnp.all(apart, axis=-1)
    return each + jnp.where(some, jnp.exp(rest_p) * (rest_p - rest_q), 0.0)
