"""Keys that configurations and records of earlier versions have, and what to use instead. Without JAX.

Up to 2026 the `trainer` block was all of Levanter's. A key of it that decided nothing is still taken at the value that
it had to keep: the `config.yaml` of a run can be read, and the key is no difference when the run goes on.
"""

from collections.abc import Mapping

_FOUND = (
    "a run continues by itself from its newest whole checkpoint; `--fork NEW_NAME` begins another run with a "
    "checkpoint's weights, optimizer state and step, `--warm_start RUN_OR_CHECKPOINT` one with its weights alone"
)
_BAD_LOSS = "guards.on_bad_loss judges the loss inside the step, and names step and materials"
_TEXT = "`tomat plan` compiles the step for any slice and keeps its text"
_DUMP = "set compiler.xla_flags to [--xla_dump_to=FOLDER] and copy the folder"
_HANG = "guards.hang_seconds and guards.startup_hang_seconds watch every process, and write the stacks"

FORMER: Mapping[str, str] = {
    "trainer.watch": "guards.on_bad_loss watches the loss and the norm of the update, without a second step to compile",
    "trainer.profiler.upload": "it sends profiles to Marin; `tomat profile` reads them in the run's folder",
    "trainer.profiler.profile_options": "traces have what `tomat profile` reads, and no more",
    "trainer.profiler.perfetto_link": "set trainer.profiler.create_perfetto_trace, and open the file",
    "trainer.profiler.process_index": "the first process of a slice writes the trace",
    "trainer.xla_dump_upload": _DUMP,
    "trainer.progress_watchdog": _HANG,
    "trainer.log_jaxprs": _TEXT,
    "trainer.log_xla_hlo": _TEXT,
    "trainer.crash_on_nan": _BAD_LOSS,
    "trainer.crash_on_inf": _BAD_LOSS,
    "trainer.mesh.batch_axis_name": "sequences of a batch are counted by the axis 'batch' throughout",
    "trainer.use_explicit_mesh_axes": "the step is compiled with axes that XLA places",
    "trainer.allow_nondivisible_batch_size": "set trainer.train_batch_size to a multiple of the number of devices",
    "trainer.checkpointer.append_run_id_to_base_path": "checkpoints lie in output_dir/run_name; set these two",
    "trainer.checkpointer.delete_old_temp_checkpoints": "set trainer.checkpointer.keep_last_temporary_checkpoints",
    "trainer.checkpointer.debug": _HANG,
    "trainer.checkpointer.write": "Levanter's own sizes of a save are used",
    "trainer.load_checkpoint": _FOUND,
    "trainer.load_checkpoint_path": _FOUND,
    "trainer.initialize_from": _FOUND,
    "trainer.allow_partial_checkpoint": _FOUND,
    "trainer.require_accelerator": "set slice: a run does not start on other devices than those of its slice",
    "trainer.shutdown_at_exit": "delete the slice when the run has ended (`tomat launch` names the command)",
    "trainer.quantization.compute_dtype": "products are in the type that trainer.mp computes in",
    "model.keep_activation_gradient": "the backward pass keeps what model.gradient_checkpointing says",
}
"""Keys, or whole sections, that had no effect on what is learnt, each with what to use instead."""

FOLLOWS: Mapping[str, str] = {
    "trainer.id": "run_name",
    "trainer.log_dir": "output_dir",
    "trainer.checkpointer.base_path": "output_dir",
    "trainer.tracker": "trackers",
    "trainer.wandb": "trackers.wandb",
    "trainer.mesh.param_mapping": "sharding",
    "model.max_seq_len": "data.seq_len",
}
"""Keys of Levanter that no configuration has, each with the key of tomat that it follows from and that is to be set."""


def former_key(key: str) -> str | None:
    """The entry of `FORMER` that a dotted key is or lies below; None: there is none."""
    return next((one for one in FORMER if key == one or key.startswith(f"{one}.")), None)
