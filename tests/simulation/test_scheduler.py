"""Random programs against the real scheduler and cache, a worker that checks what its pages hold, and an oracle.

A failure names its seed: `pytest -k "seed and -17-"` runs it again.
"""

import pytest
from support.programs import Client

SHAPES = [  # pages, page size, pipeline depth, tokens per step
    (8, 16, 1, 64),
    (8, 4, 2, 16),
    (24, 4, 2, 16),
    (64, 1, 2, 16),
    (40, 1, 1, 16),
    (16, 4, 1, 64),
    (64, 4, 2, 64),
    (12, 16, 2, 64),
]


@pytest.mark.parametrize("seed", range(24))
def test_random_programs_get_the_answers_of_an_uncached_run(seed: int) -> None:
    num_pages, page_size, depth, budget = SHAPES[seed % len(SHAPES)]
    client = Client(
        seed, num_pages=num_pages, page_size=page_size, depth=depth, budget=budget, is_optimistic=seed % 2 == 1
    )
    for round_of in range(3):
        for _ in range(120):
            for _ in range(client.random.choice([0, 1, 1, 3])):
                client.act()
            client.tick()
        client.settle()
        client.check_pool_is_exact()
        assert sum(client.ended.values()) > 20 * (round_of + 1), client.ended
    client.close_everything()
