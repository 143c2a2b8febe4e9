"""A CIF, looked at before pymatgen parses it: how much work it is, and without what says nothing of the structure."""

import math
import re

from tomat.base.errors import TomatError
from tomat.data.density.limits import MOST_ATOMS, check_atom_count

MOST_IMAGES = 2 * MOST_ATOMS
"""Sites times operations of symmetry. pymatgen compares each image with all before it, 0.25 us a pair: 10,000 sites
without symmetry take 20 s, as many images as this 50 s."""

MOST_OPERATIONS = 192
"""Of a space group, Fm-3m and others; assumed where a CIF names a group and lists no operations."""

MOST_QUOTED = 100_000_000
"""Quotes of a line times its length, over all lines: pymatgen looks for the end of each, 1 s."""

_LOOP = re.compile(
    r"^[ \t]*loop_(?P<names>(?:\s+(?:_\S+|\#[^\n]*))+)(?P<rows>.*?)(?=^[ \t]*(?:_|loop_|data_)|\Z)",
    re.MULTILINE | re.IGNORECASE | re.DOTALL,
)
_READ = re.compile(r"^_(?:atom|cell|space_group|symmetry|parent|magnetic)", re.MULTILINE | re.IGNORECASE)
"""Begins the names that pymatgen reads of a structure; other loops are of reflections, bonds and authors."""
_GROUP = re.compile(
    r"^[ \t]*_(?:symmetry|space_group)_(?:IT_number|Int_Tables_number|name_\S+)[ \t]+(.+?)[ \t]*$",
    re.MULTILINE | re.IGNORECASE,
)


def bounded_cif(text: str, source: str) -> str:
    """The text without blank lines, and without loops that say nothing of a structure."""
    lines = [line for line in text.splitlines() if not (line == "" or line.isspace())]
    if sum(len(line) * (line.count("'") + line.count('"')) for line in lines) > MOST_QUOTED:
        raise TomatError(f"{source} has lines of thousands of quotes; it is no CIF, or damaged.")
    text = "\n".join(lines) + "\n"
    n_sites, operations = 0, []
    for loop in _LOOP.finditer(text):
        names = [name.lower() for name in loop["names"].split() if name.startswith("_")]
        if any(name.startswith(("_atom_site_fract_x", "_atom_site.fract_x")) for name in names):
            n_sites = max(n_sites, len(loop["rows"].split()) // len(names))
        elif any("symop" in name or "equiv_pos_as_xyz" in name for name in names):
            operations.append(max(loop["rows"].strip().count("\n") + 1, 1))
    check_atom_count(max(n_sites, 1), source)
    named = [group.strip("'\" ").replace(" ", "").replace("_", "") for group in _GROUP.findall(text)]
    if not operations and any(group not in ("P1", "1", "?", ".") for group in named):
        operations.append(MOST_OPERATIONS)
    if (n_images := n_sites * math.prod(operations)) > MOST_IMAGES:
        raise TomatError(
            f"{source} has {n_sites:,} sites and {math.prod(operations):,} operations of symmetry, {n_images:,} "
            f"images; expected at most {MOST_IMAGES:,}. Write the cell without symmetry (P1), where it may have "
            f"{MOST_ATOMS:,} atoms."
        )
    return _LOOP.sub(lambda loop: loop[0] if _READ.search("\n".join(loop["names"].split())) else "", text)
