"""Checks that all hosts of a run were started alike, before they compute anything together; if not, all of them end.

Hosts with different seeds or learning rates would train together without a word, to a result that nobody asked for.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
from levanter.utils.jax_utils import multihost_allgather_sync

from tomat.base.documents import flatten
from tomat.base.errors import TomatError
from tomat.base.reporting import counted, first_line
from tomat.base.shipped import code_details, source_hash
from tomat.train.settings.config import TrainConfig
from tomat.train.settings.meanings import said_of

PACKAGES = ("jax", "jaxlib", "libtpu", "marin-levanter", "marin-haliax", "equinox", "optax", "tensorstore", "tomat")
"""The packages that compute a step and read its data."""

FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

LEFT_OUT = {
    "jax_compilation_cache_dir": "a place on the host's disk; programs are named by their content",
    "jax_dump_ir_to": "a place on the host's disk, which is only written",
    "jax_cross_host_transfer_socket_address": "the host's own address",
    "jax_cross_host_transport_addresses": "the host's own addresses",
    "jax_cuda_visible_devices": "says which devices of a machine are this process's",
    "jax_oneapi_visible_devices": "as for jax_cuda_visible_devices",
    "jax_rocm_visible_devices": "as for jax_cuda_visible_devices",
    "--xla_dump_to": "a place on the host's disk, which is only written",
    "--xla_gpu_cuda_data_dir": "where the host has its copy of CUDA",
}
"""What hosts may differ in, and why."""

LONGEST_VALUE, MOST_NAMED = 70, 8
"""Most characters of a value that is not hashed; most differences, or hosts, that an error names."""
NO_LIMIT_SECONDS = 86_400.0
"""Stands for a limit of 0, which means none."""


def gathered[T](mine: T, seconds: float = NO_LIMIT_SECONDS) -> list[T]:
    """Every host's value, on all hosts. Each host must call it, with a value that JSON has."""
    every = multihost_allgather_sync(mine, timeout=seconds)
    # No host leaves before all have read the values, least of all the one whose service holds them.
    multihost_allgather_sync(None, timeout=seconds)
    return every


def refuse_differences(config: TrainConfig, mine: Mapping[str, object]) -> None:
    """Stop all hosts unless each has the same values. Each must call it."""
    if jax.process_count() == 1:
        return
    seconds = config.guards.startup_hang_seconds or NO_LIMIT_SECONDS
    said = [platform.node(), {key: shortened(value) for key, value in mine.items()}]
    try:
        every = gathered(said, seconds)
    except RuntimeError as error:
        said = f"host {jax.process_index()} of {jax.process_count()} cannot compare its start with the others'"
        remedy = "See how they ended; set trainer.distributed.initialize_jax_distributed to true."
        raise TomatError(f"{said} ({first_line(error)}). {remedy}") from None
    found = differences([name for name, _ in every], [values for _, values in every])
    if found:
        shown = "; ".join(found[:MOST_NAMED])
        if (more := len(found) - MOST_NAMED) > 0:
            shown += f"; and {counted(more, 'more difference')}"
        remedy = "Start all of them with the same command, code and packages."
        raise TomatError(f"the hosts were not started alike: {shown}. {remedy}")


def started_with(config: TrainConfig, beside: Mapping[str, object]) -> dict[str, object]:
    """What decides what this host computes, by key: configuration, command, code, flags, JAX's options, packages."""
    found = {key: value for key, value in flatten(config.to_dict()).items() if not said_of(key).host} | dict(beside)
    # Without its `-dirty`, which a page that a run has written causes. Changes are in the hash of the files.
    code = code_details()
    found |= {"code.commit": code["commit"].removesuffix("-dirty"), "code.files": source_hash()}
    found |= {"code.pack": code.get("pack", "none")}
    for variable in FLAG_VARIABLES:
        for flag in os.environ.get(variable, "").split():
            name, _, value = flag.partition("=")
            if name not in LEFT_OUT:
                found[f"{variable} {name}"] = value or "set"  # XLA takes the last of a flag given twice
    found |= {f"jax.config.{key}": str(value) for key, value in jax.config.values.items() if key not in LEFT_OUT}
    for package in PACKAGES:
        found[f"package {package}"] = "not installed"
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[f"package {package}"] = importlib.metadata.version(package)
    return found


def differences(hosts: Sequence[str], prints: Sequence[Mapping[str, str]]) -> list[str]:
    """What is not the same on all hosts, a phrase for each key."""

    def named(numbers: Sequence[int]) -> str:
        if len(numbers) > MOST_NAMED:
            return f"{len(numbers)} others"
        return ", ".join(f"host {number} ({hosts[number]})" for number in numbers)

    found = []
    for key in sorted(set().union(*prints)):
        by_value: dict[str, list[int]] = defaultdict(list)
        for number, values in enumerate(prints):
            by_value[values.get(key, "not set")].append(number)
        if len(by_value) > 1:
            # The odd ones out first.
            groups = sorted(by_value.items(), key=lambda group: (len(group[1]), group[1]))
            found.append(f"{key} is {' and '.join(f'{value} on {named(numbers)}' for value, numbers in groups)}")
    return found


def shortened(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[: LONGEST_VALUE // 2]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"
