"""The cost of the cache comes from pairs in alternating order, on text that is never found again."""

from typing import Any

import pytest
from support.bench import ByteVocabulary, FakeTarget

from anabranch.runtime.bench import cache_cost

VOCABULARY: Any = ByteVocabulary()


def test_pairs_alternate_their_order_and_each_side_gets_the_same_text() -> None:
    log: list[str] = []

    class Noted(FakeTarget):
        def __init__(self, side: str) -> None:
            super().__init__()
            self.side = side

        def answer(self, *arguments: Any) -> Any:
            log.append(self.side)
            return super().answer(*arguments)

    with_cache, without = Noted("with"), Noted("without")
    result = cache_cost.run((with_cache, without), VOCABULARY, repeats=2, small=True)
    order = log[::4]  # four requests a round
    assert order == ["with", "without", "without", "with", "with", "without"]
    assert with_cache.prompts == without.prompts and len(set(with_cache.prompts)) == len(with_cache.prompts)
    assert len(result["ratio"]["values"]) == 2 and with_cache.open_nodes == 0
    assert result["cost_low"] <= result["cost"] <= result["cost_high"] and "cost of the cache" in cache_cost.show(result)


def test_planning_is_compared_by_the_mean_of_a_step() -> None:
    result = cache_cost.planning_cost((lambda: (3000.0, 30), lambda: (0.0, 0)))
    assert result == {"planning_with_us": 100.0, "planning_without_us": 0.0}


def test_the_interval_holds_the_median_and_narrows_with_pairs() -> None:
    few, many = [1.0, 1.02, 0.98, 1.3, 0.9], [1.0, 1.02, 0.98, 1.3, 0.9] * 20
    (a, b), (c, d) = cache_cost.interval(few), cache_cost.interval(many)
    assert a <= 1.0 <= b and c <= 1.0 <= d and d - c < b - a
    assert cache_cost.interval(few) == (a, b), "seeded"
    assert cache_cost.interval([1.25]) == pytest.approx((1.25, 1.25))
