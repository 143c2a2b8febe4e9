"""JSON files that carry a checksum of their own content: a bit that flips in a name or a number leaves valid JSON.

It is over the content, not the bytes, so that a file that was only laid out anew still counts as whole. Older files,
without one, are read, and whoever reads them is told.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tomat.base.documents import parse_json
from tomat.base.errors import TomatError

CHECKSUM_KEY = "content_sha256"
"""Holds the checksum of everything else in the file."""


def content_checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the content as JSON with sorted keys and no white space, without `CHECKSUM_KEY`."""
    rest = {key: value for key, value in content.items() if key != CHECKSUM_KEY}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with its checksum."""
    return {**content, CHECKSUM_KEY: content_checksum(content)}


def parse_checked(text: str | bytes, source: str, what: str, remedy: str) -> tuple[dict[str, Any], bool]:
    """The content of a JSON object, and whether it had a checksum, which is taken out; `source`, `what` it should be
    and the `remedy` for a damaged one are for errors."""
    content = parse_json(text, f"{source} is not {what}: it", remedy)
    if not isinstance(content, dict):
        raise TomatError(f"{source} is not {what}: it holds a {type(content).__name__}. {remedy}")
    if CHECKSUM_KEY not in content:
        return content, False
    expected = content.pop(CHECKSUM_KEY)
    found = content_checksum(content)
    if found != expected:
        hashes = f"its content hashes to {found[:12]}..., the file says {str(expected)[:12]}..."
        raise TomatError(f"{source} is damaged: {hashes} {remedy}")
    return content, True


def refuse_unknown_keys(content: Mapping[str, Any], known: frozenset[str], source: str, remedy: str) -> None:
    """Refuse a key that no version writes, in a file without a checksum: damage may have made it of a known one."""
    if unknown := sorted(set(content) - known):
        raise TomatError(f"{source} is damaged: it has no checksum, and an unknown key {unknown[0]!r}. {remedy}")


SIGNATURE = "# sha256 of the lines above: "


def signed(text: str) -> str:
    """A YAML text with its own hash as a comment in its last line."""
    return f"{text}{SIGNATURE}{hashlib.sha256(text.encode()).hexdigest()}\n"


def is_as_signed(text: str | bytes) -> bool | None:
    """Whether a text is the one that `signed` was given; None where it has no hash, as older ones."""
    content, separator, stated = (text if isinstance(text, bytes) else text.encode()).rpartition(SIGNATURE.encode())
    if not separator:
        return None
    return hashlib.sha256(content).hexdigest().encode() == stated.strip()
