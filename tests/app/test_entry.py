"""A Ctrl-C at any time of a command's life ends it with one line."""

import signal
import subprocess
import sys

import pytest

from tomat.app.entry import main
from tomat.base.layout import INTERRUPTED_STATUS

AT_IMPORT = """
import builtins, os, signal, sys
from tomat.app.entry import main

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            for _ in range({times}):
                os.kill(os.getpid(), signal.SIGINT)
        return None

sys.meta_path.insert(0, Interrupt())
sys.exit(main({words!r}))
"""
TRAIN, TIME = ["train", "--trainer.num_train_steps", "1", "--output_dir"], ["bench", "chip", "--output"]


@pytest.mark.parametrize(
    ("module", "times", "words"),
    [("tomat.app.cli", 1, TRAIN), ("tomat.app.train_verbs", 2, TRAIN), ("jaxlib", 1, TIME)],
)
def test_ctrl_c_during_an_import_is_one_line(module, times, words, tmp_path):
    code = AT_IMPORT.format(module=module, times=times, words=[*words, str(tmp_path / "made")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == INTERRUPTED_STATUS
    assert done.stderr.splitlines() == ["stopped by the user"]


def test_a_ctrl_c_that_waits_when_the_command_is_over_does_not_end_the_interpreter():
    """`tomat --help` that was stopped in its last import ended with SIGALRM while Python tidied up."""
    code = AT_IMPORT.format(module="tomat.base.shipped", times=1, words=["--version"])
    code = code.replace("sys.exit(main", "import atexit, time; atexit.register(time.sleep, 0.05); sys.exit(main")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode in (0, INTERRUPTED_STATUS), done


def test_ctrl_c_where_python_drops_exceptions_is_one_line():
    """Once it came in a callback of the garbage collector, and the run trained to its end."""
    code = """
import signal, sys, time
from tomat.app.entry import interruptible

class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)

with interruptible():
    Dying()
    time.sleep(30)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()) == (INTERRUPTED_STATUS, ["stopped by the user"])
    # The handler goes with the command.
    before = signal.getsignal(signal.SIGINT)
    assert main(["nothing"]) == 2 and signal.getsignal(signal.SIGINT) is before
