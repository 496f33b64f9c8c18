"""The scheduler's rules, one by one, over a worker that checks KV."""

import numpy as np
import pytest
from support.scheduling import (
    GREEDY,
    expect_all,
    finished,
    make_engine,
    prompt,
    reasons,
    refused,
    stats_of,
    submit,
    tick,
    tokens_of,
)

from anabranch.runtime.messages import (
    NOT_FINITE,
    AbortRequests,
    BranchExplained,
    CloseBranches,
    Error,
    ExplainBranch,
    Finished,
    Flush,
    ForkBranch,
    Grammar,
    JoinBranch,
    LeaseBranch,
    OpenBranch,
    Produced,
    QueryStats,
    Refused,
    RollbackBranch,
    SamplingParams,
    Shutdown,
    StatsReply,
    StepPlan,
    StepResult,
    StopAt,
    Submit,
    SubmitScore,
    as_ints,
    ints,
)
from anabranch.runtime.scheduler.decisions import (
    HeldFor,
    LogitsBudget,
    MaxRunning,
    NeedsPages,
    Preempted,
    TokenBudget,
    WaitsForPrefix,
)
from anabranch.runtime.scheduler.paths import child_path, retry_path
from anabranch.runtime.scheduler.policy import Policy
from anabranch.runtime.testing import FakeEngine

# ---------------------------------------------------------------- what can never run


def refusal(engine: FakeEngine, *messages: object) -> Refused:
    engine.send(*messages)  # type: ignore[arg-type]
    events = engine.run_until_idle()
    (event,) = refused(events).values()
    assert not finished(events)
    return event


def test_an_empty_prompt_is_refused_by_name() -> None:
    error = refusal(make_engine(), OpenBranch(1, 0, b"n"), Submit(1, 1, b"", 5)).error
    assert error.type == "invalid_request_error" and error.param == "prompt" and "empty" in error.message


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    engine = make_engine(context_length=20)
    error = refusal(engine, OpenBranch(1, 0, b"n"), Submit(1, 1, ints(prompt(1, 200)), 5)).error
    assert error.code == "context_length_exceeded" and "200" in error.message and "20" in error.message
    submit(engine, 2, prompt(2, 10))
    assert 2 in finished(engine.run_until_idle())


def test_a_prompt_that_can_never_fit_the_pool_is_refused_at_once_and_small_ones_run() -> None:
    engine = make_engine(num_pages=8, page_size=4)
    submit(engine, 1, prompt(1, 32))
    submit(engine, 2, prompt(2, 10))
    events = engine.tick()
    error = refused(events)[1].error
    assert error.code == "kv_capacity_exceeded" and "32" in error.message and "8 pages of 4" in error.message
    assert 2 in finished(engine.run_until_idle())


def test_a_prompt_that_fills_the_pool_but_for_one_token_runs() -> None:
    engine = make_engine(num_pages=8, page_size=4)
    submit(engine, 1, prompt(1, 31), max_tokens=9)
    end = finished(engine.run_until_idle())[1]
    assert end.reason == "length" and end.usage.completion_tokens == 2, "the pool is full of it"


@pytest.mark.parametrize("wrong", [-1, 64, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    error = refusal(make_engine(), OpenBranch(1, 0, b"n"), Submit(1, 1, ints([1, wrong, 2]), 5)).error
    assert error.type == "invalid_request_error" and str(wrong) in error.message


def test_a_request_on_an_unknown_branch_gets_its_end() -> None:
    assert refusal(make_engine(), Submit(1, 77, ints([1]), 5)).error.type == "not_found_error"


@pytest.mark.parametrize("choices", [(), (ints([1]), b"")])
def test_scores_of_nothing_are_refused(choices: tuple[bytes, ...]) -> None:
    error = refusal(make_engine(), OpenBranch(1, 0, b"n"), SubmitScore(1, 1, ints([1]), choices)).error
    assert error.param == "choices"


def test_a_full_queue_says_so() -> None:
    engine = make_engine(max_waiting=3, max_slots=1)
    for number in range(1, 7):
        submit(engine, number, prompt(number, 4))
    events = engine.run_until_idle()
    assert [event.error.type for event in refused(events).values()] == ["overloaded_error"] * 3
    assert len(finished(events)) == 3


def test_a_refused_request_leaves_its_branch_as_it_was() -> None:
    engine = make_engine(context_length=40)
    submit(engine, 1, prompt(1, 10), 2)
    engine.send(Submit(2, 1, ints(prompt(2, 60)), 5), Submit(3, 1, ints([5]), 1, GREEDY))
    end = finished(engine.run_until_idle())[3]
    assert end.usage.prompt_tokens == 10 + 2 + 1
    assert not engine.scheduler.state.requests


# ---------------------------------------------------------------- how generation ends


def test_max_tokens_zero_computes_the_prompt_and_ends_with_length() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 50), max_tokens=0)
    end = finished(engine.run_until_idle())[1]
    assert (end.reason, end.length, end.usage.computed_tokens, end.usage.completion_tokens) == ("length", 50, 50, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_generation_stops_at_the_context_end(depth: int) -> None:
    engine = make_engine(context_length=20, depth=depth)
    submit(engine, 1, prompt(1, 15), max_tokens=100)
    end = finished(engine.run_until_idle())[1]
    assert (end.reason, end.length) == ("length", 20)
    assert engine.worker.num_computed == 19, "the last token is not computed, and no step is wasted"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_stop_token_is_named_and_is_part_of_nothing(depth: int) -> None:
    engine = make_engine(depth=depth)
    free = engine.worker.model.generate(prompt(1, 10), GREEDY, 0, 12)[0]
    stop = free[6]
    params = SamplingParams(temperature=0.0, stop_token_ids=(63, stop))
    submit(engine, 1, prompt(1, 10), max_tokens=12, params=params)
    events = engine.run_until_idle()
    end, cut = finished(events)[1], free.index(stop)
    assert (end.reason, end.matched_token_id, end.length) == ("stop", stop, 10 + cut)
    assert tokens_of(events, 1) == free[:cut]
    assert engine.worker.num_computed <= 10 + cut + depth - 1, "at most one token is wasted"


def test_more_stop_ids_than_columns_are_all_honoured() -> None:
    engine = make_engine()
    free = engine.worker.model.generate(prompt(1, 10), GREEDY, 0, 12)[0]
    others = [token for token in range(64) if token not in free][:20]
    submit(engine, 1, prompt(1, 10), 12, params=SamplingParams(temperature=0.0, stop_token_ids=(*others, free[4])))
    assert finished(engine.run_until_idle())[1].matched_token_id == free[4]


@pytest.mark.parametrize("seed", range(12))
def test_each_forced_token_goes_through_the_same_checks(seed: int) -> None:
    """Stops and limits inside of a forced run: the same end as token by token."""
    engine = make_engine(vocab_size=12)
    for number in range(1, 9):
        grammar = Grammar("regex", str(3 + number))
        params = SamplingParams(seed=seed, stop_token_ids=(number % 3, 11) if number % 2 else (), grammar=grammar)
        submit(engine, number, prompt(seed * 10 + number, 6, 12), max_tokens=5 + number % 4, params=params)
    events = engine.run_until_idle()
    for number, end in finished(events).items():
        grammar = Grammar("regex", str(3 + number))
        params = SamplingParams(seed=seed, stop_token_ids=(number % 3, 11) if number % 2 else (), grammar=grammar)
        expected = engine.worker.model.generate(prompt(seed * 10 + number, 6, 12), params, 0, 5 + number % 4)
        assert (tokens_of(events, number), end.reason, end.matched_token_id) == expected
        assert end.usage.forced_tokens <= end.usage.completion_tokens


def test_a_row_that_gets_no_token_is_asked_again() -> None:
    engine = make_engine()
    params = SamplingParams(temperature=0.0, grammar=Grammar("regex", "4:3"))
    submit(engine, 1, prompt(1, 9), 10, params=params)
    events = engine.run_until_idle()
    assert tokens_of(events, 1) == engine.worker.model.generate(prompt(1, 9), params, 0, 10)[0]
    assert stats_of(engine)["events"]["asked_again"] == 3


# ---------------------------------------------------------------- stopped from outside


def test_stop_at_truncates_a_running_request() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 10), 50)
    tick(engine, 12)
    produced = tokens_of(engine.events, 1)
    assert len(produced) > 6
    engine.send(StopAt(1, 4), Submit(2, 1, ints([9]), 3, GREEDY))
    events = engine.run_until_idle()
    end = finished(events)[1]
    assert (end.reason, end.length, end.usage.completion_tokens) == ("stop", 14, 4)
    text = [*prompt(1, 10), *produced[:4], 9]
    assert tokens_of(events, 2) == engine.worker.model.generate(text, GREEDY, 0, 3)[0]


def test_stop_at_after_the_end_truncates_all_the_same_and_sends_nothing() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 10), 6)
    produced = tokens_of(engine.run_until_idle(), 1)
    engine.send(StopAt(1, 2))
    assert not [e for e in engine.run_until_idle() if isinstance(e, Finished | Refused)]
    engine.send(Submit(2, 1, ints([9]), 3, SamplingParams(seed=4)))
    events = engine.run_until_idle()
    text = [*prompt(1, 10), *produced[:2], 9]
    assert tokens_of(events, 2) == engine.worker.model.generate(text, SamplingParams(seed=4), 0, 3)[0], "the path is unchanged"


def test_stop_at_means_nothing_once_something_else_happened_on_the_branch() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 10), 6)
    engine.run_until_idle()
    engine.send(ForkBranch(1, (2,)), StopAt(1, 2), ExplainBranch(5, 1))
    events = engine.run_until_idle()
    assert next(e for e in events if isinstance(e, BranchExplained)).length == 16
    assert stats_of(engine)["events"]["dropped_late_stop"] == 1


def test_abort_of_a_waiting_request_refuses_it_and_of_a_running_one_keeps_what_it_has() -> None:
    engine = make_engine(max_slots=1)
    submit(engine, 1, prompt(1, 10), 50)
    submit(engine, 2, prompt(2, 10), 50)
    tick(engine, 6)
    engine.send(AbortRequests((1, 2)), AbortRequests((1, 2)), AbortRequests((1,)))
    events = engine.run_until_idle()
    assert refused(events)[2].error.type == "cancelled"
    end = finished(events)[1]
    assert end.reason == "abort" and end.length == 10 + len(tokens_of(engine.events, 1)) > 10
    assert len(refused(events)) + len(finished(events)) == 2


def test_a_whole_program_is_aborted_and_no_other() -> None:
    engine = make_engine()
    for number in range(1, 7):
        submit(engine, number, prompt(number, 10), 30, program=number % 2)
    tick(engine, 4)
    engine.send(Submit(9, 1, ints([1]), 3, GREEDY), AbortRequests(program_ids=(1,)))
    events = engine.run_until_idle()
    ended = finished(events)
    assert {number for number, end in ended.items() if end.reason == "abort"} == {1, 3, 5}
    assert {number for number, end in ended.items() if end.reason == "length"} == {2, 4, 6}
    assert refused(events)[9].error.type == "cancelled", "also what was queued behind"


@pytest.mark.parametrize("ticks", [0, 1, 5])
def test_a_passed_deadline_refuses_the_request_and_restores_its_branch(ticks: int) -> None:
    engine = make_engine(max_slots=1)
    submit(engine, 1, prompt(1, 10), 2)
    engine.run_until_idle()
    if ticks == 0:
        submit(engine, 7, prompt(7, 10), 60)
        tick(engine)
    engine.send(Submit(2, 1, ints(prompt(2, 10)), 60, GREEDY, deadline=engine.clock() + 1.0))
    tick(engine, ticks or 1)
    assert engine.decision.next_wakeup == pytest.approx(engine.clock() + 1.0, abs=0.1)
    engine.clock.advance(1.0)
    engine.send(Submit(3, 1, ints([3]), 1, GREEDY))
    events = engine.run_until_idle()
    assert refused(events)[2].error.type == "timeout_error"
    assert finished(events)[3].usage.prompt_tokens == 10 + 2 + 1


# ---------------------------------------------------------------- branches


def test_operations_on_a_busy_branch_wait_for_its_request() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 10), 5)
    tick(engine, 2)
    engine.send(
        ForkBranch(1, (2, 3)), Submit(12, 2, ints([7]), 2, GREEDY), RollbackBranch(1, 8), Submit(11, 1, ints([8]), 2, GREEDY)
    )
    events = engine.run_until_idle()
    ended = finished(events)
    assert ended[12].usage.prompt_tokens == 10 + 5 + 1, "the fork sees the finished request"
    assert ended[11].usage.prompt_tokens == 8 + 1


def test_paths_follow_forks_rollbacks_and_joins() -> None:
    engine = make_engine()
    params, text = SamplingParams(seed=3), prompt(1, 10)
    engine.send(OpenBranch(1, 0, b"n", path=77), Submit(1, 1, ints(text), 0), ForkBranch(1, (2,)), ForkBranch(1, (3, 4)))
    engine.send(*[Submit(n, n, b"", 5, params) for n in (2, 3, 4)])
    engine.run_until_idle()
    generate = engine.worker.model.generate
    for number, index in ((2, 0), (3, 1), (4, 2)):
        assert tokens_of(engine.events, number) == generate(text, params, child_path(77, index), 5)[0]
    engine.send(RollbackBranch(3, 10), Submit(13, 3, b"", 5, params))
    engine.send(RollbackBranch(4, 15), Submit(14, 4, b"", 5, params), JoinBranch(1, 4), Submit(15, 1, b"", 2, params))
    engine.run_until_idle()
    assert tokens_of(engine.events, 13) == generate(text, params, retry_path(child_path(77, 1), 0), 5)[0]
    longer = text + tokens_of(engine.events, 4) + tokens_of(engine.events, 14)
    assert tokens_of(engine.events, 14) == generate(longer[:15], params, child_path(77, 2), 5)[0], "nothing was rolled back"
    assert tokens_of(engine.events, 15) == generate(longer, params, child_path(77, 2), 2)[0], "the winner's path"


def test_closing_a_branch_aborts_what_runs_on_it_and_what_waits_for_it() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 10), 50)
    engine.send(Submit(2, 1, ints([1]), 5, GREEDY))
    tick(engine, 5)
    engine.send(CloseBranches((1,)), Submit(3, 1, ints([1]), 5, GREEDY))
    events = engine.run_until_idle()
    assert finished(events)[1].reason == "abort"
    assert refused(events)[2].error.type == "cancelled" and refused(events)[3].error.type == "not_found_error"
    stats = stats_of(engine)
    assert not stats["branches"] and not stats["programs"] and not stats["requests"] and not stats["slots_in_use"]


def test_a_fork_whose_parent_is_closed_first_fails_its_children() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 10), 20)
    tick(engine, 3)
    engine.send(CloseBranches((1,)), ForkBranch(1, (2,)), Submit(5, 2, ints([1]), 3, GREEDY))
    events = engine.run_until_idle()
    assert refused(events)[5].error.type == "not_found_error"
    assert not stats_of(engine)["branches"]


def test_a_lease_keeps_an_idle_branch_cached_until_its_time_is_over() -> None:
    cached = {}
    for lease_s in (0.0, 100.0):
        engine = make_engine(num_pages=16, page_size=4)
        submit(engine, 1, prompt(1, 14), 2)
        engine.run_until_idle()
        engine.send(LeaseBranch(1, engine.clock() + lease_s if lease_s else None))
        for number in range(2, 8):
            submit(engine, number, prompt(number, 30), 2)
            engine.run_until_idle()
        engine.send(Submit(9, 1, ints([3]), 1, GREEDY))
        cached[lease_s] = finished(engine.run_until_idle())[9].usage.cached_tokens
        assert stats_of(engine)["check"] == "ok"
    assert cached == {0.0: 0, 100.0: 15}


def test_a_request_that_needs_leased_pages_gets_them() -> None:
    engine = make_engine(num_pages=16, page_size=4)
    submit(engine, 1, prompt(1, 14), 2)
    engine.run_until_idle()
    engine.send(LeaseBranch(1, engine.clock() + 1000))
    submit(engine, 2, prompt(2, 60), 3)
    assert finished(engine.run_until_idle())[2].reason == "length"


def test_ids_that_nobody_knows_are_dropped_and_counted() -> None:
    engine = make_engine()
    engine.send(
        RollbackBranch(9, 0), JoinBranch(8, 9), LeaseBranch(9, 1.0), CloseBranches((9,)), ForkBranch(9, (10,)),
        StopAt(9, 1), AbortRequests((9,)), OpenBranch(1, 0, b"n"), OpenBranch(1, 0, b"n"), RollbackBranch(1, 5),
        StepResult(99),
    )  # fmt: skip
    assert engine.run_until_idle() == []
    events = stats_of(engine)["events"]
    assert events["dropped_unknown_branch"] == 5 and events["dropped_duplicate_branch"] == 1
    assert events["dropped_late_stop"] == events["dropped_late_abort"] == events["dropped_result"] == 1
    assert events["dropped_bad_rollback"] == 1


# ---------------------------------------------------------------- why something does not run


def test_reasons_say_what_is_missing() -> None:
    engine = make_engine(num_pages=16, page_size=4, max_slots=3, budget=8)
    submit(engine, 1, prompt(1, 40), 4)
    submit(engine, 2, [*prompt(1, 40), 5], 4)
    submit(engine, 3, prompt(3, 30), 4)
    tick(engine)
    found = reasons(engine)
    assert found[2] == WaitsForPrefix(1)
    assert isinstance(found[3], NeedsPages) and found[3].need > found[3].free == 6
    engine.run_until_idle()
    ended = finished(engine.events)
    assert ended[2].usage.wait_reason == "WaitsForPrefix" and ended[3].usage.wait_reason == "NeedsPages"
    assert ended[1].usage.wait_reason == ""


def test_taken_slots_are_a_reason_for_everybody_in_the_line() -> None:
    engine = make_engine(max_slots=2)
    for number in range(1, 6):
        submit(engine, number, prompt(number, 8), 20)
    tick(engine, 2)
    assert reasons(engine) == dict.fromkeys((3, 4, 5), MaxRunning(2))


def test_of_a_long_line_only_the_front_is_named() -> None:
    engine = make_engine(max_slots=1, window=4)
    for number in range(1, 21):
        submit(engine, number, prompt(number, 8), 20)
    tick(engine, 2)
    assert len(reasons(engine)) == 4 and engine.decision.num_behind == 15


def test_a_budget_that_is_used_up_is_a_reason() -> None:
    engine = make_engine(budget=16, num_pages=200)
    for number in range(1, 6):
        submit(engine, number, prompt(number, 60), 2)
    tick(engine)
    assert TokenBudget(16) in reasons(engine).values()


def test_preempted_requests_say_for_whom() -> None:
    engine = make_engine(num_pages=10, page_size=4, max_slots=2, depth=1)
    expect_all(engine)
    for number in (1, 2):
        submit(engine, number, prompt(number, 12), 30)
    seen = []
    for _ in range(30):
        engine.tick()
        seen += [reason for reason in reasons(engine).values() if isinstance(reason, Preempted)]
    assert seen and set(seen) == {Preempted(1)}


def test_room_is_kept_for_a_request_that_was_overtaken_too_often() -> None:
    engine = make_engine(num_pages=40, page_size=4, fifo_every=1, hold_after=2)
    submit(engine, 1, prompt(1, 60), 60)
    tick(engine, 3)
    submit(engine, 2, prompt(2, 130), 4)
    seen = []
    for number in range(3, 20):
        submit(engine, number, prompt(number, 6), 2)
        engine.tick()
        seen += [reason for reason in reasons(engine).values() if isinstance(reason, HeldFor)]
    assert set(seen) == {HeldFor(2)}
    assert set(finished(engine.run_until_idle())) >= {2}


# ---------------------------------------------------------------- steps


def plans_of(engine: FakeEngine, ticks: int, works_every: int = 1) -> list[StepPlan]:
    found = []
    for i in range(ticks):
        engine.tick(works=i % works_every == 0)
        if engine.decision.plan is not None:
            found.append(engine.decision.plan)
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_plans_are_in_flight_than_the_pipeline_is_deep(depth: int) -> None:
    engine = make_engine(depth=depth)
    submit(engine, 1, prompt(1, 10), 30)
    for i in range(40):
        engine.tick(works=i % 3 == 0)
        assert engine.scheduler.num_in_flight <= depth


def test_a_plan_made_ahead_of_a_result_feeds_the_token_back() -> None:
    engine = make_engine(depth=2)
    submit(engine, 1, prompt(1, 10), 8)
    engine.tick(works=False)
    engine.tick(works=False)
    prefill, ahead = engine.plans
    assert as_ints(prefill.feedback).tolist() == [0] and as_ints(ahead.feedback).tolist() == [1]
    assert ahead.token_ids == b"" and as_ints(ahead.first_pos).tolist() == [10]
    assert tokens_of(engine.run_until_idle(), 1) == engine.worker.model.generate(prompt(1, 10), GREEDY, 0, 8)[0]


def test_decode_comes_first_and_several_prompts_fill_the_rest() -> None:
    engine = make_engine(budget=16, num_pages=200, depth=1)
    submit(engine, 1, prompt(1, 4), 40)
    tick(engine, 3)
    for number in (2, 3):
        submit(engine, number, prompt(number, 40), 2)
    plans = plans_of(engine, 4)
    for plan in plans:
        assert int(as_ints(plan.num_new).sum()) <= 16
        assert 1 in as_ints(plan.num_new).tolist(), "the decode row is never left out"
    assert any((as_ints(plan.num_new) > 1).sum() == 2 for plan in plans), "two prompts in one step"


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = make_engine(budget=16, num_pages=200, depth=1)
    submit(engine, 1, prompt(1, 300), 2)
    tick(engine, 2)
    submit(engine, 2, prompt(2, 12), 2)
    tick(engine, 8)
    assert 2 in finished(engine.events) and 1 not in finished(engine.events)


def test_chunks_end_with_a_page_until_the_last() -> None:
    engine = make_engine(budget=11, page_size=4, depth=1, max_slots=4)
    submit(engine, 1, prompt(1, 30), 1)
    ends = [int(as_ints(p.first_pos)[0] + as_ints(p.num_new)[0]) for p in plans_of(engine, 6) if len(as_ints(p.slots))]
    assert ends == [8, 16, 24, 30]


def test_the_worker_is_told_of_slots_given_back_also_when_nothing_else_is_to_do() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 10), 3)
    engine.run_until_idle()
    assert not engine.worker.slots and not engine.scheduler.state.slots.ends


def test_penalties_get_the_context_and_nobody_else_does() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 10), 3, params=SamplingParams(temperature=0.0, repetition_penalty=1.3))
    submit(engine, 2, prompt(2, 10), 3)
    starts = {start.params.repetition_penalty: start.context for plan in plans_of(engine, 3) for start in plan.starts}
    assert as_ints(starts[1.3]).tolist() == prompt(1, 10) and starts[1.0] == b""


def test_a_large_trie_of_choices_is_scored_in_several_steps() -> None:
    engine = make_engine(budget=16, num_pages=100)
    choices = [prompt(i, 4) for i in range(9)]
    engine.send(OpenBranch(1, 0, b"n"), SubmitScore(1, 1, ints(prompt(1, 30)), tuple(map(ints, choices))))
    end = finished(engine.run_until_idle())[1]
    assert end.usage.num_steps > 4 and end.length == 30
    model = engine.worker.model
    from anabranch.runtime.testing import identity

    for choice, found in zip(choices, end.choice_logprobs, strict=True):
        prefixes = [identity([*prompt(1, 30), *choice[:k]]) for k in range(len(choice))]
        assert found == tuple(model.logprob(prefix, token) for prefix, token in zip(prefixes, choice))


def test_a_choice_longer_than_any_share_of_a_step_is_scored_alone() -> None:
    engine = make_engine(budget=8, num_pages=100, max_slots=2)
    engine.send(OpenBranch(1, 0, b"n"), SubmitScore(1, 1, ints(prompt(1, 10)), (ints(prompt(2, 40)), ints([1]))))
    end = finished(engine.run_until_idle())[1]
    assert [len(logprobs) for logprobs in end.choice_logprobs] == [40, 1]


@pytest.mark.parametrize(("logits_rows", "first"), [(1, 0), (7, 0), (16, 0), (7, 45), (1000, 0)])
def test_a_step_holds_no_more_rows_of_logits_than_their_budget(logits_rows: int, first: int) -> None:
    engine = make_engine(budget=32, vocab_size=64, logits_bytes=4 * 64 * logits_rows)
    plain = make_engine(budget=32, vocab_size=64)
    texts = {number: prompt(number, 50) for number in (1, 2, 3)}
    seen: list[int] = []
    execute = engine.worker.execute

    def counting(plan: StepPlan) -> StepResult:
        result = execute(plan)
        seen.append(sum(len(entry.logprobs.token_ids) for entry in result.prompt_logprobs))
        return result

    engine.worker.execute = counting  # type: ignore[method-assign]
    for one in (engine, plain):
        for number, text in texts.items():
            params = SamplingParams(temperature=0.0, num_top_logprobs=2)
            submit(one, number, text, 3, params=params, prompt_logprobs_from=first if number != 2 else None)
    events, expected = finished(engine.run_until_idle()), finished(plain.run_until_idle())
    assert max(seen) <= logits_rows and sum(seen) >= 2 * (49 - first)
    for number in texts:
        assert events[number].prompt_logprobs == expected[number].prompt_logprobs
        assert tokens_of(engine.events, number) == tokens_of(plain.events, number)


def test_who_waits_for_rows_of_logits_is_told_so() -> None:
    engine = make_engine(budget=64, vocab_size=64, logits_bytes=4 * 64 * 8, depth=1)
    for number in (1, 2):
        submit(engine, number, prompt(number, 20), 1, params=SamplingParams(num_top_logprobs=0), prompt_logprobs_from=0)
    tick(engine, 1)
    assert reasons(engine)[2] == LogitsBudget(8)


def test_scores_count_as_rows_of_logits_too_and_the_oldest_gets_its_tree() -> None:
    engine = make_engine(budget=64, vocab_size=64, logits_bytes=4 * 64 * 8, depth=1)
    for number in (1, 2, 3):
        choices = (ints(prompt(number + 5, 7)), ints([1]))
        engine.send(OpenBranch(number, 0, b"n"), SubmitScore(number, number, ints(prompt(number, 6)), choices))
    execute, num_trees = engine.worker.execute, []

    def counting(plan: StepPlan) -> StepResult:
        num_trees.append(len(plan.trees))
        return execute(plan)

    engine.worker.execute = counting  # type: ignore[method-assign]
    ends = finished(engine.run_until_idle())
    assert max(num_trees) == 1 and sum(num_trees) == 3
    assert [[len(choice) for choice in ends[number].choice_logprobs] for number in (1, 2, 3)] == [[7, 1]] * 3


def test_prompt_logprobs_on_a_warm_prefix_bypass_the_cache_and_say_so() -> None:
    engine = make_engine()
    text = prompt(1, 60)
    submit(engine, 1, text)
    engine.run_until_idle()
    cold = make_engine()
    for one, number in ((engine, 2), (cold, 2)):
        submit(one, number, text, 0, params=SamplingParams(num_top_logprobs=2), prompt_logprobs_from=20)
        one.run_until_idle()
    warm, fresh = finished(engine.events)[2], finished(cold.events)[2]
    assert warm.prompt_logprobs == fresh.prompt_logprobs and len(warm.prompt_logprobs.token_ids) == 40
    assert warm.usage.cached_tokens == 19 and warm.usage.computed_tokens == 41


# ---------------------------------------------------------------- faults


def test_an_error_of_one_row_ends_its_request_and_no_other() -> None:
    engine = make_engine(fail=lambda plan: [0] if plan.step_id == 6 else [])
    for number in (1, 2, 3):
        submit(engine, number, prompt(number, 10), 20)
    events = engine.run_until_idle()
    (broken,) = refused(events).values()
    assert broken.error.message == "told to fail" and broken.usage.completion_tokens > 0
    for number in {1, 2, 3} - {broken.request_id}:
        assert tokens_of(events, number) == engine.worker.model.generate(prompt(number, 10), GREEDY, 0, 20)[0]
    assert stats_of(engine)["check"] == "ok"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("failing_step", [3, 6])  # the last chunk of the prompt; a decode
def test_kv_of_a_row_that_is_not_finite_is_used_for_nothing_else(failing_step: int, depth: int) -> None:
    broken = Error("internal_error", "not finite", code=NOT_FINITE)
    engine = make_engine(fail=lambda plan: [0] if plan.step_id == failing_step else [], failure=broken, budget=16, depth=depth)
    submit(engine, 1, prompt(1, 40), 20)
    assert refused(engine.run_until_idle())[1].error.code == NOT_FINITE
    manager = engine.scheduler.state.manager
    assert manager.num_free() == manager.pool.num_pages and stats_of(engine)["check"] == "ok"
    submit(engine, 2, prompt(1, 40), 20)
    (again,) = finished(engine.run_until_idle()).values()
    assert again.usage.cached_tokens == 0 and again.usage.completion_tokens == 20


def test_kv_that_others_go_on_from_outlives_a_row_that_is_not_finite() -> None:
    broken = Error("internal_error", "not finite", code=NOT_FINITE)
    doomed: list[int] = []
    engine = make_engine(fail=lambda plan: doomed, failure=broken, budget=64)
    shared = prompt(1, 20)
    for number in (1, 2):
        submit(engine, number, shared + prompt(10 + number, 8), 30)
    tick(engine, 4)
    doomed.append(engine.scheduler.state.requests[2].slot)
    tick(engine, 3)
    doomed.clear()
    events = engine.run_until_idle()
    assert 2 in refused(engine.events) and 2 not in finished(events)
    expected = engine.worker.model.generate(shared + prompt(11, 8), GREEDY, 0, 30)[0]
    assert tokens_of(engine.events, 1) == expected and stats_of(engine)["check"] == "ok"
    submit(engine, 3, shared + prompt(12, 8), 3)
    (third,) = finished(engine.run_until_idle()).values()
    assert third.usage.cached_tokens == 20, "what the first request holds is still there, and nothing of the second"


@pytest.mark.parametrize("when", ["attach", "reserve", "publish"])
def test_a_fault_of_ours_ends_the_request_it_belongs_to(when: str) -> None:
    engine = make_engine(raise_errors=False, depth=1)
    for number in (1, 2, 3):
        submit(engine, number, prompt(number, 10), 20)
    tick(engine, 1 if when == "attach" else 3)
    if when == "attach":
        submit(engine, 4, prompt(4, 10), 20)
        tick(engine, 0)
    manager = engine.scheduler.state.manager
    doomed = 4 if when == "attach" else 2
    original = getattr(manager, when)

    def broken(kv: object, *arguments: object) -> object:
        record = engine.scheduler.state.branches.find(doomed)
        if record is not None and record.kv is kv:
            raise ZeroDivisionError("a bug")
        return original(kv, *arguments)

    setattr(manager, when, broken)
    if when == "publish":
        doomed = 5
        submit(engine, 5, prompt(5, 10), 20)
    events = engine.run_until_idle()
    assert refused(events)[doomed].error.type == "internal_error" and "a bug" in refused(events)[doomed].error.message
    assert {1, 2, 3, 4, 5} & set(finished(engine.events)) >= {1, 3}
    setattr(manager, when, original)
    submit(engine, 9, prompt(9, 10), 3)
    assert 9 in finished(engine.run_until_idle())
    assert not engine.scheduler.state.requests


def test_a_stall_is_counted_and_ends_the_oldest_request_rather_than_hang() -> None:
    engine = make_engine(raise_errors=False, watchdog_s=5.0)
    engine.scheduler._planner.admission.admit = lambda budget: ()
    submit(engine, 1, prompt(1, 10), 3)
    tick(engine, 3)
    assert engine.scheduler.state.counters["stalls"] == 1
    assert engine.decision.next_wakeup == pytest.approx(engine.clock() + 5.0, abs=0.1)
    engine.clock.advance(5.0)
    tick(engine, 2)
    assert refused(engine.events)[1].error.code == "stalled"


def test_a_broken_invariant_is_reported_and_stops_nobody() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 10), 3)
    engine.run_until_idle()
    engine.scheduler.state.manager.tree.num_tokens += 1
    engine.send(QueryStats(1, check=True))
    (reply,) = [e for e in engine.run_until_idle() if isinstance(e, StatsReply)]
    assert "counters_of_the_tree_are_exact" in reply.stats["check"]
    submit(engine, 2, prompt(1, 10), 3)
    assert 2 in finished(engine.run_until_idle())


# ---------------------------------------------------------------- the rest


def test_flush_evicts_what_nobody_uses() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 40), 3)
    engine.run_until_idle()
    engine.send(Flush(7))
    (reply,) = [e for e in engine.run_until_idle() if isinstance(e, StatsReply)]
    assert reply.query_id == 7 and reply.stats["flushed_pages"] == 11
    assert stats_of(engine)["pages_free"] == 64


def test_explain_names_what_is_cached_and_why_no_more() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 40), 3)
    engine.run_until_idle()
    submit(engine, 2, [*prompt(1, 20), 1, 2, 3], 0)
    engine.send(ExplainBranch(5, 2), ExplainBranch(6, 99))
    explained = {e.query_id: e for e in engine.run_until_idle() if isinstance(e, BranchExplained)}
    assert (explained[5].length, explained[5].cached_now) == (23, 20) and "diverges" in explained[5].miss
    assert explained[6].length == 0 and "99" in explained[6].miss


def test_explain_looks_up_what_is_not_sent_yet_and_leaves_the_branch_as_it_was() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 40), 3)
    engine.run_until_idle()
    before = stats_of(engine)
    engine.send(OpenBranch(2, 0, b"n"), ExplainBranch(5, 2, ints(prompt(1, 30))), ExplainBranch(6, 2))
    explained = {e.query_id: e for e in engine.run_until_idle() if isinstance(e, BranchExplained)}
    assert (explained[5].length, explained[5].cached_now) == (30, 29)
    assert (explained[6].length, explained[6].cached_now) == (0, 0)
    after = stats_of(engine)
    assert all(after[name] == before[name] for name in ("pages_free", "pages_locked", "pages_in_use"))


def test_shutdown_ends_every_request_and_then_says_so() -> None:
    engine = make_engine(max_slots=1)
    for number in (1, 2):
        submit(engine, number, prompt(number, 10), 50)
    tick(engine, 5)
    engine.send(Shutdown(), OpenBranch(3, 0, b"n"), Submit(3, 3, ints([1]), 2, GREEDY))
    events = engine.run_until_idle()
    assert finished(events)[1].reason == "abort"
    assert {number: event.error.type for number, event in refused(events).items()} == {2: "cancelled", 3: "cancelled"}
    engine.tick()
    assert engine.decision.is_finished


def test_the_same_calls_give_the_same_decisions() -> None:
    def run() -> list[object]:
        engine = make_engine(num_pages=20)
        for number in range(1, 12):
            submit(engine, number, prompt(number % 4, 5 + number), 9, params=SamplingParams(seed=number))
            engine.tick()
        engine.run_until_idle()
        return list(engine.events)

    assert run() == run()


def test_stats_have_what_a_dashboard_needs() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 40), 10)
    tick(engine, 3)
    engine.scheduler.observe_planning(123.0)
    engine.send(QueryStats(1))
    engine.tick()
    (reply,) = [e for e in engine.events if isinstance(e, StatsReply)]
    stats = reply.stats
    pages = [stats[f"pages_{name}"] for name in ("free", "cached", "locked", "in_use")]
    assert sum(pages) == stats["pages_total"] == 64 and stats["pages_in_use"] > 0
    assert (stats["running"], stats["slots_in_use"], stats["requests"], stats["branches"]) == (1, 1, 1, 1)
    assert stats["planning_us"]["le_200"] == 1 and stats["planning_us"]["count"] == 1
    assert "check" not in stats


def test_policy_checks_itself() -> None:
    with pytest.raises(ValueError, match="pipeline_depth"):
        Policy(pipeline_depth=3)
    with pytest.raises(ValueError, match="fifo_every"):
        Policy(fifo_every=0)


def test_a_worker_that_is_lost_costs_no_token() -> None:
    engine = make_engine()
    for number in (1, 2):
        submit(engine, number, prompt(number, 20), 30, params=SamplingParams(seed=number))
    tick(engine, 12)
    engine.send(ForkBranch(1, (3,)), Submit(3, 3, ints([1]), 5, GREEDY))
    fresh = make_engine().worker
    engine.worker = fresh
    engine.plans.clear()
    engine.scheduler.restart(engine.clock(), fresh.ready())
    events = engine.run_until_idle()
    for number in (1, 2):
        expected = fresh.model.generate(prompt(number, 20), SamplingParams(seed=number), 0, 30)[0]
        assert tokens_of(engine.events, number) == expected
        assert finished(events)[number].usage.recomputed_tokens >= 20
    assert 3 in finished(events)
    assert stats_of(engine)["check"] == "ok"


def test_produced_tokens_carry_their_logprobs() -> None:
    engine = make_engine()
    submit(engine, 1, prompt(1, 10), 5, params=SamplingParams(seed=2, num_top_logprobs=3))
    events = [e for e in engine.run_until_idle() if isinstance(e, Produced)]
    for event in events:
        assert event.logprobs is not None and event.logprobs.token_ids == event.token_ids
        assert all(len(ids) == len(values) == 3 for ids, values in event.logprobs.tops)
    assert np.isfinite([value for e in events for value in e.logprobs.logprobs]).all()


def test_a_smaller_pool_after_a_restart_refuses_what_cannot_fit_any_more() -> None:
    engine = make_engine(num_pages=64, max_slots=1)
    submit(engine, 1, prompt(1, 10), 30)
    submit(engine, 2, prompt(2, 100), 5)
    tick(engine, 5)
    small = make_engine(num_pages=16, max_slots=1).worker
    engine.worker = small
    engine.plans.clear()
    engine.scheduler.restart(engine.clock(), small.ready())
    events = engine.run_until_idle()
    assert refused(events)[2].error.code == "kv_capacity_exceeded"
    assert tokens_of(engine.events, 1) == small.model.generate(prompt(1, 10), GREEDY, 0, 30)[0]
