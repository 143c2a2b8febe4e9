"""The pack of a launch: one archive with the files of a checkout, the configuration and the arguments after it.

Its name is its hash. It lies in the bucket beside the run. Every host takes it from there at every start, so later
changes to the checkout have no effect.
"""

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.base.reporting import counted, write_bytes
from tomat.base.shipped import PACK_FILE

CONFIG_FOLDER = "tomat-launch"
"""Folder in a pack that holds the configuration unchanged, under its own name."""
NO_COMMIT = "uncommitted"
OWN_FOLDER = "runs/"
"""Folder that tomat itself writes into a checkout. It is never sent."""
MAX_MEGABYTES = 300
"""Most megabytes of a pack's files; a checkout of tomat has 29. More are data, for the bucket and `.gitignore`."""
_COMPRESSION = 6


@dataclass(frozen=True)
class Tree:
    root: Path
    commit: str
    """Output of `git describe --always`; `NO_COMMIT` where there is no commit."""
    files: tuple[str, ...]
    """Tracked files, and files that are neither tracked nor ignored, relative to the root."""
    changed: tuple[str, ...]

    @property
    def problem(self) -> str | None:
        """Why the tree is not sent without `--allow_dirty`; None if it is exactly a commit."""
        if self.commit == NO_COMMIT:
            return "this checkout has no commit yet; commit its files or give --allow_dirty."
        if not self.changed:
            return None
        named = ", ".join(self.changed[:3]) + (", ..." if len(self.changed) > 3 else "")
        said = f"changed since the last commit: {counted(len(self.changed), 'file')} ({named})"
        return f"{said}; commit, or give --allow_dirty, which is recorded."


@dataclass(frozen=True)
class Pack:
    path: Path
    sha256: str
    commit: str
    dirty: bool
    config_path: str
    """Path of the configuration inside the pack."""
    overrides: tuple[str, ...]
    """What follows the configuration on the training's command line."""

    @property
    def words(self) -> str:
        return f"pack {self.sha256[:12]}, commit {self.commit}{' with changes' if self.dirty else ''}"


def _git(root: Path, *words: str) -> str | None:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def read_tree(root: Path, config_path: Path, leave_out: Collection[Path] = ()) -> Tree:
    """The checkout at `root`, without the files `leave_out` (secrets and reports are not part of a run). An edited
    configuration does not count as a change, because it is packed as it is and the run records all of it."""
    own = {os.path.relpath(path, root) for path in leave_out}
    configuration = os.path.relpath(config_path, root)

    def kept(name: str) -> bool:
        return bool(name) and name not in own and not name.startswith(OWN_FOLDER)

    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    status = _git(root, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames")
    if listed is None or status is None:
        raise TomatError("this folder is not a git checkout; run `tomat launch` in the root of one, which it sends.")
    commit = (_git(root, "describe", "--always") or NO_COMMIT).strip()
    changed = sorted({line[3:] for line in status.split("\0")} - {configuration})
    return Tree(root, commit, tuple(filter(kept, sorted(set(listed.split("\0"))))), tuple(filter(kept, changed)))


def build_pack(tree: Tree, config_path: Path, overrides: Sequence[str], target: Path) -> Pack:
    """Write the archive to `target`. The same files, configuration and arguments give the same bytes: members are
    sorted by name and have no times or owners."""
    inside = f"{CONFIG_FOLDER}/{config_path.name}"
    members: dict[str, tuple[tarfile.TarInfo, bytes]] = {}

    def add(name: str, content: bytes, executable: bool = False, link: str = "") -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(content), 0o755 if executable else 0o644
        if link:
            info.type, info.linkname = tarfile.SYMTYPE, link
        members[name] = info, content

    for name in tree.files:
        path = tree.root / name
        if path.is_symlink():
            link = os.readlink(path)
            if os.path.isabs(link) or not path.resolve().is_relative_to(tree.root.resolve()):
                said = f"{name} is a link to {link}, outside this checkout, which leads nowhere on another machine"
                raise TomatError(f"{said}; copy what it leads to, or name the link in .gitignore.")
            add(name, b"", link=link)
        elif path.is_file():  # a submodule is a folder, and a deleted file is still listed
            add(name, path.read_bytes(), executable=os.access(path, os.X_OK))
    add(inside, config_path.read_bytes())
    content = hashlib.sha256()
    for name in sorted(members):
        info, data = members[name]
        content.update(f"{name}\0{info.mode}\0{info.linkname}\0{info.size}\0".encode() + data)
    dirty = bool(tree.changed) or tree.commit == NO_COMMIT
    record = {"commit": tree.commit, "dirty": dirty, "content": content.hexdigest()}
    record |= {"config_path": inside, "overrides": list(overrides)}
    add(PACK_FILE, (json.dumps(record, indent=1) + "\n").encode())
    total = sum(len(data) for _, data in members.values())
    if total > MAX_MEGABYTES * 1e6:
        largest = max(members, key=lambda name: members[name][0].size)
        said = f"the files of this checkout have {total / 1e6:.0f} MB (the largest is {largest})"
        raise TomatError(f"{said}, and at most {MAX_MEGABYTES} MB are sent; data belong in the bucket and .gitignore.")
    buffer = io.BytesIO()
    # mtime=0: the gzip header would otherwise contain the current time.
    with (
        gzip.GzipFile("", "wb", _COMPRESSION, buffer, mtime=0) as file,
        tarfile.open(fileobj=file, mode="w") as archive,
    ):
        for name in sorted(members):
            info, data = members[name]
            archive.addfile(info, io.BytesIO(data))
    write_bytes(target, buffer.getvalue())
    sha256 = hashlib.sha256(buffer.getvalue()).hexdigest()
    return Pack(target, sha256, tree.commit, dirty, inside, tuple(overrides))
