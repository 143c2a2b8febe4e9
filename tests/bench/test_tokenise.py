import json
import os
import subprocess
import sys

import pytest

from tomat.app.cli import main
from tomat.bench.retokenize_workers import UNIT_MATERIALS, _long_unit
from tomat.tokens.pipeline.sources import Material
from tomat.tokens.pipeline.stages import WriteUnit


@pytest.mark.slow
def test_bench_writes_figures_beside_what_they_are_compared_with(tmp_path):
    words = ["--materials", "12", "--rounds", "1", "--kill_runs", "1", "--folder", str(tmp_path)]
    assert main(["bench", "tokenise", *words, "--json", str(tmp_path / "b.json")]) == 0
    figures = json.loads((tmp_path / "b.json").read_text())
    ratio = figures["write_patches_per_cpu_second"] / figures["numpy_searchsorted_patches_per_cpu_second"]
    assert figures["write_over_numpy_searchsorted_cpu_ratio"] == pytest.approx(ratio)
    assert figures["kill_runs_byte_identical"] == 1 and figures["training_set_core_hours"] > 0
    if figures["cpus"] > 1:
        rates = figures["two_workers_patches_per_second"] / figures["one_worker_patches_per_second"]
        assert figures["two_workers_over_one_ratio"] == pytest.approx(rates)
        # Wide, since other processes may take a core meanwhile; two cores give no more than twice one.
        assert 0.5 < figures["two_processes_ceiling_ratio"] < 3 and 0 < figures["free_worker_cores"] < 2.1
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


_AFFINITIES = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from tomat.bench.retokenize_workers import _hold_to
with ThreadPoolExecutor(1) as before, ThreadPoolExecutor(1) as after:
    before.submit(int).result()
    _hold_to({int(sys.argv[1])})
    print(os.sched_getaffinity(0), *(each.submit(os.sched_getaffinity, 0).result() for each in (before, after)))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads to cores")
def test_a_worker_is_held_to_its_cores_with_the_threads_it_has_and_those_it_starts():
    core = max(os.sched_getaffinity(0))
    # In a process of its own: this one keeps its cores.
    words = [sys.executable, "-c", _AFFINITIES, str(core)]
    assert subprocess.run(words, check=True, capture_output=True, text=True).stdout.split() == [f"{{{core}}}"] * 3


def test_a_long_unit_repeats_the_chunks_of_its_units_until_it_is_as_long_as_one_of_a_large_set():
    materials = [Material(f"m{k}", f"m{k}.zarr") for k in range(12)]
    unit = _long_unit([WriteUnit((k,), (materials[k],)) for k in range(12)])
    assert unit.materials == tuple(materials)
    assert unit.chunks == tuple(range(12)) * 11 and len(unit.chunks) >= UNIT_MATERIALS


def test_bench_refuses_fewer_materials_than_two_workers_need(tmp_path, capsys):
    assert main(["bench", "tokenise", "--materials", "2", "--folder", str(tmp_path)]) == 2
    assert "at least 12" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
