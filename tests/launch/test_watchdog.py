"""The start-up script of the hosts, run as it is: it gives the slice back, and nothing before its time."""

import os
import signal
import subprocess
import time

import pytest

from tomat.launch.remote import watchdog_script

FAR = 3600.0


@pytest.fixture
def host(tmp_path):
    """A home with a launch's folder, and a way to run the script for it."""
    folder = tmp_path / "home" / "tomat-launch"
    folder.mkdir(parents=True)
    (folder / "alive").touch()
    training = None

    def run(seconds: float = 8.0, *, trains: bool = True, ended: bool = False, alive: float = 0.0, **settings):
        nonlocal training
        values = {"cap_seconds": None, "unwatched_seconds": FAR, "grace_seconds": 3, "poll_seconds": 0.1}
        script = watchdog_script(["touch", str(tmp_path / "given back")], **{**values, **settings})
        script = script.replace("/home/*/", f"{tmp_path}/home/").replace("/var/lib/", f"{tmp_path}/")
        if trains or ended:
            program = "trap 'echo saved > saved; exit 143' TERM; touch up; while true; do sleep 0.05; done"
            command = f"exec 9>lock; flock -n 9; {'true' if ended else program}"
            training = subprocess.Popen(["bash", "-c", command], cwd=folder, start_new_session=True)
            (folder / "pid").write_text(str(training.pid))
            while not (folder / ("lock" if ended else "up")).exists():
                time.sleep(0.01)
            if ended:
                training.wait()
        os.utime(folder / "alive", (time.time() - alive,) * 2)
        began = time.time() - alive - 1
        script = script.replace("begun=$(date +%s)\nwhile", f"begun={began:.0f}\nwhile")
        watching = subprocess.Popen(["bash", "-c", script], start_new_session=True, stdout=subprocess.DEVNULL)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (tmp_path / "given back").exists():
            time.sleep(0.02)
        os.killpg(watching.pid, signal.SIGKILL)
        watching.wait()
        return (tmp_path / "given back").exists(), (folder / "saved").exists()

    yield run
    if training is not None and training.poll() is None:
        os.killpg(training.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("settings", "given_back"),
    [
        ({"cap_seconds": 1.0}, True),
        ({"cap_seconds": 1.0, "unwatched_seconds": None}, True),  # --keep keeps nothing beyond the cap
        ({"alive": 100.0, "unwatched_seconds": 90.0}, True),
        ({"alive": 100.0, "unwatched_seconds": None}, False),
        ({"alive": 100.0}, False),
        ({"alive": 100.0, "ended": True, "trains": False, "ended_seconds": 90.0}, True),
        ({"alive": 100.0, "trains": False, "ended_seconds": 90.0}, False),  # still installing
        ({"ended": True, "trains": False, "ended_seconds": 90.0}, False),  # its launcher collects the logs
    ],
)
def test_a_host_gives_the_slice_back_when_nobody_else_does(host, settings, given_back):
    trains = settings.get("trains", True)
    # What trains is stopped in good order first.
    assert host(8.0 if given_back else 0.5, **settings) == (given_back, given_back and trains)


def test_a_reboot_begins_no_new_cap(host, tmp_path):
    (tmp_path / "tomat-begun").write_text(f"{time.time() - 500:.0f}")
    assert host(trains=False, cap_seconds=400.0)[0]
    (tmp_path / "given back").unlink()
    (tmp_path / "tomat-begun").unlink()
    assert not host(0.5, trains=False, cap_seconds=400.0)[0]
