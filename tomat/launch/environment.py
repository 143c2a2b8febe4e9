"""`--env_file`: variables of the training's environment that no log, command line or configuration may show.
`python -m tomat.launch.environment FILE OUTPUT` writes them in a form for the shell of the hosts."""

import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tomat.base.documents import read_bytes
from tomat.base.errors import TomatError
from tomat.base.layout import REFUSED_STATUS
from tomat.base.reporting import writing

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LINE = re.compile(r"[ \t]*(?:export[ \t]+)?(?P<name>[^= \t]+)=(?P<value>.*)", re.DOTALL)
_WORDS = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|[^'\"\\ \t]", re.DOTALL)
"""A part of a value, as in a shell: a quoted part, or a single character, perhaps with a backslash before it."""
BLANKS = " \t"
"""White space that ends a word in a shell; other Unicode white space does not."""
_ESCAPED = '"\\$`'
"""The characters that a backslash escapes in double quotes."""


def read_env_file(path: Path) -> dict[str, str]:
    r"""The variables of a UTF-8 file. Each value is plain text: nothing in it is run or expanded.

    A line is `NAME=VALUE`, `export NAME=VALUE`, empty, or begins with `#`. Windows line ends are allowed. A value or
    parts of it may be quoted as in a shell: nothing is special in single quotes; in double quotes a backslash escapes
    `"`, `\`, `$` and a backquote. Text after ` #` is a comment.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise TomatError(f"{path} has mode {mode:03o}, so others may read it; run `chmod 600 {path}`.")
    tracked = subprocess.run(["git", "ls-files", "--error-unmatch", "--", str(path)], capture_output=True)
    if tracked.returncode == 0:
        raise TomatError(f"{path} is in git; take it out (`git rm --cached {path}`), and change the secrets it holds.")
    found: dict[str, str] = {}
    # Not `splitlines`: it also ends a line at U+2028, a form feed and other characters that a value may contain.
    for number, line in enumerate(read_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        where = f"{path}: line {number}"
        try:
            text = line.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            raise TomatError(f"{where} is not UTF-8; save the file as UTF-8.") from None
        if not text.strip(BLANKS) or text.lstrip(BLANKS).startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise TomatError(f"{where} is not a variable; expected NAME=VALUE.")
        name = match["name"]
        if not _NAME.fullmatch(name):
            raise TomatError(f"{where} has no name before '='; expected letters, digits and '_', no digit first.")
        if name in found:
            raise TomatError(f"{where} gives {name} a second time; leave one of them.")
        found[name] = _value(match["value"], f"{where} ({name})")
    return found


def _value(text: str, where: str) -> str:
    if any(character < " " and character != "\t" for character in text) or "\x7f" in text:
        raise TomatError(f"{where} holds a control character; write the value without it.")
    parts: list[str] = []
    place = 0
    while place < len(text) and text[place] not in BLANKS:
        match = _WORDS.match(text, place)
        if match is None:
            raise TomatError(f"{where} has a quote that is not closed, or a backslash at its end.")
        word, place = match.group(), match.end()
        acted_on = "[$`]" if word[0] == '"' else "[$`;&|<>()]"
        if word[0] not in "'\\" and re.search(acted_on, re.sub(r"\\.", "", word)):
            raise TomatError(f"{where} has a character that a shell acts on; put the value in single quotes.")
        if word[0] == '"':
            word = re.sub(rf"\\([{re.escape(_ESCAPED)}])", r"\1", word)
        parts.append(word[1:-1] if word[0] in "'\"" else word[-1])
    rest = text[place:].strip(BLANKS)
    if rest and not rest.startswith("#"):
        raise TomatError(f"{where} goes on after a space; put the value in quotes if it has spaces.")
    return "".join(parts)


def shell_text(variables: Mapping[str, str]) -> str:
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())


def main(argv: list[str]) -> int:
    """Write the variables of one file to another that only the user can read; returns the exit status."""
    source, target = map(Path, argv)
    try:
        text = shell_text(read_env_file(source))
        with writing(target):
            target.unlink(missing_ok=True)
            with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
    except TomatError as error:
        print("error:", error, file=sys.stderr)
        return REFUSED_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
