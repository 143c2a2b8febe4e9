import numpy as np
import pytest

from tomat.data.dataset.split import held_out_compositions

SALTS = [
    (f"{a}{b}", {a: 4, b: 4})
    for a in ("Li", "Na", "K", "Mg", "Ca") for b in ("F", "Cl", "Br") for _ in range(2)
]  # fmt: skip
SOLIDS = [*SALTS, ("Na", {"Na": 2}), ("CaF2", {"Ca": 1, "F": 2})]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_composition_is_on_one_side_and_its_elements_on_the_other(seed, share):
    held = held_out_compositions(SOLIDS, share, seed)
    rest = [atoms for formula, atoms in SOLIDS if formula not in held]
    n_held = len(SOLIDS) - len(rest)
    assert 0 < n_held <= round(share * len(SOLIDS))
    known = {symbol for atoms in rest for symbol in atoms}
    assert all(set(atoms) <= known for formula, atoms in SOLIDS if formula in held)
    assert held == held_out_compositions(SOLIDS[::-1], share, seed)


def test_seeds_differ():
    assert len({held_out_compositions(SOLIDS, 0.1, seed) for seed in range(10)}) > 3


def test_valences_are_settled_where_they_can_be():
    """Of rock salts alone no element's electrons can be told from its partner's; a metal settles what it touches."""
    rest = [atoms for formula, atoms in SOLIDS if formula not in held_out_compositions(SOLIDS, 0.1, 0)]
    elements = sorted({symbol for atoms in rest for symbol in atoms})
    matrix = [[atoms.get(symbol, 0) for symbol in elements] for atoms in rest]
    assert np.linalg.matrix_rank(matrix) == len(elements)
    assert held_out_compositions(SALTS, 0.1, 0)


@pytest.mark.parametrize(
    "materials",
    [
        [("Si", {"Si": 2})] * 3,
        [("NaCl", {"Na": 1, "Cl": 1}), ("Si", {"Si": 2})],
        [],
    ],
)
def test_where_none_can_be_held_out_none_is(materials):
    assert held_out_compositions(materials, 0.5, 0) == ()


def test_a_share_of_nothing_holds_nothing_out():
    assert held_out_compositions(SOLIDS, 0.0, 0) == ()
