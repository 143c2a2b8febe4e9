"""Names of remote objects as local paths. A bucket may hold any name, `../../.bashrc` among them."""

from pathlib import Path

from tomat.base.errors import TomatError


def local_target(folder: Path, relative: str, origin: str) -> Path:
    """Where a remote object of that name is copied to.

    Args:
        folder: What it is copied into.
        relative: Its name from where the copy begins.
        origin: Names that place in the error.

    Raises:
        TomatError: a name, such as one with `..`, that leads out of `folder`.
    """
    root = folder.resolve()
    # No path has a zero byte; the folder itself is refused below.
    target = root if "\x00" in relative else (root / relative).resolve()
    if not target.is_relative_to(root) or target == root:
        raise TomatError(
            f"{origin}: the name {relative!r} leads out of the folder it would be copied to, so nothing is copied. "
            "Rename the object."
        )
    return target
