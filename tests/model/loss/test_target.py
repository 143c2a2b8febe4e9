import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.tokens.vocabulary import DENSITY_START
from tomat.model.loss.target import DensityTarget

VALUES = np.concatenate([[0.0], np.geomspace(1e-3, 6.0, 23)]).astype(np.float32)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (VALUES[:-1], r"shape \(23,\) and there are 24"),
        (VALUES[::-1], "does not increase from bin 0"),
        (np.where(np.arange(24) == 3, np.nan, VALUES), "1 of 24 densities"),
    ],
)
def test_refuses_a_table_that_is_none(table, message):
    with pytest.raises(TomatError, match=message):
        DensityTarget(24, table)


def test_values_are_there_where_one_token_has_a_density():
    target = DensityTarget(24, VALUES)
    assert target.has_values and target.density_end == DENSITY_START + 24
    np.testing.assert_array_equal(target.values, VALUES.astype(np.float64))
    assert not DensityTarget(24, None).has_values
    # The table of two-token data is of no use to the loss, and nothing is asked of it.
    assert not DensityTarget(24, VALUES[::-1], tokens_per_voxel=2).has_values
