"""What is freed stays with a process that was told to keep it: its page faults are counted, in processes of their own."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tomat.base.allocator import asks
from tomat.base.errors import TomatError

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")

FAULTS = """
import ctypes, resource, sys, threading
import tomat.base.allocator as allocator
if sys.argv[1] == "kept":
    allocator.keep_freed_memory()
print(allocator.why_not_kept())
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 96 * 2**20  # above what glibc ever takes from a heap of itself (32 MiB), or of a thread (64 MiB)

def step():
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)

def many(before):
    for _ in range(4):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = []
def measure():
    step()
    found.append(many(resource.getrusage(resource.RUSAGE_SELF).ru_minflt))
measure()
thread = threading.Thread(target=measure)
thread.start()
thread.join()
print(*found)
"""


def faults(mode: str) -> tuple[str, list[int]]:
    """Why nothing is kept, and page faults of four times 96 MiB: in the first thread, and in another."""
    done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
    why, found = done.stdout.splitlines()
    return why, [int(count) for count in found.split()]


def test_nothing_that_is_freed_is_asked_for_again():
    why, counts = faults("kept")
    assert why == ""
    assert max(counts) < 100  # four times 24,576 pages of 4 KiB

    why, counts = faults("as it is")
    assert "before it imported JAX" in why
    assert min(counts) > 100  # huge pages of 2 MiB are 192


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("keep_freed_memory: true", [], True),
        ("keep_freed_memory: true", ["--keep_freed_memory", "false"], False),
        ("run_name: a", ["--keep_freed_memory", "true"], True),
        ("run_name: a", [], False),
        ("keep_freed_memory: 7", [], False),
    ],
)
def test_a_configuration_is_asked_before_jax_is_there(tmp_path: Path, text, words, expected):
    config = tmp_path / "a.yaml"
    config.write_text(text)
    assert asks(config, words) is expected


def test_a_configuration_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(TomatError, match="does not exist"):
        asks(tmp_path / "none.yaml")


def test_the_verbs_tell_the_allocator_before_jax(tmp_path: Path):
    """A run that says why nothing is kept was not told in time."""
    program = (
        "import sys\n"
        "from tomat.app.cli import main\n"
        "import tomat.base.allocator as allocator\n"
        "keep = allocator.keep_freed_memory\n"
        "def told():\n"
        "    assert 'jax' not in sys.modules\n"
        "    keep(); print('told', repr(allocator.why_not_kept())); raise SystemExit(0)\n"
        "allocator.keep_freed_memory = told\n"
        f"main(['train', '--keep_freed_memory', 'true', '--output_dir', {str(tmp_path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "told ''" in done.stdout, done.stderr
