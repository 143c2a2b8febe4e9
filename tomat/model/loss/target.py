"""What a loss has to know of the data's density tokens. No JAX here."""

from dataclasses import dataclass

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.tokens.vocabulary import DENSITY_START, PAD


@dataclass(frozen=True, eq=False)
class DensityTarget:
    """The density ids that a model predicts, and the densities they stand for."""

    n_density_tokens: int
    """Number of density ids K, one for each bin of the codec."""
    value_table: np.ndarray | None
    """Density of each density id, `[n_density_tokens]`, e/A^3, increasing: the codec's medians. None where one id has
    no density (two tokens per voxel)."""
    density_start: int = DENSITY_START
    """Id of density bin 0."""
    pad_id: int = PAD
    """The id that is padding: no loss where it is the target."""
    tokens_per_voxel: int = 1
    """Of the layout. Above 1 the table is not used."""

    def __post_init__(self) -> None:
        if not self.has_values:
            return
        values, n_bins = self.values, self.n_density_tokens
        if values.shape != (n_bins,):
            raise TomatError(
                f"the table of densities has shape {values.shape} and there are {n_bins} density ids; use the table of "
                "the codec that wrote the data."
            )
        if not np.isfinite(values).all():
            bad = np.count_nonzero(~np.isfinite(values))
            raise TomatError(f"{bad} of {n_bins} densities of the table are not finite.")
        falls = np.flatnonzero(np.diff(values) <= 0)
        if falls.size:
            k = int(falls[0])
            raise TomatError(
                f"the table of densities does not increase from bin {k} ({values[k]:g} e/A^3) to bin {k + 1} "
                f"({values[k + 1]:g} e/A^3), nor at {falls.size - 1} other places; refit the codec with fewer bins."
            )

    @property
    def density_end(self) -> int:
        """The id after the last density id."""
        return self.density_start + self.n_density_tokens

    @property
    def has_values(self) -> bool:
        """Whether a density id alone has a density."""
        return self.value_table is not None and self.tokens_per_voxel == 1

    @property
    def values(self) -> np.ndarray:
        """The table as float64 `[n_density_tokens]`, e/A^3; only with `has_values`."""
        return np.asarray(self.value_table, np.float64)
