"""Entry point of the `tomat` command. From here on, a Ctrl-C ends the command with a single line."""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from tomat.base.layout import INTERRUPTED_STATUS

_LOOK_AGAIN_SECONDS = 0.01
_waits = False
"""Whether a Ctrl-C is waiting for the end of an import."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """After a Ctrl-C inside this context, the command ends with one line and the status of an interruption."""
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook

    def dropped(unraisable: "sys.UnraisableHookArgs") -> None:
        """Repeat a Ctrl-C that came where Python drops exceptions, such as in a callback of the garbage collector."""
        if unraisable.exc_type is KeyboardInterrupt:
            signal.signal(signal.SIGALRM, _interrupt)
            signal.setitimer(signal.ITIMER_REAL, _LOOK_AGAIN_SECONDS)
        else:
            hook(unraisable)

    # A shell starts background commands with Ctrl-C ignored, which stays so.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = dropped
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(_stopped())
    finally:
        # An alarm while the interpreter ends would change its exit status.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb with `tomat.app.cli.main`. That module is imported inside, where a Ctrl-C is handled already."""
    with interruptible():
        return importlib.import_module("tomat.app.cli").main(argv)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, during an import only after it: inside, it left jaxlib half imported and the process
    ended with `munmap_chunk(): invalid pointer` and SIGABRT. A second Ctrl-C does not wait."""
    global _waits
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    if frame is None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise KeyboardInterrupt
    if number == signal.SIGINT:
        if _waits:
            os._exit(_stopped())
        _waits = True
        signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_AGAIN_SECONDS)


def _stopped() -> int:
    print("stopped by the user", file=sys.stderr, flush=True)
    return INTERRUPTED_STATUS


if __name__ == "__main__":
    sys.exit(main())
