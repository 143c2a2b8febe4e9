"""Which code runs, and the configurations that ship with it, by name and from any folder.

In a checkout they are those of `configs/`, in an installed tomat those of its wheel. This module uses only the standard
library, so that a wrong name is refused before anything heavy is imported.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
SUFFIX = ".yaml"

PACK_FILE = "tomat-pack.json"
"""In the root of a checkout that a launch has packed: its commit, whether files differed from it, what was asked."""
PACK_HASH_FILE = "tomat-pack.sha256"
"""Beside it on a host: SHA-256 of the archive that it was unpacked from, as the host has it."""


def installs(extra: str) -> str:
    """The command that installs an extra: `uv sync` in a checkout, `pip install` elsewhere."""
    return (
        f"uv sync --extra {extra}" if (PACKAGE.parent / "pyproject.toml").is_file() else f"pip install 'tomat[{extra}]'"
    )


def shipped_folder(kind: str) -> Path:
    """Where the configurations of a kind are: `train`, `sweeps`, `tokenize`, `numerics` or `compare`."""
    packaged = PACKAGE / "configs"
    return (packaged if packaged.is_dir() else PACKAGE.parent / "configs") / kind


def shipped_configurations(kind: str) -> dict[str, Path]:
    """Name -> file of every configuration of a kind that ships, sorted by name."""
    return dict(sorted((path.stem, path) for path in shipped_folder(kind).glob(f"*{SUFFIX}")))


def named_configuration(text: str, kind: str) -> Path | None:
    """The file that a word means: an existing file of that path, else a configuration that ships under that name, with
    or without `.yaml`. Below the working directory its path is relative, as the commands of a launch name it."""
    # os.path and not Path, which raises on names that are too long.
    if os.path.isfile(text):
        return Path(text)
    found = shipped_configurations(kind).get(text.removesuffix(SUFFIX))
    here = Path.cwd()
    return found.relative_to(here) if found is not None and found.is_relative_to(here) else found


def none_of_that_name(text: str, kind: str) -> str:
    """The message for a configuration that neither exists nor ships."""
    names = ", ".join(shipped_configurations(kind))
    ship = f"these ship with tomat and are found by name: {names}" if names else "none ships with this tomat"
    return f"config file {text} does not exist; {ship}"


def pack_record() -> Mapping[str, Any] | None:
    """What `PACK_FILE` says of the code that runs, and `sha256` of its archive; None for code that no launch packed."""
    root = PACKAGE.parent
    if not (root / PACK_FILE).is_file():
        return None
    record = json.loads((root / PACK_FILE).read_text(encoding="utf-8"))
    hashed = root / PACK_HASH_FILE
    return {**record, "sha256": hashed.read_text().split()[0] if hashed.is_file() else None}


def commit() -> str:
    """The commit of the code that runs, `-dirty` with local changes; empty outside a checkout and a pack of one."""
    import subprocess

    if (record := pack_record()) is not None:
        return f"{record['commit']}{'-dirty' if record['dirty'] else ''}"
    if not (PACKAGE.parent / ".git").exists():
        return ""  # an environment inside some other repository, whose commit this is not
    command = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def code_details() -> dict[str, str]:
    """The commit of the code that runs, and the hash of the pack that it came in, as a run's history has them."""
    found = {"commit": commit()}
    if (record := pack_record()) is not None and record["sha256"] is not None:
        found["pack"] = record["sha256"]
    return found


def source_hash() -> str:
    """SHA-256 of tomat's modules and tables (`.py`, `.json`) and their names, local changes included. It needs no
    checkout: an installed tomat has one too."""
    import hashlib

    total = hashlib.sha256()
    for path in sorted(path for suffix in ("py", "json") for path in PACKAGE.rglob(f"*.{suffix}")):
        content = path.read_bytes()
        total.update(f"{path.relative_to(PACKAGE).as_posix()}\0{len(content)}\0".encode() + content)
    return total.hexdigest()
