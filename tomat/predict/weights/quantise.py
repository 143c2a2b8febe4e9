"""Quantises a matrix to few bits a number: codes, one scale for each group of codes, and a table of their values.

`affine`: whole numbers times the scale (qwix; a group's largest magnitude is at the end of the range). `lut`: a table
of 2^bits values that all groups of a matrix share, fitted by Lloyd-Max to the numbers divided by their scales; each
group then gets the scale that fits it best. For normally distributed numbers the error is 11 % with 4 affine bits in
groups of 128, and 9.7, 18.6 and 34 % with tables of 4, 3 and 2 bits (J. Max, "Quantizing for minimum distortion", 1960:
0.0095, 0.0345 and 0.1175 of the variance).
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.shipped import installs
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.quantiser import FineBins, optimal_cuts
from tomat.predict.weights.record import Description, Scheme

BITS: Mapping[Scheme, tuple[int, ...]] = {"affine": (8, 4), "lut": (4, 3, 2)}
"""Bits that are offered. A table of 8 bits would cost more time than it saves; 2 affine bits have an error of 55 %."""
DEFAULT_GROUP = 128
_OFFSET = 64.0
"""Added to numbers divided by their scale, because the histogram is made for densities and counts only positive
numbers. Its bins are 1/128 wide there, a thirtieth of the narrowest interval of 4 bits."""
_SPAN = 60.0
"""The fit of a table clips numbers to this many scales."""


@dataclass(frozen=True, eq=False)
class Quantised:
    scheme: Scheme
    bits: int
    shape: tuple[int, int]
    group: int
    """How many numbers of a row share a scale; divides `in`."""
    codes: np.ndarray
    """uint8 [out, in]: 0 to 2^bits - 1."""
    scales: np.ndarray
    """float16 [out, in / group]."""
    table: np.ndarray
    """float32 [2^bits]: the value of each code, before it is multiplied by the scale."""

    def values(self) -> np.ndarray:
        rows, columns = self.shape
        grouped = self.table[self.codes].reshape(rows, columns // self.group, self.group)
        return (grouped * self.scales.astype(np.float32)[..., None]).reshape(self.shape)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays to store, which `of_arrays` reads."""
        return {"codes": packed(self.codes.reshape(-1), self.bits), "scales": self.scales, "table": self.table}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], how: Description) -> "Quantised":
        """The inverse of `arrays`, with the `description` as `how`."""
        try:
            (rows, columns), bits, group = how["shape"], how["bits"], how["group"]
            scales, table = arrays["scales"], arrays["table"]
            if bits not in BITS[how["scheme"]] or columns % group:
                raise ValueError("no such bits or group are offered")
            if scales.shape != (rows, columns // group) or table.shape != (2**bits,):
                raise ValueError("scales or table have another size")
            codes = unpacked(arrays["codes"], bits, rows * columns).reshape(rows, columns)
        except (KeyError, TypeError, ValueError) as error:
            raise TomatError(f"its quantised array does not fit its description {how} ({error}).") from None
        return cls(how["scheme"], bits, (rows, columns), group, codes, scales, table.astype(np.float32))

    @property
    def description(self) -> Description:
        return {"scheme": self.scheme, "bits": self.bits, "group": self.group, "shape": self.shape}


def check_offered(bits: int, scheme: Scheme) -> None:
    """Refuse bits that a scheme does not have, and a scheme whose library is missing."""
    if bits not in BITS[scheme]:
        offered = "; ".join(f"{name}: {', '.join(map(str, its))}" for name, its in BITS.items())
        raise TomatError(f"{bits} bits are not offered with scheme {scheme}; expected one of {offered}.")
    if scheme == "affine" and importlib.util.find_spec("qwix") is None:
        said = "scheme affine needs qwix, which is not installed"
        raise TomatError(f"{said}; install it with `{installs('compress')}`.")


def quantise(matrix: np.ndarray, bits: int, scheme: Scheme, group: int = DEFAULT_GROUP) -> Quantised:
    """Quantise a matrix of finite floats [out, in], in groups of the divisor of `in` nearest to `group` as a ratio."""
    check_offered(bits, scheme)
    matrix = np.asarray(matrix, np.float32)
    rows, columns = matrix.shape
    divisors = [each for each in range(1, columns + 1) if columns % each == 0]
    group = min(divisors, key=lambda each: max(each / group, group / each))
    make = _affine if scheme == "affine" else _lut
    codes, scales, table = make(matrix.reshape(rows, columns // group, group), bits)
    return Quantised(scheme, bits, (rows, columns), group, codes.reshape(rows, columns), scales, table)


def _affine(grouped: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    import jax.numpy as jnp
    import qwix

    rows, groups, group = grouped.shape
    kind = {8: jnp.int8, 4: jnp.int4}[bits]
    found = qwix.quantize(jnp.asarray(grouped.reshape(rows, -1)), kind, channelwise_axes=(0,), tiled_axes={1: group})
    half = 1 << (bits - 1)
    codes = (np.asarray(found.qvalue, np.int16) + half).astype(np.uint8)
    scales = np.asarray(found.scale, np.float32).reshape(rows, groups).astype(np.float16)
    return codes.reshape(grouped.shape), scales, np.arange(-half, half, dtype=np.float32)


def _lut(grouped: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scales = np.sqrt((grouped.astype(np.float64) ** 2).mean(axis=-1)).astype(np.float32)
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    relative = grouped * inverse[..., None]
    histogram = DensityHistogram()
    histogram.add(np.clip(relative, -_SPAN, _SPAN) + np.float32(_OFFSET))
    fine = FineBins(histogram)
    n = 1 << bits
    if len(fine.bins) < n:  # the matrix has only a few different numbers, which are then the table
        values = np.pad(fine.centres, (0, n - len(fine.bins)), mode="edge")
    else:
        values = fine.means(optimal_cuts(fine, n, absolute=False)[0])
    table = (values - _OFFSET).astype(np.float32)
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, relative).astype(np.uint8)
    looked_up = table[codes]
    power = (looked_up**2).sum(axis=-1)
    best = np.divide((looked_up * grouped).sum(axis=-1), power, out=np.zeros_like(scales), where=power > 0)
    return codes, best.astype(np.float16), table


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [..., ceil(n bits / 8)]: codes of a row, uint8 [..., n], one behind another, lowest bit first."""
    single = np.unpackbits(codes[..., None], axis=-1, bitorder="little", count=bits)
    return np.packbits(single.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def unpacked(stored: np.ndarray, bits: int, n: int) -> np.ndarray:
    """The inverse of `packed`, uint8 [n]. Raises ValueError if `stored` has another size."""
    if stored.dtype != np.uint8 or stored.shape != (-(-n * bits // 8),):
        raise ValueError(f"{stored.dtype} {list(stored.shape)} are not {n} codes of {bits} bits")
    single = np.unpackbits(stored, bitorder="little", count=n * bits).reshape(n, bits)
    return np.packbits(single, axis=1, bitorder="little").reshape(n)
