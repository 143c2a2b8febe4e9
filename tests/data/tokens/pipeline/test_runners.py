"""Units on the cores of this machine, through Zephyr on its threads, and as jobs of a real Iris cluster on it."""

import importlib
import os
import random
import subprocess
import sys
import time

import psutil
import pytest
from retokenize_kills import run_with_kills
from retokenized import files
from tiny_run import tomat

from tomat.base.errors import TomatError
from tomat.data.tokens.pipeline.driver import retokenize
from tomat.data.tokens.pipeline.runners import PoolRunner, ZephyrRunner

# Workers import the functions they run; a program of its own is what they can import from.
PROGRAM = """
import os
import signal
import sys
from functools import partial
from pathlib import Path
from tomat.app.cli import errors_told
from tomat.base.errors import TomatError
from tomat.data.tokens.pipeline.runners import PoolRunner

def touch(folder, unit):
    (folder / str(unit)).touch()
    return 1

def kill_once(folder, unit):
    # The first call ends its process, as the kernel does when memory is short.
    try:
        (folder / "killed").touch(exist_ok=False)
    except FileExistsError:
        return touch(folder, unit)
    os.kill(os.getpid(), signal.SIGKILL)

def kill_always(folder, unit):
    os.kill(os.getpid(), signal.SIGKILL)

def refuse(folder, unit):
    raise TomatError(f"unit {unit} cannot be")

def main():
    done = []
    PoolRunner(2).run(partial(globals()[sys.argv[2]], Path(sys.argv[1])), range(4), done.append)
    print(sum(done))
    return 0

if __name__ == "__main__":
    with errors_told() as outcome:
        outcome.status = main()
    sys.exit(outcome.status)
"""

KILLED_AT_THE_END = """
import os
import signal
import sys
import threading
import time
from pathlib import Path
import psutil
from tomat.data.tokens.pipeline.runners import PoolRunner

FOLDER = Path(sys.argv[1])

def say_who_has_the_lock():
    # Of the workers that wait for a unit, one reads from the queue's pipe, and the others wait for its lock.
    while True:
        frame, names = sys._current_frames()[threading.main_thread().ident], set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        mine = FOLDER / str(os.getpid())
        mine.touch() if "_recv" in names else mine.unlink(missing_ok=True)
        time.sleep(0.02)

def work(unit):
    if threading.active_count() < 3:
        threading.Thread(target=say_who_has_the_lock, daemon=True).start()
    time.sleep(0.3)
    return os.getpid()

def main():
    pids = []

    def on_done(pid):
        pids.append(pid)
        if len(pids) < 8:
            return
        time.sleep(0.5)
        [holder] = [int(path.name) for path in FOLDER.iterdir()]
        [other] = set(pids) - {holder}
        for worker in (holder, other):
            os.kill(worker, signal.SIGSTOP)
            # On a busy machine a worker goes on until one of its threads has had its turn, and could end by itself.
            while psutil.Process(worker).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)

        def kill_once_the_pool_ends():
            time.sleep(1.0)
            os.kill(holder, signal.SIGKILL)
            os.kill(other, signal.SIGCONT)

        threading.Thread(target=kill_once_the_pool_ends).start()

    PoolRunner(2).run(work, range(8), on_done)
    print("ended")

if __name__ == "__main__":
    main()
"""


def run(tmp_path, function):
    folder = tmp_path / "units"
    folder.mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", folder, function]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done, {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_units_of_a_killed_worker_are_done_by_another(tmp_path):
    done, made = run(tmp_path, "kill_once")
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
    assert made == {"0", "1", "2", "3", "killed"}


@pytest.mark.slow
def test_workers_that_always_die_are_one_error(tmp_path):
    done, _ = run(tmp_path, "kill_always")
    assert done.returncode == 2
    assert "error: Workers died 3 times in a row and finished nothing, 4 units left" in done.stderr


def test_a_worker_that_is_killed_as_the_pool_ends_holds_nobody_up(tmp_path):
    (tmp_path / "program.py").write_text(KILLED_AT_THE_END)
    (tmp_path / "waiting").mkdir()
    command = [sys.executable, tmp_path / "program.py", tmp_path / "waiting"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_refusal_of_a_unit_ends_the_run(tmp_path):
    done, _ = run(tmp_path, "refuse")
    assert done.returncode == 2 and "error: unit " in done.stderr and "Traceback" not in done.stderr


def test_workers_end_with_their_driver(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        "import time\nfrom tomat.data.tokens.pipeline.runners import PoolRunner\n"
        "def wait(unit):\n    time.sleep(120)\n    return 1\n"
        "if __name__ == '__main__':\n    PoolRunner(2).run(wait, range(4), print)\n"
    )
    with subprocess.Popen([sys.executable, script]) as driver:
        workers, end = [], time.monotonic() + 60
        while len(workers) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
            # multiprocessing's resource tracker is another child.
            workers = [each for each in psutil.Process(driver.pid).children() if "spawn_main" in str(each.cmdline())]
        driver.kill()
    assert not psutil.wait_procs(workers, timeout=60)[1]


@pytest.mark.slow
def test_killed_twice_it_ends_with_the_same_bytes(tmp_path, tree, kept_set):
    def command(output):
        words = ["--input", tree, "--output", output, "--filelist", "mp_filelist.txt", "--layout", "v3-p7"]
        words += ["--split_file", "split_limit_22M.json", "--bins", "200", "--patches_per_material", "20"]
        words += ["--block_rows", "8", "--workers", "2"]
        return tomat("retokenize", *words)

    began = time.monotonic()
    subprocess.run(command(tmp_path / "timed"), check=True, stdout=subprocess.DEVNULL)
    horizon_seconds = time.monotonic() - began
    # A moment drawn for a kill can lie behind the end of a start; on a machine whose speed varies all may.
    for attempt in range(5):
        output = tmp_path / f"killed{attempt}"
        found = run_with_kills(command(output), random.Random(attempt), horizon_seconds, kills=2)
        assert files(output) == files(kept_set)
        if found["driver"] + found["worker"]:
            return
    raise AssertionError("no kill hit")


def local_cluster_missing():
    """Why Iris cannot run a cluster here; empty if it can."""
    try:
        importlib.import_module("iris.cluster.local_cluster")
    except ImportError as error:
        return f"Iris's controller is not installed (marin-iris[controller] with its finelog): {error}"
    return ""


# A process of its own: Iris and Zephyr leave threads, and Iris writes its credentials into the home folder.
ON_IRIS = """
import sys
from pathlib import Path
from fray.current_client import set_current_client
from fray.iris_backend import FrayIrisClient
from iris.cluster.local_cluster import LocalCluster, make_local_cluster_config
from tomat.app.cli import main

if __name__ == "__main__":
    cluster = LocalCluster(make_local_cluster_config(2))
    url = cluster.start()
    try:
        with set_current_client(FrayIrisClient(url, workspace=Path(sys.argv[1]))):
            status = main(["retokenize", *sys.argv[2:], "--runner", "zephyr", "--workers", "2"])
    finally:
        cluster.close()
    sys.exit(status)
"""


@pytest.mark.slow
def test_on_threads_the_bytes_are_those_of_a_pool(tmp_path, retokenize_config, kept_set):
    runner = ZephyrRunner(str(tmp_path / "messages"), workers=2)
    retokenize(retokenize_config(tmp_path / "zephyr"), runner)
    assert files(tmp_path / "zephyr") == files(kept_set)
    assert not (tmp_path / "messages").exists()


@pytest.mark.slow
def test_refusal_of_a_unit_reaches_the_user(tmp_path, retokenize_config):
    runner = ZephyrRunner(str(tmp_path / "messages"), workers=2)
    with pytest.raises(TomatError, match="materials would be skipped"):
        retokenize(retokenize_config(tmp_path / "set", valences={"Si": 5}), runner)


@pytest.mark.slow
@pytest.mark.skipif(bool(local_cluster_missing()), reason=local_cluster_missing())
def test_on_iris_the_bytes_are_those_of_a_pool(tmp_path, tree, retokenize_config):
    config = {"split_file": None, "filelist": None, "patches_per_material": 20, "block_rows": 60}
    retokenize(retokenize_config(tmp_path / "pool", **config), PoolRunner(1))
    (tmp_path / "workspace").mkdir()
    words = ["--input", str(tree), "--output", str(tmp_path / "iris"), "--layout", "v3-p7", "--bins", "200"]
    words += ["--patches_per_material", "20", "--block_rows", "60"]
    script = tmp_path / "on_iris.py"
    script.write_text(ON_IRIS)
    done = subprocess.run(
        [sys.executable, script, str(tmp_path / "workspace"), *words],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert files(tmp_path / "iris") == files(tmp_path / "pool")
