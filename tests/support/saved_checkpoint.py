"""A checkpoint as Levanter lays it out: manifest, then an OCDBT database of zarr3 arrays, then the metadata."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorstore as ts

from tomat.train.runs.checkpoints import write_checksums


def save_checkpoint(
    run: Path,
    step: int,
    arrays: Mapping[str, tuple[int, ...]],
    *,
    complete: bool = True,
    temporary: bool = False,
    checksums: bool = False,
    node_bytes: int = 8 * 2**20,
) -> Path:
    """`node_bytes`: small ones give the database several levels, as that of a large model has."""
    path = run / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    listed = [{"path": name, "shape": shape, "dtype": "float32"} for name, shape in arrays.items()]
    (path / "manifest.json").write_text(json.dumps({"format_version": 1, "arrays": listed}))
    config = {"max_decoded_node_bytes": node_bytes, "max_inline_value_bytes": 10}
    for name, shape in arrays.items():
        base = {"driver": "ocdbt", "base": f"file://{path}/", "path": name, "config": config}
        store = ts.open({"driver": "zarr3", "kvstore": base}, create=True, dtype="float32", shape=shape).result()
        store.write(np.random.default_rng(step).normal(size=shape).astype(np.float32)).result()
    if checksums:
        write_checksums(str(path))
    if complete:
        metadata = {"step": step, "timestamp": "2026-01-02T03:04:05", "is_temporary": temporary}
        (path / "metadata.json").write_text(json.dumps(metadata))
    return path
