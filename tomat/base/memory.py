"""The most memory that this process has held."""

from pathlib import Path

from tomat.base.errors import TomatError


def peak_memory_bytes() -> int:
    """Resident memory of this process at its highest, since its program was started or it was forked.

    `VmHWM` of /proc (proc_pid_status(5)). `ru_maxrss` of getrusage is another figure: exec keeps it, so that a small
    process which a test of 2.036 GB had started reported 2.036 GB (setmaxrss_mm in Linux's kernel/exit.c and
    fs/exec.c).

    Raises:
        TomatError: On a system without /proc.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        raise TomatError("The memory of a process is read from /proc/self/status, which only Linux has.") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
