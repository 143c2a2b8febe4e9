"""The largest batch that fits into the memory there is, found by compiling."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import psutil

from tomat.base.errors import TomatError

SHARE = 0.9
"""Of what is free that a program may take: fragmentation, and on CPUs other processes."""


class Program(Protocol):
    """What `equinox.filter_jit(...).lower(...)` gives."""

    def compile(self) -> Any: ...


def free_bytes() -> int:
    """Memory that is free on the fullest device here; of CPU devices, each its part of the machine's."""
    devices = jax.local_devices()
    stats = [device.memory_stats() for device in devices]
    if devices[0].platform == "cpu" or not all(stats):
        return psutil.virtual_memory().available // len(devices)
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats if each)


def largest_batch(lower: Callable[[int], Program], most: int, least: int, free: int) -> tuple[int, Callable, int]:
    """Halve a batch until its program fits.

    Args:
        lower: Makes the program of a batch of so many sequences.
        most: Sequences to begin with, `least` times a power of two.
        least: Sequences that cannot be fewer, such as one a device.
        free: Bytes there are on a device.

    Returns:
        Sequences, the compiled program, and the bytes that it takes on a device beside what is there already.

    Raises:
        TomatError: `least` do not fit either.
    """
    size = most
    while True:
        compiled = lower(size).compile()
        memory = compiled.compiled.memory_analysis()
        if memory is None:
            raise TomatError(f"JAX's {jax.default_backend()} backend does not say what memory a program takes.")
        needed = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        if needed <= SHARE * free:
            return size, compiled, needed
        if size <= least:
            raise TomatError(
                f"decoding {size} patches at a time takes {needed / 2**30:.2f} GiB a device, and of the "
                f"{free / 2**30:.2f} GiB that are free tomat takes {SHARE:.0%}. Free memory, or use more devices."
            )
        size //= 2
