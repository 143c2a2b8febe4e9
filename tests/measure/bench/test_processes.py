"""What becomes of a process that a benchmark or the lab has started when the one that started it is stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path(sys.argv[1], "saved").write_text("")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], "began").write_text("")
time.sleep(60)
"""
PARENT = f"""
import pathlib, sys, types
from tomat.measure.lab import quality_runs as runs
from tomat.measure.lab.run import alone_in
folder = sys.argv[1]
runs.tomat_command = lambda *words: [sys.executable, "-c", {CHILD!r}, folder]
with alone_in(pathlib.Path(folder)) as lock:
    runs.train_run(types.SimpleNamespace(name="one", words=()), pathlib.Path(folder), lock)
"""


def test_sigterm_stops_the_run_that_was_started_and_lets_it_save(tmp_path: Path):
    """As `tomat lab quality` and `profiling/numerics.py` start theirs, with another program in the run's place."""
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)]) as parent:
        while not (tmp_path / "began").exists():
            assert parent.poll() is None
            time.sleep(0.02)
        os.kill(parent.pid, signal.SIGTERM)
        assert parent.wait() == 143
    assert (tmp_path / "saved").exists()
