"""What is wrong with a launch before anybody is asked: places that would be lost, a checkout that differs."""

import subprocess
from collections.abc import Mapping

from tomat.launch.remote import DISK_FOLDER


def unfit_places(places: Mapping[str, str | None], data_disk: bool = False) -> list[str]:
    """What would lose work on machines that are deleted: placeholders, and folders on them.

    Args:
        places: Key of the configuration to folder or URL, of data and output.
        data_disk: Whether every host has a disk with data at `DISK_FOLDER`.
    """
    problems = []
    for key, place in places.items():
        if place is not None and place.startswith("gs://BUCKET"):
            problems.append(
                f"{key} is {place}; put your bucket in the place of BUCKET, as in --{key} gs://my-bucket/..."
            )
        elif data_disk and key.startswith("data.") and place is not None and place.startswith(f"{DISK_FOLDER}/"):
            continue
        elif place is not None and "://" not in place:
            problems.append(
                f"{key} is the folder '{place}', which other hosts do not see and which is lost with the machine; "
                f"expected a bucket, as in --{key} gs://my-bucket/..."
            )
    return problems


def local_changes() -> list[str]:
    """Why the commit that is sent is not what is seen here."""
    found = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    if found.returncode != 0:
        return ["this folder is no git checkout; `tomat launch` sends the commit that is checked out."]
    changed = len(found.stdout.splitlines())
    if not changed:
        return []
    return [f"{changed} file(s) differ from the last commit, which is what is sent; commit them or give --allow_dirty."]
