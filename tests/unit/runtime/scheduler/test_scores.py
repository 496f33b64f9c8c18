import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.runtime.messages import as_ints
from anabranch.runtime.scheduler.scores import ScoreTask, Trie, build_tries

choices_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=8)


def path_to(trie: Trie, node: int) -> tuple[int, ...]:
    tokens: list[int] = []
    while node >= 0:
        tokens.append(trie.token_ids[node])
        node = trie.parents[node]
    return tuple(reversed(tokens))


def test_common_beginnings_are_one_path_and_last_tokens_need_no_node() -> None:
    (trie,) = build_tries([(1, 2, 3), (1, 2, 4), (5,)], max_nodes=10)
    assert [path_to(trie, node) for node in range(trie.num_nodes)] == [(1,), (1, 2)]
    assert {(*path_to(trie, n), t) for n, t in zip(trie.target_nodes, trie.target_token_ids)} == {
        (1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,),
    }  # fmt: skip


def test_a_choice_that_begins_another_shares_all_of_it() -> None:
    (trie,) = build_tries([(1, 2), (1, 2, 3)], max_nodes=10)
    assert trie.num_nodes == 2 and len(trie.target_nodes) == 3
    assert trie.places[0] == trie.places[1][:2]


@given(choices_of, st.integers(1, 12))
def test_tries_hold_exactly_the_prefixes_that_are_needed(choices: list[tuple[int, ...]], max_nodes: int) -> None:
    seen: set[int] = set()
    for trie in build_tries(choices, max_nodes):
        members = [choices[i] for i in trie.places]
        seen |= set(trie.places)
        paths = [path_to(trie, node) for node in range(trie.num_nodes)]
        assert sorted(paths) == sorted({choice[:k] for choice in members for k in range(1, len(choice))})
        assert all(parent < node for node, parent in enumerate(trie.parents))
        assert trie.num_nodes <= max_nodes or len(set(members)) == 1
        for index, places in trie.places.items():
            for k, place in enumerate(places):
                prefix = path_to(trie, trie.target_nodes[place])
                assert (*prefix, trie.target_token_ids[place]) == choices[index][: k + 1]
    assert seen == set(range(len(choices)))


@given(choices_of, st.integers(1, 6))
def test_results_come_back_by_choice_and_token(choices: list[tuple[int, ...]], max_nodes: int) -> None:
    def value(prefix: tuple[int, ...]) -> float:
        return -float(sum((token + 1) * 4**i for i, token in enumerate(prefix)))

    task = ScoreTask(choices, max_nodes)
    while not task.is_done:
        trie = task.trie
        prefixes = [(*path_to(trie, n), t) for n, t in zip(trie.target_nodes, trie.target_token_ids)]
        logprobs = np.array([value(prefix) for prefix in prefixes], "<f4").tobytes()
        task.take(logprobs, np.array([prefix[-1] == 0 for prefix in prefixes], np.uint8).tobytes())
    logprobs, is_greedy = task.result()
    for choice, found, greedy in zip(choices, logprobs, is_greedy, strict=True):
        assert found == tuple(value(choice[: k + 1]) for k in range(len(choice)))
        assert greedy == tuple(token == 0 for token in choice)


def test_an_answer_of_the_wrong_length_is_our_mistake() -> None:
    task = ScoreTask([(1, 2)], 4)
    with pytest.raises(AssertionError, match="targets"):
        task.take(np.zeros(1, "<f4").tobytes(), b"\0")


def test_the_message_names_row_parents_and_targets() -> None:
    (trie,) = build_tries([(7, 8)], max_nodes=4)
    message = trie.message(row=3)
    assert message.row == 3
    assert as_ints(message.parents).tolist() == [-1]
    assert as_ints(message.target_nodes).tolist() == [-1, 0]
    assert as_ints(message.target_token_ids).tolist() == [7, 8]
