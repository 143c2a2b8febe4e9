"""The keys of a configuration that may change when a run is resumed; every other one decides what is learnt.

Each is named in full, so that a key that a new version of tomat or Levanter brings is fixed until somebody has put it
here, with the reason that its group gives. `tests/train/test_every_key.py` walks all keys and holds it.
"""

from tomat.train.settings.checks import NO_EFFECT, REMOVED_MODEL_KEYS


def _below(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names.split())


_NAMES_AND_PLACES = (
    "run_name", "output_dir", "purpose", "tracking_dir", "baseline", "data.input",
    # What the name of a preset stands for is in the keys of the model.
    "preset",
)  # fmt: skip

_WHERE_AND_HOW_FAST = (
    "slice", "run_elsewhere", "sharding", "dispatch_ahead", "keep_freed_memory", "compiler.xla_flags",
    "compiler.libtpu_args",
    *_below("pause", "every seconds"),
    *_below("preemption", "grace_seconds maintenance_notice poll_seconds"),
    *_below("data", "verify_checksums prefetch_batches in_memory"),
    *_below("trainer", "per_device_parallelism per_device_eval_parallelism use_explicit_mesh_axes require_accelerator "
            "jax_compilation_cache_dir shutdown_at_exit"),
    *_below("trainer.distributed", "coordinator_address num_processes process_id local_device_ids "
            "initialize_jax_distributed"),
    *_below("trainer.jax_config", "jax_compilation_cache_dir jax_enable_compilation_cache jax_log_compiles "
            "jax_persistent_cache_enable_xla_caches jax_persistent_cache_min_compile_time_secs "
            "jax_persistent_cache_min_entry_size_bytes jax_traceback_filtering"),
)  # fmt: skip
"""Devices, hosts, caches; a microbatch has its gradients averaged."""

_HOW_THE_SAME_IS_COMPUTED = (
    *_below("model", "attn_backend flash_attention_block_size flat_mlp fused_gate_up fused_qkv gradient_checkpointing "
            "query_blocks save_mlp_layers scan_layers"),
    *_below("model.qk_rotary", "kernel block_positions interpret"),
    *_below("model.splash", "block_q block_kv block_kv_compute block_q_dkv block_kv_dkv block_kv_dkv_compute "
            "block_q_dq block_kv_dq use_fused_bwd q_layout k_layout v_layout interpret"),
    *_below("model.whole_head", "block block_bwd keys_bwd rows interpret"),
    *_below("loss", "block_positions kernel interpret"),
    *_below("loss.tiles", "block_rows block_ids chunk_rows resident_rows"),
)  # fmt: skip
"""Kernels, their tiles, what is kept for the backward pass: the numbers are the same up to rounding."""

_WHAT_WATCHES = (
    # A guard may pass over a batch; that stands in the history, and why it may change in `docs/guides/preemption.md`.
    *_below("guards", "on_bad_loss max_skips spike_factor spike_window allow_cross_region max_clock_skew_seconds "
            "hang_seconds startup_hang_seconds"),
    *_below("trainer.progress_watchdog", "step_timeout process_timeout startup_timeout startup_grace_period "
            "diagnostic_timeout"),
    *_below("trainer", "steps_per_eval max_eval_batches log_jaxprs log_xla_hlo"),
    *_below("evaluation", "patches_per_material free_running materials picture seed"),
    "trackers.tensorboard",
    *_below("trackers.wandb", "entity project name tags id group mode resume fork_from save_code replicate_path "
            "background background_max_queue_size background_finish_timeout service_teardown_timeout"),
    *_below("trainer.profiler", "enabled start_step num_steps perfetto_link create_perfetto_trace process_index"),
    *_below("trainer.profiler.profile_options", "host_tracer_level python_tracer_level device_tracer_level "
            "enable_hlo_proto include_dataset_ops"),
)  # fmt: skip
"""Logs, evaluations, profiles, guards."""

_WHEN_IT_IS_SAVED = (
    *_below("trainer.checkpointer", "temporary_base_path save_interval keep delete_old_temp_checkpoints "
            "keep_last_temporary_checkpoints"),
    *_below("trainer.checkpointer.debug", "enabled log_interval dump_stacks_after tracemalloc_frames top_allocations "
            "force_gc_before_serialize flush_logs"),
    *_below("trainer.checkpointer.write", "max_write_replicas min_replica_slice_bytes max_chunk_bytes "
            "max_staged_host_bytes cache_pool_bytes data_copy_concurrency"),
)  # fmt: skip

_DOES_NOTHING = (
    *(key for key, _, _ in NO_EFFECT),
    *_below("model", "reference_checkpoint tokenizer"),
    *(f"model.{name}" for name in REMOVED_MODEL_KEYS),
)
"""What earlier versions took and never read."""

FREE_KEYS = frozenset(
    _NAMES_AND_PLACES
    + _WHERE_AND_HOW_FAST
    + _HOW_THE_SAME_IS_COMPUTED
    + _WHAT_WATCHES
    + _WHEN_IT_IS_SAVED
    + _DOES_NOTHING
)
"""Each in full: a key below one of them is fixed."""

FREE_MAPPINGS = (
    "trainer.mesh.axes",
    "trainer.mesh.dcn_axes",
    "trainer.mesh.shared_mapping",
    "trainer.mesh.compute_mapping",
    "trainer.profiler.profile_options.advanced_configuration",
    "model.gradient_checkpointing",
)
"""Keys whose value is a mapping that the user names the entries of, or one value that may be written as one."""
