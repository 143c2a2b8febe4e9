"""The C library's allocator, told to keep what is freed.

The CPU client of jaxlib 0.11.1 takes the buffers of each step from `malloc` anew, and glibc gives large ones, and the
heaps of threads, back to the kernel: 9,500 page faults a step of a decoder of 4 layers on 2 sequences of 512 tokens, and
none with these settings. There is no way to give JAX's CPU client another allocator.
"""

import ctypes
import platform
from collections.abc import Sequence
from pathlib import Path

from tomat.base.overrides import parse_overrides, read_yaml

SETTING = "keep_freed_memory"
"""The key of a configuration that asks for it."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""Parameters of `mallopt`, as glibc's malloc.h numbers them."""
_NEVER = 2**31 - 1

_why_not = f"this process was not told to before it imported JAX: call tomat.base.allocator.{SETTING}() first"


def asks(config_path: str | Path, overrides: Sequence[str] = ()) -> bool:
    """Whether a training configuration asks for it, known without JAX; a value that is none is refused later.

    Raises:
        TomatError: As for `read_yaml` and `parse_overrides`.
    """
    values = read_yaml(config_path, "train") | parse_overrides(overrides)
    return values.get(SETTING) is True


def keep_freed_memory() -> None:
    """Keep for this process, from now on, what it frees. Does nothing where the C library is not glibc.

    To be called before JAX is imported: a thread that has a heap of its own by then gives that back as before.
    """
    global _why_not
    if platform.libc_ver()[0] != "glibc":
        _why_not = "the C library is not glibc"
        return
    mallopt = ctypes.CDLL(None).mallopt
    # No block of memory of its own for a large buffer, no end of the heap given back, one heap for all threads.
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1))
    refused = [parameter for parameter, value in settings if mallopt(parameter, value) != 1]
    _why_not = f"mallopt refused parameter {refused[0]}" if refused else ""


def why_not_kept() -> str:
    """Why this process does not keep what it frees; empty: it does."""
    return _why_not
