"""Damages files at random, and watches what reading them allocates."""

import random
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)


def mutations(data: bytes, *, num: int, seed: int, focus: int) -> Iterator[bytes]:
    """`num` damaged copies: flipped, overwritten, cut, inserted and repeated bytes, mostly in the first `focus`."""
    rng = random.Random(seed)
    for _ in range(num):
        copy = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            end = min(focus, len(copy)) if rng.random() < 0.9 else len(copy)
            at = rng.randrange(max(end, 1))
            match rng.randrange(6):
                case 0:
                    copy[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    copy[at : at + 8] = bytes([rng.choice(INTERESTING)]) * 8
                case 2:
                    del copy[at : at + rng.randrange(1, 9)]
                case 3:
                    copy[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
                case 4:
                    del copy[at:]
                case 5:
                    copy[at:at] = copy[at : at + rng.randrange(1, 65)]
        yield bytes(copy)


@dataclass
class Peak:
    num_bytes: int = 0


@contextmanager
def peak_allocation() -> Iterator[Peak]:
    """The most memory that Python and numpy held at once inside, beyond what they held before."""
    peak = Peak()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield peak
        peak.num_bytes = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
