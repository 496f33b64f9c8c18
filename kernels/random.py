"""Random numbers without state: a number is a pure function of (seed, branch path, position).

So a draw depends on nothing else: not on the neighbours in a batch, on preemption, on a restart, or on the order of steps.

`seed` belongs to the request or its branch. `path` is 64 bits that name the branch in its fork tree: siblings with one seed draw
different numbers. `position` is the index, in its branch, of the token to be sampled.
"""

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: tuple[U32, U32, U32, U32], key: tuple[U32, U32]) -> tuple[U32, U32, U32, U32]:
    """Philox4x32-10 of each element: four random words.

    Source   Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; test vectors of Random123
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_ROUNDS):
        product0 = c0.astype(np.uint64) * _MULTIPLIERS[0]
        product1 = c2.astype(np.uint64) * _MULTIPLIERS[1]
        c0, c1, c2, c3 = _high(product1) ^ c1 ^ k0, _low(product1), _high(product0) ^ c3 ^ k1, _low(product0)
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]  # arrays: wraps silently, as it must
    return c0, c1, c2, c3


def uniform(seeds: U64, paths: U64, positions: U64) -> NDArray[np.float64]:
    """One number in [0, 1) per element, with 53 random bits. Key: the seed; counter: position, then path."""
    columns = [np.atleast_1d(np.asarray(column, dtype=np.uint64)) for column in (seeds, paths, positions)]
    seeds, paths, positions = np.broadcast_arrays(*columns)
    counter = (_low(positions), _high(positions), _low(paths), _high(paths))
    x0, x1, _, _ = philox4x32(counter, (_low(seeds), _high(seeds)))
    return ((x0 >> np.uint32(5)) * float(1 << 26) + (x1 >> np.uint32(6))) / float(1 << 53)


def _low(words: U64) -> U32:
    return (words & _LOW).astype(np.uint32)


def _high(words: U64) -> U32:
    return (words >> _HALF).astype(np.uint32)
