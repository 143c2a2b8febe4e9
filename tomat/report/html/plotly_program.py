"""plotly's JavaScript, as its Python package carries it, without the kinds of traces that a page has none of.

The package has one bundle of all kinds, maps among them: 4.9 MB. A browser on two slow cores is busy with it for 1.4 s
before anything can be drawn, on two fast ones for 0.4 s; with the 1.2 MB of a plan's page for 0.4 s and 0.1 s. plotly's
own smaller bundles are made by a shorter list of kinds, and are not in the package; here that is done to the bundle.

The bundle is a row of `var a=w((e,t)=>{...});`, a function for each file of plotly's source, which runs when something
first calls `a()`; the last of them registers the kinds, in a list. The list is made shorter, and a file that nothing
left can call is left out. Where a plotly to come looks otherwise, the page gets all of it, and is slower.
"""

import importlib.resources
import re
from functools import cache

ALWAYS = "scatter"
"""The kind that is in plotly's core, and in no list."""

_NAME = r"[\w$]+"
_REGISTERED = re.compile(
    rf"var {_NAME}=({_NAME})\(\({_NAME},{_NAME}\)=>\{{var ({_NAME})={_NAME}\(\);\2\.register\(\[([\w$(),]+)\]\)"
)
"""The last file: what makes functions of files, plotly's core, the calls of the kinds."""
_CALLED = re.compile(rf"({_NAME})\(\)")
_KIND = re.compile(r'moduleType:"trace",name:"(\w+)"')


def whole_program() -> str:
    return (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


@cache
def plotly_program(kinds: frozenset[str]) -> str:
    """plotly.js with these kinds of traces and the least of the others; with all of them where one is not found."""
    whole = whole_program()
    if (registered := _REGISTERED.search(whole)) is None:
        return whole
    wrap, _, listed = registered.groups()
    head = rf"var {_NAME}={re.escape(wrap)}\((?:\([\w$,]*\)|{_NAME})=>\{{"
    parts = re.split(rf"(?<=\}}\);)(?={head})", whole)
    # What is not one file stays, without a name here: the first part, with the licence and what wraps files; those in
    # which ES modules follow, whose functions stand outside their own wrap (2 parts, 26 kB); the last.
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
