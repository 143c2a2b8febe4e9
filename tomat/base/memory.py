"""Memory of this process: the most that it has held, and an allocator told to keep what is freed."""

import ctypes
import platform
from pathlib import Path

from tomat.base.errors import TomatError

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of `mallopt`, as glibc's malloc.h numbers them."""
_NEVER = 2**31 - 1


def peak_memory_bytes() -> int:
    """Resident memory of this process at its highest, since its program was started or it was forked.

    `VmHWM` of /proc (proc_pid_status(5)). `ru_maxrss` of getrusage differs: exec keeps it, so that a small process that
    a test of 2.036 GB had started reported 2.036 GB (setmaxrss_mm in Linux's kernel/exit.c, fs/exec.c).
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        raise TomatError("The memory of a process is read from /proc/self/status, which only Linux has.") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def keep_freed_memory() -> None:
    """From now on, keep the memory that this process frees.

    The CPU client of jaxlib 0.11.1 takes the buffers of each step from `malloc` anew, and glibc gives large ones back
    to the kernel. A step of a decoder of 4 layers of 128 on 2 sequences of 512 tokens had 8,400 page faults, and took
    98 to 103 ms; with this it had none, and took 90 to 97. Memory of a thread beyond a heap of 64 MiB is still given
    back: the demo's step kept its 30,000 faults. One heap for all threads (M_ARENA_MAX) would keep that too, but made
    the step of a process that had compiled it 20 % slower.
    """
    asked, library = "keep_freed_memory is true, and", platform.libc_ver()[0] or "unknown"
    if library != "glibc":
        raise TomatError(f"{asked} the C library is {library}; only glibc has this setting: leave it out.")
    mallopt = ctypes.CDLL(None).mallopt
    # Large buffers get no mapping of their own, and the end of the heap is not given back.
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER)):
        if mallopt(parameter, value) != 1:
            raise TomatError(f"{asked} mallopt({parameter}, {value}) was refused; leave it out.")
