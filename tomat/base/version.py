"""Which code runs."""

import hashlib
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def commit() -> str:
    """The commit of the code that runs, `-dirty` with local changes; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def source_hash() -> str:
    """SHA-256 of tomat's modules and tables (`.py`, `.json`) and their names: of a checkout with its changes, and where
    there is none."""
    total = hashlib.sha256()
    for path in sorted(path for suffix in ("py", "json") for path in PACKAGE.rglob(f"*.{suffix}")):
        content = path.read_bytes()
        total.update(f"{path.relative_to(PACKAGE).as_posix()}\0{len(content)}\0".encode() + content)
    return total.hexdigest()
