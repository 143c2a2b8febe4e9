"""What `tomat shards verify` finds, and what `--repair` does about it."""

import dataclasses
import shutil

import numpy as np
import pytest
from reported import reported

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.tokens.pipeline.sources import find_materials
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.source_check import compare_with_source, damaged_chunks, repair_chunks, sample_rows


@pytest.fixture
def shards(tmp_path, whole):
    return open_shards(tmp_path / "whole")


@pytest.fixture
def get_grid(tmp_path, retokenize_config):
    materials = {each.material_id: each for each in find_materials(retokenize_config(tmp_path))}
    return lambda name: materials[name].read(1)


def test_another_source_is_noticed(shards, get_grid):
    grid = get_grid("mp-4")
    for change, message in (
        ({"rho": grid.rho * np.float32(1.2)}, "lie in another bin"),
        ({"rho": np.roll(grid.rho, -1, axis=2)}, "another bin"),
        ({"frac_coords": grid.frac_coords + 1e-3}, "other atoms"),
        ({"atomic_numbers": np.array([14, 6])}, "other atoms"),
        ({"lattice": grid.lattice * 1.03}, "lattice"),
        ({"lattice": grid.lattice * 1.0001}, "the structure in structures.npz"),
        ({"rho": np.tile(grid.rho, (1, 1, 2))}, "grid"),
    ):
        other = dataclasses.replace(grid, **change)
        with pytest.raises(TomatError, match=f"Row 0 of .*differs from its source.*({message})"):
            compare_with_source(shards, [0], lambda name, other=other: other)


def test_repair_writes_the_damaged_chunks_and_no_other(tmp_path, shards, capsys):
    before = {path: path.read_bytes() for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    chunks = tmp_path / "whole" / "tokens.zarr" / "c"
    shutil.rmtree(chunks / "3")
    for chunk in (7, 12):
        path = chunks / str(chunk) / "0"
        path.write_bytes(path.read_bytes()[:-9])
    times = {path: path.stat().st_mtime_ns for path in before if path.exists()}
    assert main(["shards", "verify", str(tmp_path / "whole")]) == 2
    assert "3 of 13 chunks are missing or damaged. The first: Chunk 3 of" in capsys.readouterr().err
    figures = reported(tmp_path, "shards", "verify", tmp_path / "whole", "--repair")
    assert before == {path: path.read_bytes() for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    touched = {path for path, time in times.items() if path.stat().st_mtime_ns != time}
    assert touched == {chunks / "7" / "0", chunks / "12" / "0"}
    assert (figures["chunks_damaged"], figures["chunks_repaired"], figures["rows_compared"]) == (3, 3, 64)


def test_repair_from_another_source_is_refused(shards, get_grid):
    def other(name):
        grid = get_grid(name)
        return dataclasses.replace(grid, rho=grid.rho * np.float32(1.2))

    with pytest.raises(TomatError, match="Chunk 2 of .* cannot be repaired from this source"):
        repair_chunks(shards, [2], other)
    assert shards.n_blocks == 13 and not damaged_chunks(shards)


def test_sample_is_of_different_rows():
    rows = sample_rows(1000, 64, 0)
    assert len(set(rows)) == 64 and rows == sorted(rows) and rows != sample_rows(1000, 64, 1)
    assert sample_rows(5, 64, 0) == [0, 1, 2, 3, 4]
