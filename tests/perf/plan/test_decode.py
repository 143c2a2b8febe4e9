"""Patches of a cell, and the batch that is planned, with a compiler that only has a memory."""

import dataclasses
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_run import DEMO

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.hardware.chips import slice_named
from tomat.model.nearby_atoms import Room
from tomat.perf.cost.memory import MemoryReport
from tomat.perf.plan import decode
from tomat.perf.plan.decode import cell_of, plan_decoder
from tomat.train.settings.config import load_config

P19 = ["--data.layout", "v3-p19"]
CONFIG = load_config(DEMO, P19)
ROOM = Room.of(CONFIG.model.environment)
SODIUM = Crystal(np.eye(3) * 4.0, np.array([11, 11]), np.array([[0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]), "Na")


def test_the_patches_of_a_cell():
    cell = cell_of(CONFIG, (128, 128, 128), 48)
    assert (cell.patch_shape, cell.patches, cell.room) == ((19, 19, 19), 7**3, ROOM)
    assert cell.notes[0].startswith(f"no structure was given: at most {ROOM.atoms} atoms")
    assert cell.notes[1].startswith("patches reach past the cell: 12% more")
    assert prod(cell.patch_shape) * cell.patches / 128**3 == pytest.approx(1.12, abs=0.005)
    whole = cell_of(CONFIG, (38, 19, 57), SODIUM)
    assert (whole.atoms, whole.patches, whole.room, whole.notes) == (2, 6, ROOM, ())
    dense = Crystal(np.eye(3) * 2.0, np.array([11]), np.zeros((1, 3)), "dense")
    assert cell_of(CONFIG, (20, 20, 20), dense).room.atoms == 160  # of 147 to 156 near a patch
    with pytest.raises(TomatError, match="too short for 5,000 atoms"):
        cell_of(CONFIG, (20, 20, 20), 5000)


class Compiler:
    """Takes a gigabyte for the parameters, and some bytes for each patch of a device."""

    def __init__(self, per_patch_bytes: int, devices: int) -> None:
        self.per_patch_bytes, self.devices = per_patch_bytes, devices
        self.asked: list[tuple[int, bool]] = []

    def __call__(self, config: Any, slice_: Any, *, decode: Any, memory_only: bool = False, **kwargs: Any) -> Any:
        self.asked.append((decode.patches, memory_only))
        capacity, parameters = 32 * 2**30, 2**30
        required = parameters + decode.patches // self.devices * self.per_patch_bytes
        memory = MemoryReport(required <= capacity, required, capacity, argument_bytes=parameters)
        result = {"compile_seconds": 1.0}
        return SimpleNamespace(
            fits=memory.fits, memory=memory, compiler="libtpu 0", key="key", cached=False, result=result
        )


@pytest.mark.parametrize(
    ("per_patch_gib", "slice_name", "sizes", "batches"),
    [
        (0.1, "v6e-1", [128], 3),  # 12.8 of 31 GiB
        (0.5, "v6e-1", [128, 64, 32], 11),
        (0.22, "v6e-1", [128, 64], 6),  # 28.2 GiB fit, and are more than nine tenths of 31
        (0.4, "v6e-4", [512, 256], 2),
    ],
)
def test_the_largest_batch_that_fits_is_planned(per_patch_gib, slice_name, sizes, batches, monkeypatch):
    slice_ = slice_named(slice_name)
    compiler = Compiler(int(per_patch_gib * 2**30), slice_.n_devices)
    monkeypatch.setattr(decode, "compile_step", compiler)
    plan = plan_decoder(CONFIG, slice_, cell_of(CONFIG, (128, 128, 128), 48), "autoregressive")
    smaller = [(size, True) for size in sizes[1:]]
    assert compiler.asked == [(sizes[0], False), *smaller, *([(sizes[-1], False)] if smaller else [])]
    assert plan.fits and plan.batch.patches == sizes[-1] and plan.batches == batches
    # Keys and values of one layer, 96 numbers each in float32, or of 2 heads of 48 and a scale:.
    positions = plan.batch.patches // slice_.n_devices * CONFIG.seq_len
    assert plan.kv_cache_bytes == 2 * 4 * 96 * positions
    compact = plan_decoder(CONFIG, slice_, plan.cell, "autoregressive", 1, "int8")
    assert compact.kv_cache_bytes == 2 * 2 * (48 + 4) * positions and compact.batch.kv_cache_dtype == "int8"
    assert (plan.batch.n_voxels, plan.batch.n_atoms, plan.batch.n_elements) == (6859, ROOM.atoms, ROOM.elements)


def test_a_patch_that_does_not_fit_is_an_answer(monkeypatch):
    compiler = Compiler(40 * 2**30, 1)
    monkeypatch.setattr(decode, "compile_step", compiler)
    slice_ = slice_named("v6e-1")
    plan = plan_decoder(CONFIG, slice_, cell_of(CONFIG, (128, 128, 128), 48), "parallel", 2)
    assert not plan.fits and plan.step is None and plan.to_dict()["cell_seconds"] is None
    assert [size for size, _ in compiler.asked] == [16, 8, 4, 2, 1] and plan.batch.rounds == 2
    with pytest.raises(TomatError, match="density_dropout 0"):
        plan_decoder(dataclasses.replace(CONFIG, density_dropout=0.0), slice_, plan.cell, "parallel")
