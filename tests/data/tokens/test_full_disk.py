"""A disk that is full is one error, and the set goes on once there is room."""

import subprocess
import sys

import pytest
from tiny_run import tomat

# A file system of a megabyte, in a namespace of its own: mounting needs no privilege there.
SCRIPT = """
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
    disk = tmp_path / "disk"
    disk.mkdir()
    words = tomat("retokenize", "--input", tree, "--output", disk / "set")
    words += ["--layout", "v3-p7", "--bins", "200", "--patches_per_material", "100", "--workers", "1"]
    start = ["unshare", "-rm", "env", f"DISK={disk}", f"PYTHON={sys.executable}", "bash", "-c", SCRIPT, "bash", "60k"]
    done = subprocess.run([*start, disk, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "No space left on device" in done.stderr and "error: Cannot" in done.stderr
    assert "Traceback" not in done.stderr and "chunks (600 rows) are whole" in done.stdout
