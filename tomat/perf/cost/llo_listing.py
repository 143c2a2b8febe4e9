"""The schedule of an HLO op from files that cost the compiler no time to write.

To write the final bundles (`llo.py`) libtpu packs every op three times more: it then wants to know, too, how many
bundles there would be without register allocation and without spills. It does so for the category `codegen` of its
dumps, of which the final bundles are. Two files of other categories say the same (libtpu 0.0.46):

- ``TIME-OP-NN-post-delay-converter.txt`` (`original`): what the final bundles hold, by region, in order.
- ``TIME-OP-NN-pb-metadata.txt`` (`proto`): the bundles that hold instructions of each region.

Of 1,154 ops of 130 kernels of a v6e, and 199 of 20 of a v5p and a v5e, every schedule was that of the final bundles,
but for the slots that bundles fill, which are in neither file. Not so for a TPU7x, where runs of empty bundles behind
a branch are merged, nor for libtpu 0.0.44, which has no such file of an op.
"""

from __future__ import annotations

import re
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.base.ports.libtpu import LISTING, METADATA, VERSION, listing_flags
from tomat.perf.cost.llo import BRANCH, BRANCH_DELAY_SLOTS, OpSchedule, ScheduleBuilder, newest_files

LISTED_CHIPS = ("v5e", "v5p", "v6e")
"""Chips for which the schedules were compared (see above)."""

_NO_OP = ("TLP", "<")
"""Begin the names of what is no HLO op: the program that calls them, and what runs before and after it."""
_REGION = re.compile(r" *\$region(\d+)[ :][^}]*\}(?: parent=(\d+))?")
_VECTOR = re.compile(r"^ *%v.*\n", re.MULTILINE)
"""An instruction that fills a vector register: most are such, and none of them is a branch, a product, a copy or
decides one."""
_LOOP = "// loop_body"
"""Ends the header of a region that a branch jumps back to."""
_SYMBOL = re.compile(r'"region(\d+) \{')
_EXIT = "exit bundle: "
"""Stands in the annotation of an op's last bundle."""
_LAST = "final_llo_fingerprint:"
"""Begins the last line of a file of metadata."""


def read_listed_schedules(llo_dir: Path) -> dict[str, OpSchedule]:
    """The schedules in a dump, by name of the HLO instruction; `units` and `slots` of them are empty.

    An op that was compiled more than once has the last of its schedules.
    """
    schedules: dict[str, OpSchedule] = {}
    for name, (listing, metadata) in newest_files(llo_dir, LISTING, METADATA, listing_flags("DIR")).items():
        if name.startswith(_NO_OP):
            continue
        if metadata is None:
            raise TomatError(f"{listing}: no metadata of {name} beside it; libtpu {VERSION} writes *-pb-metadata.txt.")
        schedules[name] = read_listed_schedule(listing, metadata)
    return schedules


def read_listed_schedule(listing: Path, metadata: Path) -> OpSchedule:
    """One op's schedule from its two files."""
    bundles, n_bundles = _bundles_of_regions(metadata)
    lines = _VECTOR.sub("", listing.read_text(encoding="utf-8", errors="replace")).splitlines()
    headers = [match and (int(match[1]), int(match[2] or -1)) for match in map(_REGION.match, lines)]
    parents = dict(header for header in headers if header)
    if bundles.keys() != parents.keys():
        odd = min(bundles.keys() ^ parents.keys())
        raise TomatError(f"{metadata} and {listing}: region {odd} is in one of them alone; compile again.")
    inside: dict[int, list[tuple[int, int]]] = {}
    for region, ranges in bundles.items():
        while region >= 0:  # and of those around it
            inside.setdefault(region, []).extend(ranges)
            region = parents.get(region, -1)

    builder = ScheduleBuilder()
    builder.n_bundles = n_bundles
    region = place = 0
    last: dict[int, int] = {}
    for number, (line, header) in enumerate(zip(lines, headers, strict=True)):
        if header:
            region, parent = header
            # It begins behind the one that stands before it, and behind the last branch: instructions of it that are in
            # bundles before those were moved there. Where nothing of it is left, what follows it begins there.
            place = max(place, *(end for _, end in inside.get(last.get(parent, -1), ())), 0)
            anything = inside.get(region if _LOOP in line else 0, ())
            builder.starts[region] = min((start for start, _ in anything if start >= place), default=n_bundles)
            place = builder.starts[region] if _LOOP in line else place
            last[parent] = region
        elif BRANCH in line:
            if not bundles[region]:
                raise TomatError(f"{metadata}: does not say in which bundle region {region} branches; compile again.")
            place = bundles[region][-1][1] + BRANCH_DELAY_SLOTS
            builder.branches(place, line)
        else:
            builder.add(place, line, order=number / len(lines))
    return builder.schedule()


def _bundles_of_regions(metadata: Path) -> tuple[dict[int, list[tuple[int, int]]], int]:
    """[first bundle, bundle after the last) of each run of bundles with instructions of a region, by region; and the
    number of bundles of the op."""
    found: dict[int, list[tuple[int, int]]] = {}
    start = bundle = n_bundles = 0
    of_region = False
    ranges: list[tuple[int, int]] = []
    lines = metadata.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or not lines[-1].startswith(_LAST):
        raise TomatError(f"{metadata}: was cut short. Expected a last line `{_LAST} ...`; compile again.")
    for line in lines:
        words = line.split(maxsplit=1)
        match words[0]:
            case "description:" if symbol := _SYMBOL.match(words[1]):
                ranges = found.setdefault(int(symbol[1]), [])
            case "pc:":
                bundle = int(words[1])
            case "annotation:" if _EXIT in line:
                n_bundles = bundle + 1
            case "child_instructions":
                of_region = True
            case "start:":
                start = int(words[1])
            case "limit:" if of_region:
                ranges.append((start, int(words[1])))
                of_region = False
    if not n_bundles:
        raise TomatError(f"{metadata}: does not say which bundle is the last; compile again.")
    return found, n_bundles
