"""`--env_file`: variables of the training's environment that no log, command line or configuration may show."""

import re
import shlex
import stat
import subprocess
from pathlib import Path

from tomat.base.errors import TomatError


def check_env_file(path: Path) -> list[str]:
    """Judge a file of variables before it is sent to hosts whose shell will read it.

    Args:
        path: Lines `NAME=VALUE` or `export NAME=VALUE`, values quoted as for a shell; empty lines, and lines that begin
            with `#`.

    Returns:
        The names, in order. Errors name lines, never values.

    Raises:
        TomatError: others may read the file, git has it (it would be sent with the checkout, and is in the history), or
            a line is something else.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise TomatError(f"{path} has mode {mode:03o}, so that others may read it; run `chmod 600 {path}`.")
    tracked = subprocess.run(["git", "ls-files", "--error-unmatch", "--", str(path)], capture_output=True)
    if tracked.returncode == 0:
        raise TomatError(f"{path} is in git; take it out (`git rm --cached {path}`), and change the secrets it holds.")
    names = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line)
        except ValueError:
            words = []
        words = words[1:] if words[:1] == ["export"] else words
        name, equals, _ = words[0].partition("=") if len(words) == 1 else ("", "", "")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise TomatError(
                f"{path}: line {number} is no variable; expected NAME=VALUE, the value in quotes if it has spaces."
            )
        # The shell of the hosts would run or unfold these, in double quotes too.
        if re.search(r"[$`;&|<>()]", re.sub(r"'[^']*'", "", line)):
            raise TomatError(
                f"{path}: line {number} ({name}) has a character that a shell acts on; put the value in single quotes."
            )
        names.append(name)
    return names
