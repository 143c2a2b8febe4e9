"""Electron counts of densities settle what an atom of each element brings, or say that they do not."""

import pytest

from tomat.data.density.valences import settled_valences

NACL, CAF2, MG, LIF = {11: 1, 17: 1}, {20: 1, 9: 2}, {12: 2}, {3: 1, 9: 1}


@pytest.mark.parametrize(
    ("densities", "known", "expected"),
    [
        ([(NACL, 8.0)], {}, {}),
        ([(NACL, 8.001), ({11: 2}, 2.0)], {}, {11: 1, 17: 7}),
        # 16 electrons of CaF2 are shared by no whole numbers in the smallest solution; what is settled beside it stays.
        ([(CAF2, 16.0), (NACL, 8.0), (MG, 4.0)], {}, {12: 2}),
        ([(NACL, 8.0)], {11: 1.0}, {17: 7}),
        ([(NACL, 8.0)], {11: 1.0, 17: 7.0}, {}),
        ([(NACL, 8.0), (LIF, 8.0)], {11: 7.0}, {17: 1}),
        # Two sets of pseudopotentials.
        ([(NACL, 8.0), (NACL, 14.0), (MG, 4.0)], {}, {}),
        ([(MG, 4.6)], {}, {}),
        ([], {}, {}),
    ],
)
def test_what_counts_settle(densities, known, expected):
    assert settled_valences([row for row, _ in densities], [n for _, n in densities], known) == expected
