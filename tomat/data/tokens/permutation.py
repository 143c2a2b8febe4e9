"""Keyed pseudo-random permutations of [0, n), computed where they are asked for and never stored for large n.

A shuffle that resumes at any step needs `row = permutation(position)` without the history of the run, so the
permutation must be a function of the position, a key and nothing else. Two constructions, chosen by n alone, both from
Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002:

- n <= `TABLE_SIZE`: a table ("prefix cipher"). Positions are sorted by 64 random bits each, which is a uniformly random
  permutation (two equal words, the only source of bias, have probability below n^2 / 2^65 = 3e-14). Feistel networks
  are weakest exactly here: NIST SP 800-38G Rev. 1 wants at least a million elements before it trusts one with secrets.
- larger n: an alternating Feistel network on [0, a) x [0, b) with a = ceil(sqrt n), b = ceil(n / a) and modular
  addition ("generalised-Feistel cipher"), walked along its cycle until it lands below n ("cycle-walking cipher").
  a * b - n < a, so fewer than one walk in sqrt(n) takes a second step, where a power-of-two domain would waste up to
  every other one. Ten rounds, the number of FF1 in NIST SP 800-38G. The round function is the SplitMix64 finaliser
  (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; constants of Stafford's variant
  13) of the other half and a 64-bit round key.

Only what NumPy guarantees to be stable between versions is used (the raw words of Philox, integer arithmetic), so a run
resumed under another NumPy sees the same data. `Generator.permutation` gives no such guarantee (NEP 19).
"""

import hashlib
import json
import math

import numpy as np

TABLE_SIZE = 1024
"""Largest n that is served from a table: 8 KiB and about 0.1 ms to build."""

N_ROUNDS = 10
"""Feistel rounds, as in FF1 (NIST SP 800-38G)."""

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_32 = np.uint64(30), np.uint64(27), np.uint64(32)

_STRIP = 8192
"""Elements worked on at a time, so that the temporaries of a round (64 KiB each) stay in the second-level cache."""


def derive_key(seed: int, *context: str | int) -> int:
    """A 128-bit key for one purpose of one run.

    Keys of different contexts are independent for every practical purpose: BLAKE2b of the JSON of `[seed, *context]`.
    Returns an integer in [0, 2**128).
    """
    text = json.dumps([int(seed), *context], separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


class KeyedPermutation:
    """A bijection of [0, n) chosen by a key. See the module's docstring for the construction.

    Raises:
        ValueError: n or key out of range.
    """

    def __init__(self, n: int, key: int):
        if not 1 <= n < 2**63:
            raise ValueError(f"a permutation needs 1 <= n < 2**63, got n = {n}")
        if not 0 <= key < 2**128:
            raise ValueError(f"a permutation key is an integer in [0, 2**128), got {key}; make one with derive_key")
        self.n = n
        words = np.random.Philox(key=key)
        self._table: np.ndarray | None = None
        self._inverse_table: np.ndarray | None = None
        if n <= TABLE_SIZE:
            self._table = np.argsort(np.asarray(words.random_raw(n)), kind="stable").astype(np.int64)
            self._inverse_table = np.argsort(self._table, kind="stable").astype(np.int64)
            return
        root = math.isqrt(n - 1) + 1
        self._left_size = np.uint64(root)
        self._right_size = np.uint64(-(-n // root))
        self._round_keys = np.asarray(words.random_raw(N_ROUNDS), dtype=np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Image of every index: int64 of the same shape. `indices`: integers in [0, n), any shape.

        Raises:
            IndexError: an index outside [0, n).
        """
        return self._map(indices, self._table, inverse=False)

    def inverse(self, images: np.ndarray) -> np.ndarray:
        """The indices that `__call__` sends to `images`: `p.inverse(p(i)) == i`. Same arguments, errors and cost."""
        return self._map(images, self._inverse_table, inverse=True)

    def _map(self, indices: np.ndarray, table: np.ndarray | None, inverse: bool) -> np.ndarray:
        indices = np.asarray(indices)
        if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= self.n):
            raise IndexError(
                f"indices of this permutation lie in [0, {self.n}), got {int(indices.min())} to {int(indices.max())}"
            )
        if table is not None:
            return table[indices.astype(np.int64)]
        flat = indices.astype(np.uint64).ravel()
        out = np.empty(flat.shape, dtype=np.int64)
        for start in range(0, flat.size, _STRIP):
            strip = flat[start : start + _STRIP]
            image = self._network(strip, inverse)
            outside = np.flatnonzero(image >= np.uint64(self.n))
            while outside.size:
                image[outside] = self._network(image[outside], inverse)
                outside = outside[image[outside] >= np.uint64(self.n)]
            out[start : start + _STRIP] = image
        return out.reshape(indices.shape)

    def _network(self, x: np.ndarray, inverse: bool) -> np.ndarray:
        """One pass of the network over uint64[k] in [0, a * b); the result lies there too."""
        halves = list(np.divmod(x, self._right_size))
        sizes = (self._left_size, self._right_size)
        mixed, wrapped = np.empty_like(x), np.empty_like(x)
        for r in reversed(range(N_ROUNDS)) if inverse else range(N_ROUNDS):
            target, other, size = halves[r % 2], halves[1 - r % 2], sizes[r % 2]
            _round_function(other, self._round_keys[r], size, mixed, wrapped)
            # Of the sum (difference) and the same moved by size, the one inside [0, size) is the smaller: the other has
            # wrapped past 2**64 or is too large by size.
            if inverse:
                np.subtract(target, mixed, out=target)
                np.add(target, size, out=wrapped)
            else:
                np.add(target, mixed, out=target)
                np.subtract(target, size, out=wrapped)
            np.minimum(target, wrapped, out=target)
        left, right = halves
        left *= self._right_size
        left += right
        return left


def _round_function(half: np.ndarray, key: np.uint64, size: np.uint64, out: np.ndarray, scratch: np.ndarray) -> None:
    """Write a pseudo-random function of `half` and `key`, uniform on [0, size), to `out`.

    The top 32 bits h of the mixed word give h * size >> 32 without a division (Lemire, "Fast Random Integer Generation
    in an Interval", 2019). size <= 2**32, so the product fits 64 bits; its bias is below size / 2**32.
    """
    np.bitwise_xor(half, key, out=out)
    np.right_shift(out, _SHIFT_30, out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, _MIX_1, out=out)
    np.right_shift(out, _SHIFT_27, out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, _MIX_2, out=out)
    # SplitMix64's last step, z ^= z >> 31, is left out: of the 32 bits used here it would change the lowest alone.
    np.right_shift(out, _SHIFT_32, out=out)
    np.multiply(out, size, out=out)
    np.right_shift(out, _SHIFT_32, out=out)
