"""Known ways in which a scheduler gets stuck, unfair, wasteful or wrong, each as one scenario."""

import random

import pytest
from support.scheduling import GREEDY, expect_all, finished, make_engine, prompt, stats_of, submit, tokens_of

from anabranch.radix.invariants import check
from anabranch.runtime.config import CacheConfig
from anabranch.runtime.messages import (
    AbortRequests,
    CloseBranches,
    Finished,
    ForkBranch,
    Grammar,
    JoinBranch,
    OpenBranch,
    Produced,
    Refused,
    SamplingParams,
    Submit,
    SubmitScore,
    ints,
)
from anabranch.runtime.scheduler.paths import child_path
from anabranch.runtime.testing import FakeEngine

# ---------------------------------------------------------------- usage


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_usage_of_a_warm_run_counts_each_prompt_token_once(page_size: int) -> None:
    engine = make_engine(page_size=page_size, num_pages=64)
    text = prompt(1, 87)
    submit(engine, 1, text)
    cold = finished(engine.run_until_idle())[1].usage
    submit(engine, 2, text)
    warm = finished(engine.run_until_idle())[2].usage
    assert (cold.prompt_tokens, cold.cached_tokens, cold.computed_tokens) == (87, 0, 87)
    assert (warm.prompt_tokens, warm.cached_tokens, warm.computed_tokens) == (87, 86, 1)


def test_a_prompt_of_whole_pages_that_is_cached_computes_its_last_token_again() -> None:
    engine = make_engine(page_size=16)
    text = prompt(2, 64)
    submit(engine, 1, text)
    first = engine.run_until_idle()
    submit(engine, 2, text)
    second = engine.run_until_idle()
    assert finished(second)[2].usage.cached_tokens == 63
    assert tokens_of(first, 1) == tokens_of(second, 2)


def test_tokens_computed_again_after_preemption_are_no_cache_hit() -> None:
    engine = make_engine(num_pages=16, page_size=4, max_slots=2)
    expect_all(engine)
    for number in (1, 2):
        submit(engine, number, prompt(number, 20), max_tokens=24)
    ended = finished(engine.run_until_idle())
    assert ended[2].usage.num_preemptions >= 1
    for usage in (ended[1].usage, ended[2].usage):
        assert usage.cached_tokens == 0 and usage.computed_tokens == usage.prompt_tokens == 20
    assert ended[2].usage.recomputed_tokens > 0 and ended[1].usage.recomputed_tokens == 0


# ---------------------------------------------------------------- progress


def test_two_long_prompts_that_do_not_fit_together_take_turns() -> None:
    engine = make_engine(num_pages=26, page_size=4, budget=16, context_length=256)
    for number in (1, 2):
        submit(engine, number, prompt(number, 80), max_tokens=4)
    ended = finished(engine.run_until_idle())
    assert set(ended) == {1, 2}
    assert sum(end.usage.recomputed_tokens for end in ended.values()) == 0
    assert all(end.usage.num_preemptions == 0 for end in ended.values())


def test_the_oldest_request_is_never_preempted() -> None:
    engine = make_engine(num_pages=24, page_size=4, max_slots=6, vocab_size=8)
    expect_all(engine)
    for number in range(1, 7):
        submit(engine, number, prompt(number, 9, 8), max_tokens=60)
    ended = finished(engine.run_until_idle())
    assert set(ended) == set(range(1, 7))
    assert ended[1].usage.num_preemptions == 0 and any(end.usage.num_preemptions for end in ended.values())


def test_preemptions_of_one_request_are_bounded() -> None:
    engine = make_engine(num_pages=20, page_size=4, max_slots=8, vocab_size=8, max_preemptions=2)
    expect_all(engine)
    for number in range(1, 30):
        submit(engine, number, prompt(number, 8, 8), max_tokens=40)
    ended = finished(engine.run_until_idle(20_000))
    assert len(ended) == 29
    assert max(end.usage.num_preemptions for end in ended.values()) <= 2 + 1


def test_a_cold_request_under_a_stream_of_hot_ones_starts_within_the_stated_bound() -> None:
    engine = make_engine(num_pages=64, page_size=4, max_slots=2, budget=16)
    policy, line = engine.scheduler.state.policy, engine.scheduler.state.line
    hot, cold, number = prompt(7, 40), 10_000, 1
    submit(engine, number, [*hot, 1], 2)
    engine.run_until_idle()
    started: list[int] = []
    ahead = 0
    for tick in range(300):
        for _ in range(12 - len(line)):  # never fewer than a dozen hot ones in the line
            number += 1
            submit(engine, number, [*hot, number % 64, number // 64], 2)
        if tick == 20:
            ahead, first_after = len(line), len(started)
            submit(engine, cold, prompt(8, 40), 2)
        started += [e.request_id for e in engine.tick() if isinstance(e, Produced) and e.request_id not in started]
        if cold in started:
            break
    assert cold in started, "the cold request starves"
    passed = started.index(cold) - first_after
    assert passed <= (ahead + 1) * policy.fifo_every + 2
    assert passed > 3, "hot ones go first, or the test shows nothing"


def test_a_large_request_at_the_head_does_not_block_small_ones_and_starts_at_last() -> None:
    engine = make_engine(num_pages=40, page_size=4, max_slots=8, hold_after=10, fifo_every=2)
    submit(engine, 1, prompt(1, 60), max_tokens=30)  # most of the pool for a while
    for _ in range(4):
        engine.tick()
    submit(engine, 2, prompt(2, 120), max_tokens=4)  # does not fit beside it
    for number in range(3, 8):
        submit(engine, number, prompt(number, 8), max_tokens=2)
    for _ in range(14):
        engine.tick()
    done = finished(engine.events)
    assert set(range(3, 8)) <= set(done) and 2 not in done, "small ones run meanwhile"
    number, admitted_after = 100, 0
    while 2 not in {e.request_id for e in engine.events if isinstance(e, Produced)}:
        number += 1
        submit(engine, number, prompt(number, 30), max_tokens=12)  # a stream that would keep the pool busy for ever
        engine.tick()
        admitted_after += 1
        assert admitted_after < 300, "the large request starves"


def test_the_queue_opens_again_after_a_wave_with_grammars_and_aborts() -> None:
    engine = make_engine(num_pages=48, page_size=4, max_slots=8, vocab_size=8)
    rng = random.Random(5)
    doomed = []
    for number in range(1, 301):
        grammar = Grammar("regex", f"{rng.randint(1, 6)}:{rng.randint(0, 2)}") if number % 3 == 0 else None
        submit(engine, number, prompt(number, rng.randint(1, 20), 8), 8, params=SamplingParams(seed=number, grammar=grammar))
        if number % 3 == 1:
            doomed.append(number)
        if rng.random() < 0.3:
            engine.tick()
        if doomed and rng.random() < 0.4:
            engine.send(AbortRequests((doomed.pop(),)))
    engine.send(AbortRequests(tuple(doomed)))
    engine.run_until_idle()
    ends = [e.request_id for e in engine.events if isinstance(e, Finished | Refused)]
    assert sorted(ends) == list(range(1, 301)), "each ends exactly once"
    assert stats_of(engine)["waiting"] == 0
    submit(engine, 999, prompt(1, 5, 8), 3)
    assert 999 in finished(engine.run_until_idle())


def test_cancelling_preempted_requests_leaves_nothing_behind() -> None:
    engine = make_engine(num_pages=16, page_size=4, max_slots=6, vocab_size=8)
    expect_all(engine)
    for number in range(1, 7):
        submit(engine, number, prompt(number, 8, 8), max_tokens=30)
    for _ in range(14):
        engine.tick()
    state = engine.scheduler.state
    preempted = [r.request_id for r in state.line if r.num_preemptions]
    assert preempted
    engine.send(AbortRequests(tuple(preempted)))
    ended = finished(engine.run_until_idle())
    assert all(ended[number].reason == "abort" for number in preempted)
    assert {number for number, end in finished(engine.events).items() if end.reason == "length"} == set(range(1, 7)) - set(preempted)
    stats = stats_of(engine)
    assert stats["pages_free"] + stats["pages_cached"] == 16 and not stats["requests"] and not stats["slots_in_use"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_slot_is_taken_again_only_after_its_last_step_has_returned(depth: int) -> None:
    engine = make_engine(num_pages=12, page_size=4, max_slots=2, budget=16, depth=depth, vocab_size=8)
    rng = random.Random(3)
    model = engine.worker.model
    texts: dict[int, list[int]] = {}
    for number in range(1, 251):
        texts[number] = prompt(number % 11, rng.randint(1, 12), 8)
        submit(engine, number, texts[number], 6, params=SamplingParams(temperature=0.0, stop_token_ids=(1, 2)))
        for _ in range(rng.choice([1, 2, 5])):
            engine.tick(works=rng.random() < 0.7)
            check(engine.scheduler.state.manager)
        if rng.random() < 0.3:
            engine.send(AbortRequests((number,)))
    engine.run_until_idle()
    for number, end in finished(engine.events).items():
        expected, reason, matched = model.generate(texts[number], SamplingParams(temperature=0.0, stop_token_ids=(1, 2)), 0, 6)
        produced = tokens_of(engine.events, number)
        if end.reason == "abort":
            assert produced == expected[: len(produced)]
        else:
            assert (produced, end.reason, end.matched_token_id) == (expected, reason, matched)


# ---------------------------------------------------------------- identity


def test_a_live_id_that_comes_twice_disturbs_nobody() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 10), 6)
    engine.send(OpenBranch(2, 0, b"n"), Submit(1, 2, ints(prompt(2, 10)), 6, GREEDY))
    ended = [e for e in engine.run_until_idle() if isinstance(e, Finished | Refused)]
    assert [e.request_id for e in ended] == [1]
    assert tokens_of(engine.events, 1) == engine.worker.model.generate(prompt(1, 10), GREEDY, 0, 6)[0]
    assert stats_of(engine)["events"]["dropped_duplicate_request"] == 1


def test_namespaces_never_share_and_the_same_one_does() -> None:
    engine = make_engine()
    text = prompt(1, 40)
    cached = []
    for number, namespace in enumerate((b"one", b"two", b"one"), start=1):
        submit(engine, number, text, namespace=namespace)
        cached.append(finished(engine.run_until_idle())[number].usage.cached_tokens)
    assert cached == [0, 0, 39]


def test_a_cache_that_is_switched_off_reuses_nothing_and_changes_nothing() -> None:
    answers = []
    for cache in (CacheConfig(), CacheConfig(enabled=False)):
        engine = make_engine(cache=cache)
        for number in (1, 2):
            submit(engine, number, prompt(1, 30))
            engine.run_until_idle()
        engine.send(ForkBranch(2, (3, 4)), *[Submit(n, n, ints([n]), 4, SamplingParams(seed=1)) for n in (3, 4)])
        engine.run_until_idle()
        answers.append([tokens_of(engine.events, number) for number in (1, 2, 3, 4)])
        hits = [end.usage.cached_tokens for end in finished(engine.events).values()]
        assert any(hits) == cache.enabled
        assert stats_of(engine)["check"] == "ok"
    assert answers[0] == answers[1]


# ---------------------------------------------------------------- sharing


def test_siblings_draw_different_and_repeatable_numbers() -> None:
    answers = []
    for _ in range(2):
        engine = make_engine()
        engine.send(OpenBranch(1, 0, b"n"), Submit(1, 1, ints(prompt(1, 20)), 0))
        engine.send(ForkBranch(1, (2, 3, 4)))
        engine.send(*[Submit(n, n, ints([]), 8, SamplingParams(temperature=1.0, seed=5)) for n in (2, 3, 4)])
        engine.run_until_idle()
        answers.append([tokens_of(engine.events, n) for n in (2, 3, 4)])
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0]}) == 3
    model = engine.worker.model
    for index, tokens in enumerate(answers[0]):
        assert tokens == model.generate(prompt(1, 20), SamplingParams(temperature=1.0, seed=5), child_path(0, index), 8)[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_arrive_together_compute_their_common_prefix_once(depth: int) -> None:
    engine = make_engine(num_pages=200, budget=16, depth=depth)
    shared = prompt(1, 100)
    for number in range(1, 7):
        submit(engine, number, [*shared, number, number], 2)
    ended = finished(engine.run_until_idle())
    computed = sum(end.usage.computed_tokens for end in ended.values())
    assert computed == 100 + 6 * 2
    assert any(end.usage.wait_reason == "WaitsForPrefix" for end in ended.values())


def tree_search(engine: FakeEngine, *, root: int, width: int, levels: int, length: int) -> tuple[int, int]:
    """Fork, generate, keep the first `width`; returns (tokens computed, distinct tokens needed)."""
    next_id = 1
    engine.send(OpenBranch(1, 0, b"n"))
    level, texts = [1], {1: prompt(1, root)}
    pending: dict[int, list[int]] = {1: texts[1]}  # tokens that the branch has to append first
    distinct: set[tuple[int, ...]] = {tuple(texts[1][: i + 1]) for i in range(root)}
    for _ in range(levels):
        children = []
        for branch in level:
            ids = tuple(range(next_id + 1, next_id + 1 + width))
            next_id += width
            engine.send(ForkBranch(branch, ids))
            for child in ids:
                texts[child] = texts[branch]
                engine.send(Submit(child, child, ints(pending[branch]), length, SamplingParams(temperature=1.0, seed=9)))
            children += ids
        engine.run_until_idle()
        for child in children:
            generated = tokens_of(engine.events, child)
            text = texts[child] + generated
            distinct |= {tuple(text[: i + 1]) for i in range(len(texts[child]), len(text) - 1)}  # the last one is not needed yet
            texts[child], pending[child] = text, []
        kept = children[:width]
        distinct |= {tuple(texts[child]) for child in kept if _ < levels - 1}
        engine.send(CloseBranches(tuple(set(children) - set(kept)), superseded=True))
        level = kept
    engine.run_until_idle()
    return engine.worker.num_computed, len(distinct)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_tree_search_computes_each_distinct_token_once(depth: int) -> None:
    engine = make_engine(num_pages=600, page_size=16, max_slots=16, budget=64, depth=depth, context_length=1024)
    computed, distinct = tree_search(engine, root=512, width=4, levels=3, length=32)
    assert computed == distinct
    assert stats_of(engine)["check"] == "ok"


def test_without_shared_logits_siblings_compute_their_last_token_each() -> None:
    engine = make_engine(num_pages=600, page_size=16, max_slots=16, budget=64, context_length=1024, share_logits=False)
    computed, distinct = tree_search(engine, root=512, width=4, levels=3, length=32)
    assert computed - distinct >= 3 * (1 + 4 + 4), "three siblings repeat at least one token at each fork"


def test_rows_of_siblings_are_neighbours_and_form_a_group() -> None:
    engine = make_engine(num_pages=200, min_shared_tokens=16)
    submit(engine, 50, prompt(5, 30), 40)
    engine.send(OpenBranch(1, 0, b"n"), Submit(1, 1, ints(prompt(1, 40)), 0), ForkBranch(1, (2, 3, 4)))
    engine.send(*[Submit(n, n, ints([n]), 30, GREEDY) for n in (2, 3, 4)])
    seen = []
    for _ in range(30):
        engine.tick()
        if engine.decision.plan is not None:
            seen.append(engine.decision.plan.groups)
    groups = [group for plan in seen for group in plan]
    assert groups and max(group.last_row - group.first_row for group in groups) == 3
    assert {group.num_tokens for group in groups if group.last_row - group.first_row == 3} == {40}
    assert len(set(seen[-5:])) == 1, "groups keep their place from step to step"


def test_join_lets_the_parent_go_on_from_the_winner_without_computing_anything() -> None:
    engine = make_engine(num_pages=200)
    engine.send(OpenBranch(1, 0, b"n"), Submit(1, 1, ints(prompt(1, 40)), 0), ForkBranch(1, (2, 3)))
    engine.send(*[Submit(n, n, ints([n]), 10, SamplingParams(seed=n)) for n in (2, 3)])
    engine.run_until_idle()
    engine.send(JoinBranch(1, 3), CloseBranches((2,), superseded=True), Submit(9, 1, ints([7]), 2, GREEDY))
    end = finished(engine.run_until_idle())[9]
    assert end.usage.prompt_tokens == 40 + 1 + 10 + 1
    assert end.usage.computed_tokens == 2, "the winner's last token, and the new one"


def test_scores_leave_no_trace_and_cost_one_row() -> None:
    engine = make_engine(num_pages=64, budget=128)
    engine.send(OpenBranch(1, 0, b"n"), Submit(1, 1, ints(prompt(1, 30)), 0))
    engine.run_until_idle()
    before = engine.worker.num_computed
    choices = [[5, 6, i] for i in range(20)] + [[7]]
    engine.send(SubmitScore(2, 1, ints([3]), tuple(map(ints, choices))))
    end = finished(engine.run_until_idle())[2]
    assert end.length == 31 and end.usage.num_steps == 1
    assert engine.worker.num_computed - before == 1 + 2, "the appended token, and the choices' common 5 6"
    submit(engine, 3, [*prompt(1, 30), 3, 5, 6, 1], 1)
    assert finished(engine.run_until_idle())[3].usage.cached_tokens == 31


# ---------------------------------------------------------------- fairness


def test_a_program_with_many_requests_does_not_hold_up_one_with_few() -> None:
    engine = make_engine(num_pages=200, max_slots=2, fair_quantum=32)
    for number in range(1, 60):
        submit(engine, number, prompt(number, 16), 4, program=1)
    for _ in range(12):
        engine.tick()
    submit(engine, 100, prompt(100, 16), 4, program=2)
    for _ in range(16):
        engine.tick()
    assert 100 in finished(engine.events)
    assert len(finished(engine.events)) < 30


def test_higher_priority_goes_first() -> None:
    engine = make_engine(num_pages=200, max_slots=1, fifo_every=100)
    submit(engine, 1, prompt(1, 8), 4)
    engine.tick()
    for number in (2, 3):
        submit(engine, number, prompt(number, 8), 2)
    submit(engine, 4, prompt(4, 8), 2, priority=5)
    ends = list(finished(engine.run_until_idle()))
    assert ends[:2] == [1, 4]
