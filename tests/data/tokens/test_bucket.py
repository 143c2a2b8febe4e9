"""Shard sets in a bucket: the same objects as in a folder, written and read by processes of their own."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tomat.data.codec.files import write_codec
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.pipeline.driver import write_shards

LAYOUT = SequenceLayout("small", "v3", 4, 160)

# TensorStore reads the address of the service from the environment once, so each side is a process.
WRITE = """
import sys
import numpy as np
from tomat.data.codec.files import load_codec
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.pipeline.driver import write_shards

stored = np.load(sys.argv[2])
grid = DensityGrid(stored["rho"], stored["lattice"], stored["numbers"], stored["coords"], material_id="a")
layout = SequenceLayout("small", "v3", 4, 160)
left = int(sys.argv[3])

def get_grid(name):
    global left
    left -= 1
    if left < 0:
        sys.exit(3)
    return grid

write_shards("gs://bucket/sets/one", "abc", get_grid, layout=layout, codec=load_codec(sys.argv[1]),
             patches_per_material=10, seed=1, block_rows=8)
"""
READ = """
import hashlib
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.source_check import damaged_chunks

shards = open_shards("gs://bucket/sets/one")
print(damaged_chunks(shards) or shards.n_blocks, hashlib.sha256(shards.read_rows(0, shards.rows).tobytes()).hexdigest())
"""


@pytest.fixture
def run(bucket):
    def run(script, *arguments, status=0):
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            env={**os.environ, **bucket.environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == status, done.stderr
        return done

    return run


def test_set_in_a_bucket_is_the_set_in_a_folder(tmp_path, make_grid, codec, bucket, run):
    grid: DensityGrid = make_grid((5, 6, 7), n_atoms=2)
    np.savez(
        tmp_path / "grid.npz", rho=grid.rho, lattice=grid.lattice, numbers=grid.atomic_numbers, coords=grid.frac_coords
    )
    write_codec(codec, tmp_path / "codec.json")
    folder = tmp_path / "set"
    write_shards(
        folder, "abc", lambda name: grid, layout=LAYOUT, codec=codec, patches_per_material=10, seed=1, block_rows=8
    )
    # Stopped in the middle of the chunks, and started again.
    run(WRITE, tmp_path / "codec.json", tmp_path / "grid.npz", 4, status=3)
    assert any("/progress/" in name for name in bucket.objects)
    run(WRITE, tmp_path / "codec.json", tmp_path / "grid.npz", 100)
    in_folder = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert {name.removeprefix("sets/one/"): content for name, (content, _) in bucket.objects.items()} == in_folder
    assert run(READ).stdout.startswith("4 ")
    # A chunk that is lost is missed.
    bucket.remove("sets/one/tokens.zarr/c/2/0")
    error = run(READ, status=1).stderr
    assert "Chunk 2 of gs://bucket/sets/one/" in error
