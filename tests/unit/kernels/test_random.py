import numpy as np
import pytest

from anabranch.kernels.random import philox4x32, uniform

# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(values: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint32) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter: tuple, key: tuple, expected: tuple) -> None:
    assert tuple(int(word[0]) for word in philox4x32(words(counter), words(key))) == expected


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    seeds, paths, positions = rng.integers(0, 2**64, (3, 50), dtype=np.uint64)
    together = uniform(seeds, paths, positions)
    alone = [uniform(seeds[i : i + 1], paths[i : i + 1], positions[i : i + 1])[0] for i in range(50)]
    assert together.tolist() == alone


def test_every_half_of_seed_path_and_position_counts() -> None:
    base = uniform(np.uint64(1), np.uint64(2), np.uint64(3))[0]
    for shift in (0, 31, 32, 63):
        bit = np.uint64(1 << shift)
        assert uniform(np.uint64(1) ^ bit, np.uint64(2), np.uint64(3))[0] != base
        assert uniform(np.uint64(1), np.uint64(2) ^ bit, np.uint64(3))[0] != base
        assert uniform(np.uint64(1), np.uint64(2), np.uint64(3) ^ bit)[0] != base


def test_draws_fill_the_unit_interval_evenly() -> None:
    draws = uniform(np.uint64(7), np.uint64(0), np.arange(100_000, dtype=np.uint64))
    assert draws.min() >= 0 and draws.max() < 1
    counts = np.histogram(draws, bins=10, range=(0, 1))[0]
    assert abs(counts - 10_000).max() < 500
