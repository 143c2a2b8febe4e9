"""The atoms near many patches as plain arrays, which are cut into batches, and back as a model reads them."""

from collections.abc import Mapping, Sequence

import numpy as np
from haliax import Axis, NamedArray
from jax import Array

from tomat.model.environment import PatchAtoms
from tomat.model.patch_atoms import SIDE, XYZ, atom_axis, kind_axis

_KEYS = ("positions", "numbers", "kinds", "steps", "shape")


def stacked_atoms(patches: Sequence[PatchAtoms]) -> dict[str, np.ndarray]:
    """Those of many patches, one row a patch, by the names of `PatchAtoms`."""
    return {key: np.stack([np.asarray(getattr(patch, key).array) for patch in patches]) for key in _KEYS}


def named_atoms(batch: Mapping[str, Array | np.ndarray]) -> PatchAtoms | None:
    """Rows of what `stacked_atoms` made, with names; None where there is nothing of it."""
    if "positions" not in batch:
        return None
    n_sequences, n_atoms = batch["numbers"].shape
    axes = Axis("batch", n_sequences), atom_axis(n_atoms)
    kind = kind_axis(batch["kinds"].shape[1])

    def named(key: str, *more: Axis) -> NamedArray:
        return NamedArray(batch[key], more)  # pyright: ignore[reportArgumentType]  # NumPy's too, as jit takes them

    return PatchAtoms(
        named("positions", *axes, XYZ), named("numbers", *axes), named("kinds", axes[0], kind),
        named("steps", axes[0], SIDE, XYZ), named("shape", axes[0], SIDE),
    )  # fmt: skip
