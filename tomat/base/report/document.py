"""Markdown files that tomat and people write together: tomat owns what is between its markers, and nothing else.

A section of tomat's stands between ``<!-- tomat:begin NAME -->`` and ``<!-- tomat:end NAME -->``, each alone on its
line.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.base.reporting import write_text

MARKER = re.compile(r"^<!-- tomat:(begin|end) ([a-z0-9-]+) -->$")
LOOSE_MARKER = re.compile(r"tomat:(begin|end)\b")


def begin_marker(name: str) -> str:
    return f"<!-- tomat:begin {name} -->"


def end_marker(name: str) -> str:
    return f"<!-- tomat:end {name} -->"


def empty_section(name: str) -> str:
    return f"{begin_marker(name)}\n{end_marker(name)}"


def _lines(text: str) -> list[str]:
    # Not `splitlines`, which also takes form feeds and other characters in what people wrote for ends of lines.
    return text.removesuffix("\n").split("\n")


def find_sections(text: str, origin: str) -> dict[str, tuple[int, int]]:
    """Name -> (index of the begin line, index of the end line) of every section."""
    sections: dict[str, tuple[int, int]] = {}
    open_name, open_line = "", 0
    for number, line in enumerate(_lines(text)):
        match = MARKER.match(line.strip())
        if match is None:
            if line.lstrip().startswith("<!--") and LOOSE_MARKER.search(line):
                raise _refusal(origin, number, f"a damaged marker, {line.strip()!r}")
            continue
        kind, name = match.groups()
        if kind == "begin":
            if open_name:
                raise _refusal(origin, number, f"section {name!r} begins inside {open_name!r}")
            if name in sections:
                raise _refusal(origin, number, f"section {name!r} begins a second time")
            open_name, open_line = name, number
        elif name != open_name:
            raise _refusal(origin, number, f"section {name!r} ends but was not open")
        else:
            sections[name] = (open_line, number)
            open_name = ""
    if open_name:
        raise _refusal(origin, open_line, f"section {open_name!r} never ends")
    return sections


def _refusal(origin: str, line: int, what: str) -> TomatError:
    return TomatError(
        f"{origin}:{line + 1}: {what}. Expected each section once, as {begin_marker('NAME')} ... {end_marker('NAME')}; "
        "repair the markers by hand. The file was not changed."
    )


def read_document(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TomatError(f"{path}: not a text in UTF-8 ({error}). Restore the file; it was not changed.") from None


def replace_sections(text: str, contents: Mapping[str, str], origin: str) -> str:
    """`text` with the named sections' contents replaced; sections that it lacks are appended at its end."""
    sections = find_sections(text, origin)
    lines = _lines(text)
    for name in sorted((n for n in contents if n in sections), key=lambda n: -sections[n][0]):
        first, last = sections[name]
        lines[first + 1 : last] = contents[name].strip("\n").splitlines()
    for name, content in contents.items():
        if name not in sections:
            lines += ["", begin_marker(name), *content.strip("\n").splitlines(), end_marker(name)]
    return "\n".join(lines) + "\n"


def write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or read_document(path) != text:
        write_text(path, text)


def section_text(text: str, heading: str) -> str:
    """The hand-written text under a `## heading`, up to the next heading; "" if there is none or only a comment."""
    match = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None:
        return ""
    return re.sub(r"<!--.*?-->", "", match.group(1), flags=re.DOTALL).strip()
