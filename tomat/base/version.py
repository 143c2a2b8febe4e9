"""Which code runs."""

import subprocess
from pathlib import Path


def commit() -> str:
    """The commit of the code that runs, `-dirty` with local changes; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
