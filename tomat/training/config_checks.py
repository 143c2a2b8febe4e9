"""Settings of Levanter's that tomat does not take, each with what to use instead.

Levanter can load weights without the optimizer's state, or whatever part of a checkpoint is there, from a key of its
configuration. The first generation lost 17 hours of a v6e-32 to such a resume: trained weights, fresh optimizer.
"""

from levanter.tracker.wandb import WandbConfig
from levanter.trainer import TrainerConfig

from tomat.errors import TomatError

_OPTIONS = (
    "a run continues by itself from its newest whole checkpoint; `--fork NEW_NAME` begins another run with a "
    "checkpoint's weights, optimizer state and step, `--warm_start RUN_OR_CHECKPOINT` one with its weights alone"
)


def check_loading(trainer: TrainerConfig) -> None:
    """Refuse every key by which Levanter would decide what a run begins from.

    Raises:
        TomatError: With tomat's own options.
    """
    for key, unset in (
        ("initialize_from", None),
        ("load_checkpoint_path", None),
        ("load_checkpoint", None),
        ("allow_partial_checkpoint", False),
    ):
        value = getattr(trainer, key)
        if value != unset:
            raise TomatError(f"trainer.{key} is {value!r}, which tomat does not take: {_OPTIONS}.")
    if trainer.checkpointer.keep_last_temporary_checkpoints < 1:
        raise TomatError(
            "trainer.checkpointer.keep_last_temporary_checkpoints is "
            f"{trainer.checkpointer.keep_last_temporary_checkpoints}; expected at least 1: with 0 a checkpoint is "
            "removed as soon as it is complete, and a killed run has none to continue from."
        )


def check_wandb(wandb: WandbConfig | None, run_name: str) -> None:
    """Refuse what would log a resumed run as another one.

    Raises:
        TomatError: An id other than the run's name, or another way to resume than by that id.
    """
    if wandb is None:
        return
    if wandb.id not in (None, run_name):
        raise TomatError(
            f"trackers.wandb.id is '{wandb.id}'; it follows from run_name, which is '{run_name}', so that a resumed "
            "run continues its own log. Set trackers.wandb.name for another title."
        )
    if wandb.resume != "allow":
        raise TomatError(
            f"trackers.wandb.resume is {wandb.resume!r}; tomat takes only 'allow': the first start makes the W&B run, "
            "every later one continues it."
        )
    if wandb.fork_from is not None:
        raise TomatError("trackers.wandb.fork_from is set; `tomat train --fork NEW_NAME` forks a run, model included.")
