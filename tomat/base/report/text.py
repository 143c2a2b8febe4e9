"""Words that are not tomat's own, such as a run's name or purpose, on a Markdown page: shown as they are.

`plain`, `inline`, `prose`, `code` and `fenced` put them into a page. `without_html` is what everything passes that is
written between markers: whatever was put into it, it leaves no HTML and no marker in it.
"""

from __future__ import annotations

import re

_FENCE = re.compile(r"(`{3,}(?=[^`]*$)|~{3,})")
"""What opens a block of code; tomat's own begin where the line does."""
_OPENS_HTML = re.compile(r"<(?=[A-Za-z/!?])")
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
    """Words as a span of code, on one line; what a span may not hold is put between longer marks."""
    line = " ".join(str(text).split())
    if not line:
        return ""
    mark = "`" * _longer_than_runs(line, 1)
    space = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{mark}{space}{line}{space}{mark}"


def fenced(text: str, language: str = "") -> str:
    mark = "`" * _longer_than_runs(text, 3)
    return f"{mark}{language}\n{text}\n{mark}"


def _longer_than_runs(text: str, least: int) -> int:
    return max([least, *(len(run) + 1 for run in re.findall("`+", text))])


def without_html(markdown: str) -> str:
    """Markdown in which nothing is HTML or a marker, outside code as inside, and every block of code is closed."""
    lines: list[str] = []
    block: list[str] = []
    fence = ""
    for line in [*markdown.splitlines(), ""]:
        opened = None if fence else _FENCE.match(line)
        if fence:
            lines.append(line)
            if re.fullmatch(rf" {{0,3}}{re.escape(fence[0])}{{{len(fence)},}}\s*", line):
                fence = ""
        elif opened is None and line.strip():
            # In a list or a quotation it would depend on the lines around it where such a block ends.
            block.append(re.sub(r"^([\s>*+\-\d.)]+)(?=```|~~~)", r"\1\\", line))
        else:
            lines += _escaped(block)
            block = []
            lines.append(_OPENS_HTML.sub("&lt;", line))
            fence = "" if opened is None else opened.group(1)
    # The empty line that ended the last block; where a block of code was left open, its end.
    lines[-1:] = [fence] if fence else []
    return "\n".join(line.replace("<!--", "&lt;!--") if line.lstrip().startswith("<!--") else line for line in lines)


def _escaped(block: list[str]) -> list[str]:
    """Lines of one paragraph or table whose `<` open no HTML; those in spans of code stay.

    Where a mark of code has no other in its line, or its cell, it depends on the lines around it what is code: then
    every `<` counts.
    """
    # The cells and bars of a table's line, or a line.
    pieces = [re.split(r"(?<!\\)(\|)", line) if "|" in line else [line] for line in block]
    parsed = [_spans(piece) for line in pieces for piece in (*line, "\n")]
    if any(spans is None for spans in parsed):
        return [_OPENS_HTML.sub("&lt;", line) for line in block]
    parts = [part if is_code else _OPENS_HTML.sub("&lt;", part) for spans in parsed for is_code, part in spans or ()]
    return "".join(parts).split("\n")[:-1]


def _spans(text: str) -> list[tuple[bool, str]] | None:
    """A text as parts that are code and that are not; None where a mark of code has no other."""
    spans, place = [], 0
    for marks in re.finditer(r"\\.|(`+)", text):
        if marks.group(1) is None or marks.start() < place:
            continue
        closing = re.compile(rf"(?<!`){marks.group(1)}(?!`)").search(text, marks.end())
        if closing is None:
            return None
        spans += [(False, text[place : marks.start()]), (True, text[marks.start() : closing.end()])]
        place = closing.end()
    return [*spans, (False, text[place:])]
