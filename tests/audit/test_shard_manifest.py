"""A manifest with one flipped bit is refused, or says what it said before."""

import dataclasses
import random

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import fit_lloyd_max
from tomat.data.tokens.layouts import LAYOUTS
from tomat.data.tokens.manifest import ShardManifest, SkippedMaterial, plan_rows
from tomat.data.tokens.manifest_text import parse_manifest

FLIPS = 60


def manifest() -> ShardManifest:
    """Of a complete set: nine materials of 64 rows, one skipped, nine chunks."""
    histogram = DensityHistogram()
    histogram.add(np.geomspace(1e-3, 30, 5000, dtype=np.float32))
    plan = plan_rows(
        [(f"mp-{1000 + k}", (60 + k, 72, 80)) for k in range(9)],
        layout=LAYOUTS["v3-p19"],
        codec=fit_lloyd_max(histogram, 256),
        patches_per_material=64,
        seed=7,
        split="train",
        skipped=[SkippedMaterial("mp-2000", "a chunk of 'charge_density_total' does not decode")],
    )
    return dataclasses.replace(plan, chunk_checksums=tuple(f"{k:064x}" for k in range(9)), complete=True)


def test_bit_flips_of_a_manifest_change_nothing_silently(figure):
    whole = manifest()
    content = whole.to_text().encode()
    rng = random.Random(0)
    refused, changed = 0, []
    for _ in range(FLIPS):
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        try:
            found = parse_manifest(bytes(damaged), "manifest.json")
        except TomatError:
            refused += 1
        else:
            if found != whole:
                changed.append(bytes(damaged[max(place - 12, 0) : place + 12]))
    figure("A7", f"bit flips of a manifest, of {FLIPS}: other content without a word", len(changed))
    figure("A7", f"bit flips of a manifest, of {FLIPS}: refused", refused)
    assert not changed
    # What is left fell on white space.
    assert refused > 0.9 * FLIPS
