"""Units on the cores of this machine, through Zephyr on its threads, and as jobs of a real Iris cluster on it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import psutil
import pytest
from retokenized import files
from tiny_run import tomat

from tomat.base.errors import RetryableError, TomatError
from tomat.data.tokens.pipeline.driver import retokenize
from tomat.data.tokens.pipeline.runners import PoolRunner, ZephyrRunner, _end_with_driver, _raise_refusals, _run_one

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


def start(tmp_path, program, *words):
    home = tmp_path / "home"
    home.mkdir()
    (home / "program.py").write_text(program)
    environment = {**os.environ, "HOME": str(home)}
    command = [sys.executable, "program.py", *words]
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=600)


def run(tmp_path, function):
    folder = tmp_path / "units"
    folder.mkdir()
    return start(tmp_path, PROGRAM, folder, function), {path.name for path in folder.iterdir()}


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


def test_a_worker_ends_by_itself_once_the_driver_has_all():
    """Else one that waits for the lock of another that was killed would hold up the pool for ever (CPython 3.12)."""
    context = multiprocessing.get_context("spawn")
    driver_is_done, done = context.Pipe(duplex=False)
    with (
        driver_is_done,
        ProcessPoolExecutor(1, context, initializer=_end_with_driver, initargs=(driver_is_done,)) as pool,
    ):
        pool.submit(abs, 1).result(timeout=60)
        waiting = pool.submit(time.sleep, 120)
        done.close()
        with pytest.raises(BrokenProcessPool):
            waiting.result(timeout=60)


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


@pytest.mark.parametrize(("errors", "kind"), [((1, 1), RetryableError), ((1, 0), TomatError)])
def test_an_outage_of_a_unit_stays_one_that_is_tried_again(errors, kind):
    def refuse(outage):
        raise (RetryableError if outage else TomatError)("no answer")

    with pytest.raises(TomatError, match=r"no answer \(1 more unit failed\)") as raised:
        _raise_refusals([{"items": 3}, *(_run_one(refuse, each) for each in errors)])
    assert type(raised.value) is kind


WORDS = ["--filelist", "mp_filelist.txt", "--split_file", "split_limit_22M.json", "--layout", "v3-p7", "--bins", "200"]
WORDS += ["--patches_per_material", "20", "--workers", "1"]
"""What asks for the kept set, but for its rows a block."""

# Iris and Zephyr leave threads, and Iris writes its credentials into the home folder.
ON_IRIS = """
import sys
from pathlib import Path
from fray.current_client import set_current_client
from fray.iris_backend import FrayIrisClient
from iris.cluster.local_cluster import LocalCluster, make_local_cluster_config
from tomat.app.cli import main

if __name__ == "__main__":
    cluster = LocalCluster(make_local_cluster_config(1))
    try:
        with set_current_client(FrayIrisClient(cluster.start(), workspace=Path.cwd())):
            status = main([*sys.argv[1:], "--runner", "zephyr"])
    finally:
        cluster.close()
    sys.exit(status)
"""

KILLED = """
import os, signal, sys
from tomat.app.cli import main
from tomat.data.tokens.writer import ChunkWriter

write = ChunkWriter.write

def write_and_die(self, chunk, rows):
    write(self, chunk, rows)
    if chunk == 6:
        os.kill(os.getpid(), signal.SIGKILL)

ChunkWriter.write = write_and_die
main(sys.argv[1:])
"""


def retokenized(program, tmp_path, tree, block_rows=8):
    words = ("retokenize", "--input", tree, "--output", tmp_path / "set", *WORDS, "--block_rows", str(block_rows))
    return start(tmp_path, program, *words)


@pytest.mark.slow
def test_on_iris_the_bytes_are_those_of_a_pool(tmp_path, tree, retokenize_config):
    pytest.importorskip("iris.cluster.local_cluster", reason="marin-iris[controller] with its finelog is not installed")
    # Two chunks: each is a job with a process of its own, which imports for seconds.
    done = retokenized(ON_IRIS, tmp_path, tree, block_rows=64)
    assert done.returncode == 0, done.stdout + done.stderr
    retokenize(retokenize_config(tmp_path / "pool", block_rows=64), PoolRunner(1))
    assert files(tmp_path / "set") == files(tmp_path / "pool")


def test_killed_with_chunks_under_way_it_ends_with_the_same_bytes(tmp_path, tree, kept_set, retokenize_config):
    assert retokenized(KILLED, tmp_path, tree).returncode == -signal.SIGKILL
    assert len(list((tmp_path / "set" / "progress").iterdir())) < 7
    written = retokenize(retokenize_config(tmp_path / "set"), PoolRunner(1))
    assert written.rows_written < 100 and files(tmp_path / "set") == files(kept_set)


# A file system of a megabyte, in a namespace of its own: mounting needs no privilege there.
ON_A_SMALL_DISK = """
set -e
mount -t tmpfs -o size=$1 tmpfs "$2"
shift 2
status=0
"$@" || status=$?
mount -o remount,size=20m "$DISK"
"$@"
"$PYTHON" -m tomat.app.cli shards verify "$DISK/set"
exit $status
"""


def namespaces_allowed():
    try:
        return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not namespaces_allowed(), reason="no user namespaces: a small disk cannot be mounted")
def test_full_disk_leaves_a_set_that_can_be_finished(tmp_path, tree):
    """One error, and the set goes on once there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    words = tomat("retokenize", "--input", tree, "--output", disk / "set")
    words += ["--layout", "v3-p7", "--bins", "200", "--patches_per_material", "100", "--workers", "1"]
    variables = [f"DISK={disk}", f"PYTHON={sys.executable}"]
    start = ["unshare", "-rm", "env", *variables, "bash", "-c", ON_A_SMALL_DISK, "bash", "60k"]
    done = subprocess.run([*start, disk, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "No space left on device" in done.stderr and "error: Cannot" in done.stderr
    assert "Traceback" not in done.stderr and "chunks (600 rows) are whole" in done.stdout
