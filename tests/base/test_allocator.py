"""What is freed stays with a process that was told to keep it: page faults are counted, in processes of their own."""

import platform
import subprocess
import sys

import pytest

from tomat.base.allocator import keep_freed_memory
from tomat.base.errors import TomatError

FAULTS = """
import ctypes, resource, sys
from tomat.base.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 96 * 2**20  # above what glibc ever takes from its heap by itself, 32 MiB

def step():
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    """Page faults of four times 96 MiB."""
    return int(subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_what_is_freed_is_not_asked_for_again():
    assert faults("kept") < 100  # pages of 4 KiB would be 98,304
    assert faults("as it is") > 100  # huge pages of 2 MiB are 192


def test_another_c_library_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(TomatError, match="the C library is unknown; only glibc can be told so"):
        keep_freed_memory()
