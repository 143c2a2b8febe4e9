"""The peak is what a process held; what is freed stays with one that was told to keep it: page faults are counted."""

import platform
import subprocess
import sys

import pytest

from tomat.base.errors import TomatError
from tomat.base.memory import keep_freed_memory

HELD = 300 * 2**20
PEAK = """
import subprocess, sys
from tomat.base.memory import peak_memory_bytes
if sys.argv[1:]:
    held = bytearray(int(sys.argv[1]))
    del held
    subprocess.run([sys.executable, "-c", CODE], check=True)
print(peak_memory_bytes())
"""
PEAK = f"CODE = {PEAK!r}{PEAK}"


def test_the_peak_is_what_was_held_though_it_was_given_back():
    """And not what its parent held, as `ru_maxrss` is."""
    words = [sys.executable, "-c", PEAK, str(HELD)]
    child, peak = map(int, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())
    assert HELD < peak < HELD + 2 * child < 2 * HELD


FAULTS = """
import resource, sys
from tomat.base.memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()

def step():
    return len(b"x" * (96 * 2**20))  # above what glibc ever takes from its heap by itself, 32 MiB

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_freed_is_not_asked_for_again(kept):
    """Four times 96 MiB: pages of 4 KiB would be 98,304 faults, huge ones of 2 MiB 192."""
    words = [sys.executable, "-c", FAULTS, "kept" if kept else ""]
    assert (int(subprocess.run(words, capture_output=True, text=True, check=True).stdout) < 100) == kept


def test_another_c_library_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(TomatError, match="the C library is unknown; only glibc has this setting"):
        keep_freed_memory()
