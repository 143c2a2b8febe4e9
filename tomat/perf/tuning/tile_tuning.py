"""Tunes the tiles of the Pallas loss and the sizes of the attention kernels by the compiler's own schedule, and writes
the tables that `model.loss` and `model.whole_head` read (`tomat bench loss-tiles` and `attention-tiles`).

A candidate is a dictionary with `kernel` and its `tiles` (`block_positions` for XLA's loss). Each is compiled alone,
for one chip, in a separate process (`python -m tomat.perf.tuning.tile_tuning REQUEST.json`), and kept in a cache, so a
tuning that was stopped continues where it was.
"""

import importlib.metadata
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.reporting import tell, write_json
from tomat.hardware.chips import Slice, slice_named
from tomat.model.loss.config import LossKind, LossVocabulary
from tomat.model.tiles import TunedSizes, TunedTiles
from tomat.perf.plan.compile.process import Limits, answer, ask, request_key
from tomat.perf.plan.compile.topology import compiler_version
from tomat.perf.plan.plan_cache import PROGRAM_FILES, Kept, kept_program, open_cache, open_result
from tomat.perf.timed_kernels.compile import compile_alone

Candidate = Mapping[str, Any]
CHILD_MODULE = "tomat.perf.tuning.tile_tuning"
"""The module that lowers and compiles. The sources that it imports are part of an answer's key."""
TOP_KERNELS = 8
"""How many of the longest kernels are recorded."""


@dataclass(frozen=True)
class LossShape:
    """The loss and its arrays on one device: value and gradients."""

    KERNEL: ClassVar = "pallas"
    """The kernel whose tiles are tuned. It is compared with the other one."""
    TABLE_FILE: ClassVar = TunedTiles.FILE

    slice_name: str = "v6e-1"
    batch: int = 8
    positions: int = 8192
    width: int = 1024
    density_tokens: int = 16384
    dtype: str = "bfloat16"
    kind: LossKind = "cross_entropy"
    vocabulary: LossVocabulary = "full"

    @property
    def ids(self) -> int:
        """Ids over which the loss normalises."""
        from tomat.data.tokens.vocabulary import Vocabulary

        return self.density_tokens if self.vocabulary == "density" else Vocabulary(self.density_tokens).size

    @property
    def key(self) -> dict[str, Any]:
        """What an entry of the table is for, besides the chip."""
        return {"width": self.width, "ids": self.ids, "dtype": self.dtype}

    def request(self, candidate: Candidate) -> dict[str, Any]:
        return {**asdict(self), "loss": {"kind": self.kind, "vocabulary": self.vocabulary} | dict(candidate)}

    def seconds(self, row: Mapping[str, Any]) -> float:
        return row["seconds"]


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer on one device: projections, norms, rotary embedding, kernels; forward and backward."""

    KERNEL: ClassVar = "whole_head"
    TABLE_FILE: ClassVar = TunedSizes.FILE

    slice_name: str = "v6e-1"
    batch: int = 8
    positions: int = 8192
    hidden_dim: int = 1024
    num_heads: int = 4
    num_kv_heads: int = 4
    dtype: str = "bfloat16"

    @property
    def head_size(self) -> int:
        return self.hidden_dim // self.num_heads

    @property
    def key(self) -> dict[str, Any]:
        """What an entry of the table is for, besides the chip."""
        return {"positions": self.positions, "head_size": self.head_size, "dtype": self.dtype}

    def request(self, candidate: Candidate) -> dict[str, Any]:
        model = {
            "max_seq_len": self.positions,
            "hidden_dim": self.hidden_dim,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "num_layers": 1,
            "attn_backend": "splash",
        }
        if candidate["kernel"] == self.KERNEL:
            model |= {"whole_head": candidate["tiles"], "qk_rotary": {"kernel": "attention"}}
        else:  # JAX's kernels in square tiles, backward in one kernel
            blocks = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv"), candidate["tiles"]["block"])
            model |= {"splash": {**blocks, "use_fused_bwd": True}, "qk_rotary": {"kernel": "pallas"}}
        return {"slice_name": self.slice_name, "batch": self.batch, "dtype": self.dtype, "model": model}

    def seconds(self, row: Mapping[str, Any]) -> float:
        """Planned seconds of a compiled candidate, without its projections, which are the same for all."""
        return row["seconds"] - row["categories"].get("matmul", 0.0)


def sizes_text(candidate: Candidate) -> str:
    """`4096 x 256 x 512 x 32`."""
    return " x ".join(map(str, candidate["tiles"].values() if "tiles" in candidate else [candidate["block_positions"]]))


def tune(
    shape: LossShape | AttentionShape, candidates: Sequence[Candidate], cache_dir: Path, limits: Limits
) -> list[dict[str, Any]]:
    """Each candidate with the compiler's result, from the cache or by compiling, or with the reason as `refused`.
    `limits` apply to one compile, which takes 40 to 300 s on two cores, depending on the load."""
    rows = []
    slice_ = slice_named(shape.slice_name)
    told = partial(tell, highlight=False)
    with progress() as bar:
        task = bar.add_task("compiling", total=len(candidates))
        for candidate in candidates:
            bar.update(task, description=f"{candidate['kernel']}, {sizes_text(candidate)}")
            request = {**shape.request(candidate), "slice": slice_.name, "compiler": compiler_version()}
            key = request_key(request, CHILD_MODULE)
            kept = open_result(open_cache(cache_dir) / key, PROGRAM_FILES)
            if kept is None:
                kept = ask(CHILD_MODULE, {**request, "key": key}, slice_, cache_dir, limits, on_removed=told)
            with kept.lock:
                refused = "refused" in kept.result
                rows.append({**candidate, **(kept.result if refused else planned(kept, slice_, request))})
            bar.advance(task)
    return rows


def table_entry(shape: LossShape | AttentionShape, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table's entry for one tuning: the tiles of the shortest planned time, and all candidates with their times."""
    tuned = [row for row in rows if row["kernel"] == shape.KERNEL and "refused" not in row]
    if not tuned:
        reasons = sorted({row["refused"] for row in rows if "refused" in row})
        what = ", ".join(f"{name} {value}" for name, value in shape.key.items())
        raise TomatError(
            f"none of {len(rows)} candidates is a {shape.KERNEL} kernel that compiles for {what}: "
            + (" ".join(reasons) or "give --tiles.")
        )
    best = min(tuned, key=shape.seconds)
    kept = ("kernel", "tiles", "block_positions", "refused")
    return {
        "device_kind": best["device_kind"],
        **shape.key,
        "tiles": best["tiles"],
        "planned_seconds": shape.seconds(best),
        "provenance": {
            "compiler": best["compiler"],
            "jax": importlib.metadata.version("jax"),
            "shape": asdict(shape),
            "candidates": [
                {key: row[key] for key in kept if key in row}
                | ({} if "refused" in row else {"seconds": shape.seconds(row)})
                for row in rows
            ],
        },
    }


def write_entry(shape: LossShape | AttentionShape, entry: dict[str, Any], table_file: Path | None = None) -> None:
    """Put an entry into its table (the package's unless another is given). It replaces an entry for the same shape."""
    file, keys = table_file or shape.TABLE_FILE, ("device_kind", *shape.key)
    entries = json.loads(file.read_text(encoding="utf-8"))["entries"] if file.exists() else []
    others = [e for e in entries if any(e[key] != entry[key] for key in keys)]
    write_json(file, {"entries": sorted([*others, entry], key=lambda e: tuple(e[key] for key in keys))})


def lower_loss(request: dict[str, Any], device: Any) -> Any:
    """The lowered value and gradients (`jax.stages.Lowered`) of only the loss, on one described device. The request has
    the fields of `LossShape`, and `loss`, the arguments of `LossConfig`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tomat.data.tokens.vocabulary import Vocabulary
    from tomat.model.loss.config import LossConfig
    from tomat.model.loss.density_loss import density_loss
    from tomat.model.loss.interface import DensityTarget
    from tomat.model.tiles import LossTiles

    config = LossConfig(**request["loss"] | {"tiles": LossTiles(**request["loss"].get("tiles", {}))})
    batch, positions, width, n_bins = (request[key] for key in ("batch", "positions", "width", "density_tokens"))
    mesh = Mesh(np.asarray([device]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    dtype = jnp.dtype(request["dtype"])
    shapes = (
        jax.ShapeDtypeStruct((batch, positions, width), dtype, sharding=whole),
        jax.ShapeDtypeStruct((Vocabulary(n_bins).size, width), dtype, sharding=whole),
        jax.ShapeDtypeStruct((batch, positions), jnp.int32, sharding=whole),
    )

    def loss(hidden: jax.Array, head: jax.Array, tokens: jax.Array):
        target = DensityTarget(n_bins, np.linspace(0, 36, n_bins))
        return density_loss(hidden, head, tokens, config=config, target=target)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).lower(*shapes)


def lower_attention(request: dict[str, Any], device: Any) -> Any:
    """The same for the attention of one decoder layer: projections, norms, rotary embedding and attention. The request
    has `batch`, `dtype`, and `model`, keys of `DensityDecoderConfig`."""
    import draccus
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tomat.model.any_decoder import build_mask
    from tomat.model.attention import DensityAttention
    from tomat.model.decoder import DensityDecoderConfig

    config = draccus.decode(DensityDecoderConfig, request["model"])
    mesh = Mesh(np.asarray([device]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    dtype = jnp.dtype(request["dtype"])

    def described(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=whole), tree)

    Batch, Pos = hax.Axis("batch", request["batch"]), hax.Axis("position", config.max_seq_len)
    layer = eqx.filter_eval_shape(lambda: DensityAttention.init(config.attention_config(), key=jax.random.key(0)))
    x = eqx.filter_eval_shape(lambda: hax.zeros((Batch, Pos, config.Embed), dtype))

    def attended(layer, x, by_out):
        out, back = jax.vjp(lambda layer, x: layer(x, build_mask(config)), layer, x)
        return out, back(by_out)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping({}):
        return jax.jit(attended).lower(*map(described, (layer, x, x)))


def planned(kept: Kept, slice_: Slice, request: Mapping[str, Any]) -> dict[str, Any]:
    """Planned seconds of a kept program, by the models of `estimate.py`, and its longest kernels."""
    from tomat.perf.cost.estimate import estimate_step
    from tomat.perf.cost.llo import slot_utilisation
    from tomat.perf.cost.schedule_model import matched_schedules

    program, schedules = kept_program(kept.folder, "tune")
    matched = matched_schedules(program, schedules)
    estimate = estimate_step(program, schedules, slice_, title="kernel")
    kernels = []
    for op in estimate.ops.values():
        row: dict[str, Any] = {
            "name": op.name,
            "category": str(op.category),
            "executions": op.executions,
            "seconds": (op.estimate or 0.0) * op.executions,
            "basis": op.basis,
        }
        if op.schedule is not None:
            row["bundle_seconds"] = op.schedule.core_seconds * op.executions
            row["mxu_seconds"] = op.schedule.mxu_seconds * op.executions
            row["slots"] = slot_utilisation(matched[op.name])
            row["grid"] = list(matched[op.name].grid)
        kernels.append(row)
    flops: dict[str, float] = defaultdict(float)
    for op in estimate.breakdown.ops:
        flops[str(op.category)] += op.flops or 0.0
    found = {
        "compiler": request["compiler"],
        "compile_seconds": kept.result["compile_seconds"],
        "temporary_bytes": kept.result["temporary_bytes"],
        "seconds": estimate.breakdown.step_seconds,
        "categories": {
            category: times["estimate"] for category, times in estimate.model_table().items() if times["estimate"] > 0
        },
        "kernels": sorted(kernels, key=lambda row: row["seconds"], reverse=True)[:TOP_KERNELS],
        "device_kind": slice_.chip.device_kinds[0],
    }
    return found | ({"loss_flops": flops.get("loss", 0.0)} if "loss" in request else {"flops_by_category": flops})


def answer_request(request: dict[str, Any]) -> None:
    compile_alone(request, partial(lower_loss if "loss" in request else lower_attention, request))


if __name__ == "__main__":
    answer(sys.argv[1], answer_request)
