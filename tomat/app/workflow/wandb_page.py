"""Stores the pages of a run in Weights & Biases beside its curves.

The pages show the evaluation after the training. The training's trackers are closed by then, so the W&B run is opened
again.
"""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tomat.base import layout
from tomat.base.reporting import console

if TYPE_CHECKING:
    from tomat.train.settings.config import TrainConfig

KEPT = (layout.PAGE_FILE, layout.HTML_FILE, layout.EVALUATION_FILE, layout.LOSS_FIGURE, layout.DENSITY_FIGURE,
        layout.PREDICTION_FIGURE)  # fmt: skip
"""Both pages, the figures of the evaluation, and the pictures that the pages show."""
ARTIFACT_TYPE = "page"


def keep_pages(config: "TrainConfig", run_dir: Path) -> bool:
    """Log the pages of a run as one artifact, `RUN-page`, unless its W&B is off. Returns whether they were logged.

    If W&B fails or does not answer within `trackers.wandb.background_finish_timeout`, this is only a warning: the pages
    are in the run's folder.
    """
    from tomat.train.tracking import end_wandb

    wandb = config.trackers.wandb
    if wandb is None or wandb.mode == "disabled":
        return False
    failed: list[BaseException] = []

    def log() -> None:
        try:
            import wandb as library

            run = library.init(
                entity=wandb.entity,
                project=wandb.project,
                id=config.run_name,
                name=wandb.name,
                mode=wandb.mode,  # pyright: ignore[reportArgumentType]
                # The same as for the trackers of a run that continues.
                resume="allow",
                settings=library.Settings(console="off", save_code=False, silent=True, x_disable_stats=True),
            )
            artifact = library.Artifact(f"{config.run_name}-page", ARTIFACT_TYPE, description=config.purpose)
            for name in KEPT:
                if (run_dir / name).is_file():
                    artifact.add_file(str(run_dir / name))
            run.log_artifact(artifact)
            run.finish()
        except BaseException as error:  # in a thread, an error that is not caught is lost
            failed.append(error)

    # Without a network W&B retries for hours, while the slice costs money.
    thread = threading.Thread(target=log, name="wandb-page", daemon=True)
    thread.start()
    thread.join(wandb.background_finish_timeout)
    end_wandb(wandb)
    if not failed and not thread.is_alive():
        return True
    silent = f"no answer in {wandb.background_finish_timeout:g} s"
    why = f"{type(failed[0]).__name__}: {failed[0]}" if failed else silent
    console.print(
        f"warning: the pages of the run are not in W&B ({why}). Later: `wandb artifact put --type {ARTIFACT_TYPE} "
        f"--name {wandb.project}/{config.run_name}-page {run_dir / layout.HTML_FILE}`",
        soft_wrap=True,
    )
    return False
