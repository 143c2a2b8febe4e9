"""plotly's JavaScript from its Python package, without the kinds of traces that a page does not use.

The package has one bundle of all kinds of traces, including maps: 4.9 MB. Before anything is drawn, it takes a browser
1.4 s on two slow cores and 0.4 s on two fast ones; the 1.2 MB of a plan's page take 0.4 s and 0.1 s. plotly's own
smaller bundles are built from a shorter list of kinds, but the Python package does not contain them.

The bundle is a sequence of `var a=w((e,t)=>{...});`, one function for each file of plotly's source. A function runs
when something first calls `a()`. The last one registers a list of the kinds. This module shortens the list and leaves
out each file that nothing can still call. If a later plotly looks different, the page gets the whole, slower bundle.
"""

import importlib.resources
import re
from functools import cache

ALWAYS = "scatter"
"""The kind that belongs to plotly's core, so that the list does not name it."""

_NAME = r"[\w$]+"
_REGISTERED = re.compile(
    rf"var {_NAME}=({_NAME})\(\({_NAME},{_NAME}\)=>\{{var ({_NAME})={_NAME}\(\);\2\.register\(\[([\w$(),]+)\]\)"
)
"""The start of the last file. Groups: the wrapper function, the core's variable, the calls that give the kinds."""
_CALLED = re.compile(rf"({_NAME})\(\)")
_KIND = re.compile(r'moduleType:"trace",name:"(\w+)"')


def whole_program() -> str:
    return (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


@cache
def plotly_program(kinds: frozenset[str]) -> str:
    """plotly.js with these kinds of traces and as few others as possible; the whole bundle if a kind is not found."""
    whole = whole_program()
    if (registered := _REGISTERED.search(whole)) is None:
        return whole
    wrap, _, listed = registered.groups()
    head = rf"var {_NAME}={re.escape(wrap)}\((?:\([\w$,]*\)|{_NAME})=>\{{"
    parts = re.split(rf"(?<=\}}\);)(?={head})", whole)
    # Parts that are not one file have no name here and always stay: the first part (licence and wrapper functions), the
    # parts that contain ES modules, whose functions stand outside their wrapper (2 parts, 26 kB), and the last part.
    wraps = re.findall(rf"({_NAME})=\([\w$,]*\)=>\(\)=>\{{", parts[0])
    others = [f"={other}(" for other in wraps if other != wrap]
    if wrap not in wraps:
        return whole
    names = [
        "" if i in (0, len(parts) - 1) or any(other in part for other in others) else part[4 : part.index("=")]
        for i, part in enumerate(parts)
    ]
    files = {name: part for name, part in zip(names, parts, strict=True) if name}

    def called(part: str) -> set[str]:
        return files.keys() & _CALLED.findall(part)

    kept_calls, found = [], {ALWAYS}
    for name in _CALLED.findall(listed):
        if name not in files:
            return whole
        mine = {kind for text in (name, *called(files[name])) for kind in _KIND.findall(files[text])}
        if mine & kinds:
            kept_calls.append(f"{name}()")
            found |= mine
    if not kinds <= found:
        return whole
    parts[-1] = parts[-1].replace(listed, ",".join(kept_calls))
    waiting = [part for name, part in zip(names, parts, strict=True) if not name]
    kept: set[str] = set()
    while waiting:
        fresh = called(waiting.pop()) - kept
        kept |= fresh
        waiting += [files[name] for name in fresh]
    return "".join(part for name, part in zip(names, parts, strict=True) if not name or name in kept)
