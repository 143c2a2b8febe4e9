"""A sequence of tokens in words."""

from collections.abc import Iterator, Sequence

import numpy as np

from tomat.data.codec.base import DensityCodec
from tomat.data.density.elements import symbol_of
from tomat.data.tokens import vocabulary as v
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.patch import decode_sequence
from tomat.data.tokens.vocabulary import Vocabulary

UNIT_WORDS = {"e_per_A3": "e/Å³", "rho_times_volume": "e (density x cell volume)"}


def token_runs(ids: np.ndarray, vocabulary: Vocabulary) -> Iterator[tuple[int, list[str]]]:
    """The tokens by name, a block a time."""
    start, names = 0, []
    for place, token in enumerate(np.asarray(ids).tolist()):
        name = vocabulary.name(token)
        opens = (name in v.SPECIAL_NAMES and not name.startswith("/") and name != "PAD") or (
            name == "PAD" and names[-1:] != ["PAD"]
        )
        if opens and names:
            yield start, names
            start, names = place, []
        names.append(name)
    if names:
        yield start, names


def humanise(ids: np.ndarray, layout: SequenceLayout, codec: DensityCodec, first_voxels: int = 8) -> list[str]:
    read = decode_sequence(ids, layout, codec)
    where = "" if read.offset is None else f", first voxel {_triple(read.offset)}"
    n_padding = int(np.count_nonzero(np.asarray(ids) == v.PAD))
    a, b, c, alpha, beta, gamma = read.lattice_parameters
    padding_percent = 100 * n_padding / len(ids)
    lines = [
        f"layout   {layout.name}: {len(ids):,} tokens, {n_padding:,} of them padding ({padding_percent:.1f} %)",
        f"cell     a {a:.2f}  b {b:.2f}  c {c:.2f} A, alpha {alpha:.1f}  beta {beta:.1f}  gamma {gamma:.1f} degrees",
        f"grid     {_triple(read.grid_shape)} voxels",
        f"atoms    {len(read.atomic_numbers)}, at fractions of the cell from the "
        + ("patch's first voxel" if read.offset is None else "cell's origin"),
        *(
            f"         {symbol_of(int(number)):<2}  {x:.5f}  {y:.5f}  {z:.5f}"
            for number, (x, y, z) in zip(read.atomic_numbers, read.frac_coords, strict=True)
        ),
        f"patch    {_triple(read.patch_shape)} voxels{where}",
    ]
    unit = UNIT_WORDS[read.unit]
    low, mean, high = read.values.min(), read.values.mean(dtype=np.float64), read.values.max()
    lines.append(f"density  min {low:.4g}, mean {mean:.4g}, max {high:.4g} {unit}")
    tokens = read.density_tokens.reshape(-1, layout.tokens_per_voxel)[:first_voxels]
    for k, (token, value) in enumerate(zip(tokens, read.values.reshape(-1), strict=False)):
        voxel = np.unravel_index(k, read.patch_shape)
        names = " ".join(f"rho {part}" for part in token)
        lines.append(f"         voxel {_triple([int(i) for i in voxel], ' ')}  {names}  = {value:.5g} {unit}")
    if read.values.size > first_voxels:
        lines.append(f"         and {read.values.size - first_voxels:,} more, z fastest")
    return lines


def _triple(values: Sequence[int], separator: str = " x ") -> str:
    return separator.join(str(value) for value in values)
