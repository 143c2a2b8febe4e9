"""Radial functions around an atom: cubic B-splines that are fine near the nucleus and end at a radius. The promolecule
is fitted with them; `model/environment.py` evaluates the same functions in JAX."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tomat.base.errors import TomatError


@dataclass(frozen=True)
class RadialBasis:
    """`n` functions of the distance r, all zero with value, slope and curvature at `cutoff_a`, all flat at r = 0.

    Function k is the cubic B-spline `B(s - k) + B(s + k)` (for k = 0 `B(s)`) of the stretched distance
    `s = (n + 1) log(1 + r / stretch_a) / log(1 + cutoff_a / stretch_a)`, with
    `B(x) = (max(0, 2 - |x|)^3 - 4 max(0, 1 - |x|)^3) / 6` (de Boor, A Practical Guide to Splines, 1978, on unit
    knots). The mirrored half makes each function even in r: a pseudopotential's density has no cusp at the nucleus.
    """

    n: int = 16
    """Functions."""
    cutoff_a: float = 5.0
    """Distance from which on all are zero, A."""
    stretch_a: float = 0.5
    """Knots are uniform in log(1 + r / stretch_a): 16 lie 0.07 A apart at the nucleus, 0.35 A at 2 A."""

    def __post_init__(self) -> None:
        if self.n < 4 or not self.cutoff_a > 0 or not self.stretch_a > 0:
            raise TomatError(f"found {self}; expected at least 4 functions and positive lengths.")

    @property
    def scale(self) -> float:
        """s is this times log(1 + r / stretch_a)."""
        return (self.n + 1) / float(np.log1p(self.cutoff_a / self.stretch_a))

    def __call__(self, distance_a: np.ndarray) -> np.ndarray:
        """The functions at distances: `[...]` in A to float64 `[..., n]`."""
        s = self.scale * np.log1p(np.asarray(distance_a, dtype=np.float64)[..., None] / self.stretch_a)
        k = np.arange(self.n)
        return _cubic(s - k) + np.where(k > 0, _cubic(s + k), 0.0)

    def nonzero(self, distance_a: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same, four functions a distance: pairs of which function, int `[m]`, and its value there, `[m]`."""
        s = self.scale * np.log1p(distance_a / self.stretch_a)
        knot = s.astype(np.int64)
        u = s - knot
        v = 1 - u
        pieces = v * v * v, (3 * u - 6) * u * u + 4, (3 * v - 6) * v * v + 4, u * u * u
        for place, piece in enumerate(pieces, start=-1):
            function = np.abs(knot + place)
            # Beyond the last function the value counts for nothing.
            yield np.minimum(function, self.n - 1), np.where(function < self.n, piece / 6.0, 0.0)


def _cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    return (np.maximum(0.0, 2.0 - x) ** 3 - 4.0 * np.maximum(0.0, 1.0 - x) ** 3) / 6.0
