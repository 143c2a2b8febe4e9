"""A loss that is not finite or is a spike: judged inside the compiled step, acted on before anything is saved.

The judgement is part of the step, because the step donates its input: once it has returned, the state before a bad
batch is gone. So the optimizer is wrapped, and its state carries what the next loss is compared with; a resumed run
judges as the unbroken one does. Two libraries come close. `optax.apply_if_finite` (0.2.6) looks at gradients alone.
Levanter's `skip_bad_steps` (0.2.227) exists for Adam only, multiplies a bad update by zero, which leaves a NaN as it
is, and adds the bad loss to the history that it judges by.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import levanter.tracker
import numpy as np
import optax
from rich.text import Text

from tomat.base.errors import TomatError
from tomat.base.reporting import console
from tomat.data.tokens.shards import ShardSet
from tomat.train.folder import RunFolder
from tomat.train.loader import ShardDataset
from tomat.train.settings.schema import SPIKE_HISTORY, GuardsConfig

VERDICTS = ("good", "the loss is not finite", "the update is not finite", "the loss is a spike")
"""What the step's verdict, an index, means."""

MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution in units of its median absolute deviation, 1 / Phi^-1(3/4)."""

RELATIVE_SIGMA_FLOOR = 0.02
"""The deviation is taken to be at least this part of the median: a run of large batches has losses so much alike that
any small move would be many deviations. With a factor of 20 a spike is at least 1.4 times the median."""

NAMED_MATERIALS = 8
"""Materials of a bad batch that are named in the error; the history has all of them."""


class GuardedState(NamedTuple):
    """The optimizer's state, and what the next loss is compared with."""

    inner: Any
    losses: jax.Array
    """float32 `[SPIKE_HISTORY]`: the last good losses, a ring."""
    accepted: jax.Array
    """int32: number of good losses so far, which is also where the ring goes on."""
    tally: jax.Array
    """int32 `[3]`: the verdict on the last step, the bad steps in a row, the bad steps since the run began."""

    @property
    def hyperparams(self) -> dict[str, jax.Array]:
        """Learning rate and the like, where Levanter looks for them to log them."""
        return getattr(self.inner, "hyperparams", {})


def guard_updates(optimizer: optax.GradientTransformation, config: GuardsConfig) -> optax.GradientTransformation:
    """`optimizer` with every step judged. With `skip` a bad step's update is dropped, which leaves parameters and
    moments as they were, bit for bit; the schedule of the learning rate moves on with the step."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> GuardedState:
        losses, accepted = jnp.zeros(SPIKE_HISTORY, jnp.float32), jnp.zeros((), jnp.int32)
        return GuardedState(inner.init(params), losses, accepted, jnp.zeros(3, jnp.int32))

    def update(
        updates: optax.Updates, state: GuardedState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, GuardedState]:
        loss = jnp.asarray(extra_args["loss"], jnp.float32)
        new_updates, new_inner = inner.update(updates, state.inner, params, **extra_args)
        norm = jnp.asarray(optax.global_norm(new_updates))
        limit = spike_limit(state.losses, state.accepted, config)
        wrong = [~jnp.isfinite(loss), ~jnp.isfinite(norm), loss > limit]
        verdict = jnp.select(wrong, [1, 2, 3], default=0).astype(jnp.int32)
        bad = verdict > 0
        losses = jnp.where(bad, state.losses, state.losses.at[state.accepted % SPIKE_HISTORY].set(loss))
        in_row, total = jnp.where(bad, state.tally[1] + 1, 0), state.tally[2] + bad
        if config.on_bad_loss == "skip":
            # Selected and not multiplied: zero times NaN is NaN.
            new_updates = jax.tree.map(lambda new: jnp.where(bad, jnp.zeros_like(new), new), new_updates)
            new_inner = _kept_if(bad, state.inner, new_inner)
        accepted = state.accepted + jnp.where(bad, 0, 1)
        return new_updates, GuardedState(new_inner, losses, accepted, jnp.stack([verdict, in_row, total]))

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def spike_limit(losses: jax.Array, accepted: jax.Array, config: GuardsConfig) -> jax.Array:
    """The loss above which the next one is a spike, float32; infinite while there are too few losses to judge by.
    `losses` and `accepted` are as in `GuardedState`."""
    if config.spike_factor == 0:
        return jnp.array(jnp.inf, jnp.float32)
    age = (accepted - 1 - jnp.arange(SPIKE_HISTORY)) % SPIKE_HISTORY
    window = jnp.where(age < config.spike_window, losses, jnp.nan)
    median = jnp.nanmedian(window)
    sigma = MAD_TO_SIGMA * jnp.nanmedian(jnp.abs(window - median))
    limit = median + config.spike_factor * jnp.maximum(sigma, RELATIVE_SIGMA_FLOOR * jnp.abs(median))
    return jnp.where(accepted >= config.spike_window, limit, jnp.inf)


def _kept_if(bad: jax.Array, old: Any, new: Any) -> Any:
    """`old` where `bad`, else `new`; a schedule's counter, and what follows from it, is always `new`."""
    if hasattr(new, "hyperparams") and hasattr(new, "inner_state"):  # optax.inject_hyperparams
        return new._replace(inner_state=_kept_if(bad, old.inner_state, new.inner_state))
    return jax.tree.map(lambda before, after: jnp.where(bad, before, after) if eqx.is_array(after) else after, old, new)


@dataclass
class BadLossGuard:
    """The hook that acts on the step's judgement; it has to come before the one that saves. `dataset`, the order of the
    rows of `shards`, names the materials of a bad batch."""

    folder: RunFolder
    checkpoints: str
    dataset: ShardDataset
    shards: ShardSet
    _last_step: int = -1

    def __call__(self, info: Any) -> None:
        step, config = int(info.step), self.folder.config.guards
        if step == self._last_step:  # the hooks run once more after the last step
            return
        self._last_step = step
        verdict, in_row, total = np.asarray(info.state.opt_state.tally).tolist()
        if total:
            levanter.tracker.log({"guards/bad_steps": total}, step=step)
        if verdict == 0:
            return
        loss = float(info.loss)
        losses, accepted = (jnp.asarray(np.asarray(x)) for x in info.state.opt_state[1:3])
        limit = float(spike_limit(losses, accepted, config))
        batch_size, manifest = self.folder.config.batch_size, self.shards.manifest
        rows = self.dataset.index(np.arange(step * batch_size, (step + 1) * batch_size))
        materials = sorted({manifest.materials[i].material_id for i in manifest.material_indices(rows).tolist()})
        stops = config.on_bad_loss == "stop" or in_row > config.max_skips
        details = {"action": "stop" if stops else "skip", "reason": VERDICTS[verdict], "loss": repr(loss)}
        details |= {"spike_limit": repr(limit), "skipped_in_row": in_row, "materials": materials}
        self.folder.record("guard:bad_loss", step, **details)
        against = f", limit {limit:.4g}" if verdict == 3 else ""
        found = f"step {step}: {VERDICTS[verdict]} (loss {loss:.4g}{against})"
        named = ", ".join(materials[:NAMED_MATERIALS]) + (", ..." if len(materials) > NAMED_MATERIALS else "")
        if not stops:
            if jax.process_index() == 0:
                console.print(Text.assemble(("skipped", "yellow"), f" {found}; the batch's materials: {named}"))
            return
        if config.on_bad_loss == "skip":
            raise TomatError(
                f"{found}: {in_row} bad steps in a row; guards.max_skips is {config.max_skips}. The batch's materials: "
                f"{named}. More than one batch is bad: lower the learning rate, or go back to an earlier checkpoint."
            )
        relax = "a larger --guards.spike_factor (0: none), or " if verdict == 3 else ""
        raise TomatError(
            f"{found}. The checkpoints under {self.checkpoints} precede it. The batch's materials: {named}. Run "
            f"again with --guards.on_bad_loss skip to pass over it, or with {relax}another learning rate."
        )
