"""The plan of a prediction: how many patches fit at a time, how long a batch and a cell take, and what bounds them."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.reporting import counted
from tomat.data.density.crystal import Crystal
from tomat.data.tokens.patch import tiling_anchors
from tomat.hardware.chips import Slice
from tomat.model.any_decoder import environment_of, is_field
from tomat.model.nearby_atoms import Room
from tomat.perf.cost.chip_model import ChipModel
from tomat.perf.cost.estimate import StepEstimate
from tomat.perf.cost.memory import MemoryReport
from tomat.perf.plan.compile.compiler import CompiledStep, compile_step
from tomat.perf.plan.compile.lowering import DecoderBatch
from tomat.perf.plan.compile.topology import data_axis_size
from tomat.perf.plan.plan import Interval, estimated, program_dict
from tomat.predict.inference.autoregressive import kept_bytes
from tomat.predict.inference.decoding import SHARE, atoms_near, check_decoder, sequences_to_try
from tomat.predict.inference.field import BOX, BOXES, Boxes
from tomat.predict.inference.interface import DecoderName, KvCacheDtype, check_decoding
from tomat.train.settings.config import TrainConfig


@dataclass(frozen=True)
class Cell:
    """The properties of a cell to predict that determine the programs."""

    grid_shape: tuple[int, int, int]
    atoms: int
    patch_shape: tuple[int, int, int]
    patches: int
    room: Room
    notes: tuple[str, ...] = ()


def cell_of(config: TrainConfig, grid_shape: tuple[int, int, int], cell: Crystal | int) -> Cell:
    """The patches of a cell of `grid_shape` voxels, for a run whose model has `environment`, or the boxes of a field
    model. `cell` is the crystal, or only the number of its atoms. Without the crystal, as many atoms are assumed near a
    patch as the model's rows have room for."""
    environment = environment_of(config.model)
    if environment is None:
        check_decoder(config, "parallel")
    assert environment is not None
    n_atoms = cell if isinstance(cell, int) else len(cell.atomic_numbers)
    notes = []
    if is_field(config.model):
        patch_shape, patches = BOX, prod(-(-side // most) for side, most in zip(grid_shape, BOX, strict=True))
        anchors = None
    else:
        patch_shape = config.data.sequence_layout.patch_shape(n_atoms)
        anchors = tiling_anchors(grid_shape, patch_shape)
        patches = len(anchors)
    if isinstance(cell, int):
        room = Room.of(environment)
        notes.append(
            f"no structure was given: at most {room.atoms} atoms (model.environment.max_atoms) of {room.elements} "
            "elements (max_elements) are taken to be near a patch"
        )
    elif anchors is None:
        room = Boxes(cell, grid_shape, environment.basis.cutoff_a).room()
    else:
        _, room = atoms_near(environment, cell, anchors, grid_shape, patch_shape)
    more = patches * prod(patch_shape) / prod(grid_shape) - 1
    if more > 0:
        notes.append(f"patches reach past the cell: {more:.0%} more voxels are decoded than the cell has")
    return Cell(grid_shape, n_atoms, patch_shape, patches, room, tuple(notes))


@dataclass(frozen=True)
class DecoderPlan:
    config: TrainConfig
    slice_: Slice
    cell: Cell
    batch: DecoderBatch
    compiled: CompiledStep
    model: ChipModel
    fits: bool
    """Whether the batch takes no more than a predictor allows (`inference.decoding.SHARE` of the free memory)."""

    @cached_property
    def step(self) -> StepEstimate | None:
        """The cycle models applied to the program of a batch; None if it does not fit."""
        if not self.fits:
            return None
        title = f"{self.batch.decoder} decoder of {self.config.run_name} on {self.slice_.name}, one batch, planned"
        unseen = "times are estimates of the devices' work; what the host does between batches comes on top"
        return estimated(self.compiled, self.slice_, self.model, title, (unseen,))

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes of the keys and values that a device caches; None for the parallel decoder, which has no cache."""
        if self.batch.decoder == "parallel":
            return None
        patches = self.batch.patches // data_axis_size(self.config, self.slice_.n_devices)
        return kept_bytes(self.config, patches, self.batch.kv_cache_dtype)

    @property
    def batches(self) -> int:
        return -(-self.cell.patches // self.batch.patches)

    def to_dict(self) -> dict[str, Any]:
        """For a JSON report: bytes, seconds, fractions, all of one device."""
        step = self.step
        return {
            "decoder": self.batch.decoder,
            "rounds": self.batch.rounds,
            "kv_cache_dtype": None if self.kv_cache_bytes is None else self.batch.kv_cache_dtype,
            "kv_cache_bytes": self.kv_cache_bytes,
            "fits": self.fits,
            "patches_at_a_time": self.batch.patches,
            "patches_at_a_time_per_device": self.batch.patches // data_axis_size(self.config, self.slice_.n_devices),
            "batches": self.batches,
            "batch_seconds": asdict(Interval.of(step)) if step is not None else None,
            "cell_seconds": asdict(Interval.of(step, self.batches)) if step is not None else None,
            "bound": step.supports[0].kind if step is not None else None,
            **program_dict(self.compiled, step),
        }


def plan_decoder(
    config: TrainConfig,
    slice_: Slice,
    cell: Cell,
    decoder: DecoderName,
    rounds: int = 1,
    kv_cache_dtype: KvCacheDtype = "compute",
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    **how: Any,
) -> DecoderPlan:
    """Compile a decoder for the largest batch that fits, found as a predictor does, and estimate it. If not even one
    patch per device fits, that is an answer. A field model always has the same batch. `on_stage` and `how` are as for
    `compile_step`."""
    check_decoding(decoder, rounds, kv_cache_dtype)
    check_decoder(config, decoder, rounds)
    devices = data_axis_size(config, slice_.n_devices)
    fixed = BOXES * devices if is_field(config.model) else None
    first = patches = fixed or sequences_to_try(decoder, cell.patches, devices)

    def compiled_for(patches: int, memory_only: bool) -> tuple[DecoderBatch, CompiledStep]:
        on_stage(f"{counted(patches, 'patch', 'patches')} at a time")
        room, n_voxels = cell.room, prod(cell.patch_shape)
        batch = DecoderBatch(decoder, patches, n_voxels, room.atoms, room.elements, rounds, kv_cache_dtype)
        return batch, compile_step(config, slice_, decode=batch, memory_only=memory_only, on_stage=on_stage, **how)

    batch, compiled = compiled_for(patches, False)
    while not _fits(compiled.memory) and patches > (fixed or devices):
        patches //= 2
        # Code generation is nine tenths of a compile, so it is done only for the batch that fits.
        batch, compiled = compiled_for(patches, True)
    fits = _fits(compiled.memory)
    if fits and patches < first:
        batch, compiled = compiled_for(patches, False)
    model = ChipModel.load(Path(config.tracking_dir), slice_.chip)
    return DecoderPlan(config, slice_, cell, batch, compiled, model, fits and compiled.fits)


def _fits(memory: MemoryReport) -> bool:
    """Whether a batch takes no more than a predictor allows, beside its arguments, which are nearly all parameters."""
    if memory.memory_space != "hbm":
        raise TomatError(f"a kernel of the decoder does not fit the memory on the chip ({memory.memory_space}).")
    there = memory.argument_bytes or 0
    return memory.required_bytes - there <= SHARE * (memory.capacity_bytes - there)
