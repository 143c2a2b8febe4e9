"""A codec of few densities."""

import numpy as np
from numpy.typing import ArrayLike

from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import LloydMaxCodec
from tomat.data.codec.ratios import fit_codec


def fitted_codec(bins: int, *densities: ArrayLike) -> LloydMaxCodec:
    """Of so many bins, for these densities, e/Å³."""
    histogram = DensityHistogram()
    for each in densities:
        histogram.add(np.asarray(each, np.float32))
    return fit_codec(histogram, bins)
