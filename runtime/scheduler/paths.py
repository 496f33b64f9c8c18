"""Branch paths: 64 bits that name a branch in its fork tree, so that siblings with one seed draw different numbers.

The root of a tree has path 0. A child's path mixes its parent's with the running index of the child; a rollback mixes in the
running index of the rollback, so that what is generated anew is drawn anew. Paths depend on the order of a program's own
operations and on nothing else: not on ids, time, load or restarts.
"""

ROOT = 0

_MASK = (1 << 64) - 1
_CHILD = 0x9E3779B97F4A7C15
_RETRY = 0xC2B2AE3D27D4EB4F


def child_path(path: int, index: int) -> int:
    """The path of the `index`-th child ever forked from the branch."""
    return _mix(_mix(path ^ _CHILD) + index)


def retry_path(path: int, index: int) -> int:
    """The path of a branch after its `index`-th rollback."""
    return _mix(_mix(path ^ _RETRY) + index)


def _mix(x: int) -> int:
    """A bijection of 64-bit words in which every input bit flips about half of the output bits.

    Source   Stafford 2011, variant 13 of the MurmurHash3 finalizer
    """
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
