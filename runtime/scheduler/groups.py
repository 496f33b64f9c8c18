"""Which rows of a step share the KV of a common prefix, so that a backend may read it once for all of them.

Groups are found anew only when a request takes a slot with pages that another one holds too (or a table changes under
them). When a request leaves, its group shrinks. In between, rows keep their order from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class Group:
    """Members hold the same pages for their first `num_tokens` tokens."""

    members: tuple[int, ...]
    num_tokens: int


def find_groups(tables: dict[int, np.ndarray], page_size: int, min_tokens: int) -> tuple[list[int], list[Group]]:
    """Order slots so that those with common leading pages are neighbours, and cut the order into groups.

    tables    slot -> its full pages that are worth sharing, in order
    Returns   all slots in an order, and groups of at least 2 neighbours with at least `min_tokens` tokens in common, chosen
              such that the most page reads are saved
    Cost      O(pages) comparisons in numpy, and a sort of the slots
    """
    keys = {slot: table.astype(">i4").tobytes() for slot, table in tables.items()}
    order = sorted(tables, key=lambda slot: (keys[slot], slot))
    common = [_common_pages(tables[a], tables[b]) for a, b in pairwise(order)]
    min_pages = max(1, -(-min_tokens // page_size))
    runs = _best_runs(common, 0, len(order), min_pages)[1] if order else []
    groups = [Group(tuple(order[a:b]), pages * page_size) for a, b, pages in runs]
    return order, groups


def _common_pages(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _best_runs(common: Sequence[int], first: int, last: int, min_pages: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Rows [first, last): the best of being one group, and of being cut where neighbours have least in common.

    common[i] is what rows i and i + 1 share. Returns (page reads saved, [(first, last, pages)]). Iterative in effect: a cut
    is made at every place of the least value at once, so the depth is bounded by the number of distinct values.
    """
    if last - first < 2:
        return 0, []
    least = min(common[first : last - 1])
    cuts = [first, *(i + 1 for i in range(first, last - 1) if common[i] == least), last]
    saved, runs = 0, []
    for a, b in pairwise(cuts):
        part_saved, part_runs = _best_runs(common, a, b, min_pages)
        saved += part_saved
        runs += part_runs
    as_one = (last - first - 1) * least if least >= min_pages else 0
    return (as_one, [(first, last, least)]) if as_one and as_one >= saved else (saved, runs)
