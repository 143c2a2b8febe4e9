"""Words that are not tomat's own, such as a run's name or purpose, on a Markdown page: shown as they are.

Every word of a page passes one of these functions, once; so nothing that was put into it is HTML or a marker.
"""

import re

_SPECIAL = re.compile(r"[\\`*\[\]~]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])|(?<!\S)#")


def plain(text: object) -> str:
    """Words as one line of Markdown that shows them letter by letter."""
    return _not_a_list(inline(text))


def inline(text: object) -> str:
    """The same inside a line, such as in a cell of a table."""
    line = " ".join(str(text).split())
    line = _SPECIAL.sub(lambda found: "&amp;" if found.group() == "&" else f"\\{found.group()}", line)
    return line.replace("<", "&lt;")


def prose(text: object) -> str:
    """Words as one line of Markdown; what stands between backticks is code."""
    parts = re.split(r"`([^`\n]+)`", " ".join(str(text).split()))
    # A space at the edge of a part is one between words and code, which `inline` would drop.
    shown = [code(part) if place % 2 else _inside(part) for place, part in enumerate(parts)]
    return _not_a_list("".join(shown))


def _inside(part: str) -> str:
    bare = part.strip()
    before, after = part[: len(part) - len(part.lstrip())], part[len(part.rstrip()) :]
    return f"{before}{inline(bare)}{after}" if bare else part


def _not_a_list(line: str) -> str:
    """A line whose first letters begin no list, quotation or heading."""
    return f"\\{line}" if line[:1] in ">+=-" and line else re.sub(r"^(\d+)([.)])(?!\S)", r"\1\\\2", line)


def code(text: object) -> str:
    """Words as a span of code, on one line; backticks in it are put between longer marks."""
    line = " ".join(str(text).split())
    if not line:
        return ""
    mark = "`" * _longer_than_runs(line, 1)
    space = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{mark}{space}{line}{space}{mark}"


def fenced(text: str, language: str = "") -> str:
    """Lines as a block of code; a line that could be a section's marker begins with `&lt;`."""
    mark = "`" * _longer_than_runs(text, 3)
    lines = (
        line.replace("<!--", "&lt;!--") if line.lstrip().startswith("<!--") else line for line in text.splitlines()
    )
    return "\n".join([f"{mark}{language}", *lines, mark])


def _longer_than_runs(text: str, least: int) -> int:
    return max([least, *(len(run) + 1 for run in re.findall("`+", text))])
