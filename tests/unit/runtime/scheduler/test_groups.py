from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.runtime.scheduler.groups import Group, find_groups


def tables(*pages: list[int]) -> dict[int, np.ndarray]:
    return {slot: np.array(ids, np.int32) for slot, ids in enumerate(pages)}


def test_rows_with_the_same_leading_pages_become_neighbours_and_a_group() -> None:
    order, groups = find_groups(tables([1, 2, 3], [9, 8], [1, 2, 4], [1, 2]), page_size=16, min_tokens=16)
    assert [slot for slot in order if slot != 1] == [3, 0, 2]
    assert groups == [Group((3, 0, 2), 32)]


def test_too_short_a_prefix_makes_no_group() -> None:
    _, groups = find_groups(tables([1, 2], [1, 3]), page_size=4, min_tokens=8)
    assert groups == []


def test_a_group_is_cut_where_that_saves_more_reads() -> None:
    pair_a, pair_b = [1, *range(10, 30)], [1, *range(50, 70)]
    _, groups = find_groups(tables([*pair_a, 101], [*pair_b, 102], [*pair_a, 103], [*pair_b, 104]), page_size=1, min_tokens=1)
    assert sorted(groups, key=lambda g: g.members) == [Group((0, 2), 21), Group((1, 3), 21)]


def test_one_group_is_kept_where_cutting_would_save_less() -> None:
    shared = list(range(100, 140))
    _, groups = find_groups(tables([*shared, 1, 5], [*shared, 1, 6], [*shared, 2], [*shared, 3]), page_size=1, min_tokens=1)
    assert groups == [Group((0, 1, 2, 3), 40)] or {g.num_tokens for g in groups} == {40}


page_lists = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


@given(page_lists, st.integers(1, 3))
def test_groups_are_disjoint_runs_of_the_order_and_really_share(pages: list[list[int]], min_tokens: int) -> None:
    found = tables(*pages)
    order, groups = find_groups(found, page_size=1, min_tokens=min_tokens)
    assert sorted(order) == sorted(found)
    place = {slot: i for i, slot in enumerate(order)}
    members = [slot for group in groups for slot in group.members]
    assert len(members) == len(set(members))
    for group in groups:
        places = [place[slot] for slot in group.members]
        assert places == list(range(places[0], places[0] + len(places))) and len(places) >= 2
        assert group.num_tokens >= min_tokens
        for a, b in combinations(group.members, 2):
            assert found[a][: group.num_tokens].tolist() == found[b][: group.num_tokens].tolist()
            assert len(found[a]) >= group.num_tokens
