"""Predictors without parameters that read what a teacher-forced model reads.

A teacher-forced model is given the true neighbours of every voxel, so its error says little until it stands beside what
those neighbours alone give away. Each baseline here sees the same patch, in the same order (C order, z fastest), and
lives in the same bins: it reads true values **as the codec decodes them** (the tokens hold no more) and its answer is
**rounded to the codec** (encoded, then decoded with the median table), as any answer of the model is.
"""

import numpy as np

from tomat.data.codec.base import DensityCodec


def constant_median(patches: np.ndarray, constant_e_per_a3: float) -> np.ndarray:
    """The same density for every voxel.

    With the median of the voxels evaluated this is the best any constant can do in absolute error, so it is the error
    of a model that has learnt nothing but the distribution.

    Args:
        patches: [patch, px, py, pz], e/A^3; only its shape is used.
    """
    return np.full(patches.shape, constant_e_per_a3, dtype=np.float32)


def copy_previous(patches: np.ndarray, constant_e_per_a3: float) -> np.ndarray:
    """The value of the token before, in C order inside the patch; at the end of a z row that is a jump.

    Args:
        patches: [patch, px, py, pz], e/A^3, the values the model reads.
        constant_e_per_a3: answer for the first voxel, which has none before it.
    """
    flat = patches.reshape(patches.shape[0], -1).astype(np.float32)
    predicted = np.empty_like(flat)
    predicted[:, 0] = constant_e_per_a3
    predicted[:, 1:] = flat[:, :-1]
    return predicted.reshape(patches.shape)


def lorenzo(patches: np.ndarray, constant_e_per_a3: float) -> np.ndarray:
    """Lorenzo extrapolation from the 7 earlier corners of each voxel's unit cube (Ibarria et al., 2003).

    `f(x-1) + f(y-1) + f(z-1) - f(x-1,y-1) - f(x-1,z-1) - f(y-1,z-1) + f(x-1,y-1,z-1)`: exact wherever the mixed third
    difference vanishes. Terms outside the patch count as zero, which on the three faces leaves the planar rule
    `f(y-1) + f(z-1) - f(y-1,z-1)`, and on the edges the previous voxel. Negative answers become zero.

    Args:
        patches: [patch, px, py, pz], e/A^3, the values the model reads.
    """
    padded = np.pad(patches.astype(np.float64), ((0, 0), (1, 0), (1, 0), (1, 0)))
    now, before = slice(1, None), slice(None, -1)
    predicted = (
        padded[:, before, now, now]
        + padded[:, now, before, now]
        + padded[:, now, now, before]
        - padded[:, before, before, now]
        - padded[:, before, now, before]
        - padded[:, now, before, before]
        + padded[:, before, before, before]
    )
    predicted[:, 0, 0, 0] = constant_e_per_a3
    return np.maximum(predicted, 0.0).astype(np.float32)


def quantise(rho: np.ndarray, codec: DensityCodec) -> np.ndarray:
    """`rho` (e/A^3, any shape) rounded to the codec: encoded, then decoded with the median table."""
    return codec.decode(codec.encode(np.ascontiguousarray(rho, dtype=np.float32)), decoder="median")


def predict_baselines(visible: np.ndarray, codec: DensityCodec, constant_e_per_a3: float) -> dict[str, np.ndarray]:
    """Every baseline on the same teacher-forced patches.

    Args:
        visible: [patch, px, py, pz], e/A^3: the true patches as the codec decodes them.
        constant_e_per_a3: the constant of `constant_median`, and of the first voxel of the others.

    Returns:
        Name to prediction, float32 [patch, px, py, pz], e/A^3, on the codec's values.
    """
    predictors = {"lorenzo": lorenzo, "copy_previous": copy_previous, "constant_median": constant_median}
    return {name: quantise(predict(visible, constant_e_per_a3), codec) for name, predict in predictors.items()}
