"""Sets that `retokenize` writes: their files, changed by hand too, and a runner that stops on the way."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.documents import CHECKSUM_KEY, with_checksum


def files(place: Path) -> dict[str, bytes]:
    """Content by name; of the request what was asked for, and not where the densities lay."""
    found = {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
    if "request.json" in found:
        found["request.json"] = repr(json.loads(found["request.json"])["identity"]).encode()
    return found


def rewrite(path: Path, *without: str, checksum: bool = True, **changes: Any) -> None:
    """A JSON file with other values and without some keys; its checksum fits, or it is one of before there was one."""
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in (*without, CHECKSUM_KEY)}
    content |= changes
    path.write_text(json.dumps(with_checksum(content) if checksum else content))


class StoppingRunner:
    """Runs units, with a seed in a random order, and stops the driver after some of them."""

    def __init__(self, stop_after=None, seed=None):
        self.left, self.seed = stop_after, seed
        self.units = []

    def run(self, function, units, on_done):
        order = range(len(units)) if self.seed is None else np.random.default_rng(self.seed).permutation(len(units))
        for index in order:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left = None if self.left is None else self.left - 1
            self.units.append(units[index])
            on_done(function(units[index]))
