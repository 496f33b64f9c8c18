"""What every implementation of `anabranch.lang.backend.Backend` must do; run against the scripted one and the real
engine.

Subclass `BackendContract` in a test module and give it a `backend` fixture. Nothing here depends on what a model
says. A backend whose generations a test can hold back also gives `held`: a (branch, generation future) that does not
finish by itself.
"""

import gc
import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest

from anabranch.lang.backend import (
    Backend,
    BackendBranch,
    Constraint,
    Generation,
    RoleBegin,
    RoleEnd,
    Sampling,
    Text,
    Tokens,
)

GREEDY = Sampling(max_tokens=6, temperature=0.0, num_top_logprobs=0)
WAIT = 60


def say(branch: BackendBranch, text: str) -> BackendBranch:
    branch.append([Text(text)])
    return branch


def gen(branch: BackendBranch, sampling: Sampling = GREEDY) -> Generation:
    """Generate and wait, holding the branch: a branch that nobody holds is released, and what runs on it ends."""
    return branch.generate(sampling).result(WAIT)


def ids(branch: BackendBranch) -> list[int]:
    return list(branch.token_ids().result(WAIT))


class BackendContract:
    # ---------------------------------------------------------------- appending and generating

    def test_a_generation_tells_text_tokens_logprobs_and_usage(self, backend: Backend) -> None:
        branch = say(backend.open(seed=1), "The sky over the harbour is")
        before = ids(branch)
        made = gen(branch)
        assert ids(branch)[: len(before)] == before
        assert made.finish_reason in ("stop", "length") and len(made.token_ids) <= 6
        assert made.usage["prompt_tokens"] == len(before) and made.usage["completion_tokens"] == len(made.token_ids)
        assert made.usage["cached_tokens"] + made.usage["computed_tokens"] == len(before)
        assert made.logprobs is not None and made.logprobs.token_ids == tuple(made.token_ids)
        assert all(lp is not None and lp <= 1e-6 for lp in made.logprobs.logprobs)

    def test_operations_may_be_sent_without_waiting_and_run_in_order(self, backend: Backend) -> None:
        branch = say(backend.open(seed=2), "One")
        first = branch.generate(GREEDY)
        branch.append([Text(" and then")])
        second = branch.generate(GREEDY)
        last = branch.token_ids()
        tokens = list(last.result(WAIT))
        kept = list(first.result(0).token_ids)
        assert first.done() and second.done()
        assert any(tokens[i : i + len(kept)] == kept for i in range(len(tokens))) and len(tokens) > len(kept)

    def test_text_arrives_in_order_and_adds_up_before_the_future_is_done(self, backend: Backend) -> None:
        pieces: list[str] = []
        branch = say(backend.open(seed=3), "Once upon a time")
        made = branch.generate(Sampling(max_tokens=12, temperature=0.0), pieces.append).result(WAIT)
        assert "".join(pieces) == made.text

    def test_the_same_tokens_greedily_give_the_same_continuation_warm_or_cold(self, backend: Backend) -> None:
        cold = gen(say(backend.open(seed=1), "A bridge over"))
        warm = gen(say(backend.open(seed=1), "A bridge over"))
        backend.flush_cache().result(WAIT)
        again = gen(say(backend.open(seed=1), "A bridge over"))
        assert cold.token_ids == warm.token_ids == again.token_ids

    def test_a_seed_fixes_a_branch_and_its_children(self, backend: Backend) -> None:
        def sample() -> list[tuple[int, ...]]:
            root = say(backend.open(seed=7), "Colours:")
            hot = Sampling(max_tokens=6, temperature=1.0)
            children = root.fork(3)
            return [tuple(f.result(WAIT).token_ids) for f in [c.generate(hot) for c in children]]

        assert sample() == sample()

    def test_given_tokens_are_taken_as_they_are(self, backend: Backend) -> None:
        source = say(backend.open(), "Exactly these tokens")
        tokens = ids(source)
        copy = backend.open()
        copy.append([Tokens(tuple(tokens))])
        assert ids(copy) == tokens

    def test_turns_may_be_opened_and_closed(self, backend: Backend) -> None:
        if not backend.info()["has_chat_template"]:
            pytest.skip("the model has no chat template")
        branch = backend.open(seed=4)
        branch.append([RoleBegin("user"), Text("Hi"), RoleEnd(), RoleBegin("assistant")])
        made = gen(branch)
        branch.append([RoleEnd(), RoleBegin("user"), Text("And?"), RoleEnd()])
        assert len(ids(branch)) > made.usage["prompt_tokens"]

    def test_a_constraint_is_kept(self, backend: Backend) -> None:
        branch = say(backend.open(seed=5), "A number: ")
        made = gen(branch, Sampling(max_tokens=8, constraint=Constraint("regex", "[0-9]{1,3}")))
        assert made.text.isdigit() and 1 <= len(made.text) <= 3

    def test_prefill_computes_what_the_next_operation_finds_cached(self, backend: Backend) -> None:
        text = "This prompt is computed ahead of time, so that nobody has to wait for it later on."
        ahead = say(backend.open(), text)
        ahead.prefill().result(WAIT)
        made = gen(say(backend.open(), text))
        assert made.usage["cached_tokens"] >= made.usage["prompt_tokens"] - 1

    # ---------------------------------------------------------------- scoring

    def test_scores_choose_the_best_and_append_it(self, backend: Backend) -> None:
        branch = say(backend.open(), "The answer is")
        before = len(ids(branch))
        choices = [" yes", " no", " perhaps so"]
        for method in (
            "token_length_normalized",
            "sum",
            "greedy_token_selection",
            "unconditional_likelihood_normalized",
        ):
            scores = branch.score(choices, method, append=False).result(WAIT)  # type: ignore[arg-type]
            assert len(scores.scores) == len(scores.logprobs) == 3 and 0 <= scores.best < 3
            if method in ("token_length_normalized", "sum"):
                assert scores.best == max(range(3), key=scores.scores.__getitem__)
            assert len(ids(branch)) == before
        chosen = branch.score(choices, "sum").result(WAIT)
        assert ids(branch)[before:] == list(chosen.logprobs[chosen.best].token_ids)

    # ---------------------------------------------------------------- fork, rollback, join

    def test_children_share_the_parents_tokens_and_go_their_own_way(self, backend: Backend) -> None:
        root = say(backend.open(seed=8), "A common beginning,")
        shared = ids(root)
        left, right = root.fork(2)
        say(left, " left"), say(right, " right and further")
        assert ids(left)[: len(shared)] == ids(right)[: len(shared)] == shared == ids(root)
        assert ids(left) != ids(right)

    def test_a_fork_of_a_branch_that_is_still_generating_waits_for_it(self, backend: Backend) -> None:
        root = say(backend.open(seed=9), "Running")
        made = root.generate(GREEDY)
        (child,) = root.fork(1)
        assert ids(child) == ids(root) and made.done()

    def test_a_fork_of_nothing_works(self, backend: Backend) -> None:
        children = backend.open(seed=10).fork(3)
        made = [say(c, f"Child {i}").generate(GREEDY) for i, c in enumerate(children)]
        assert all(f.result(WAIT).token_ids is not None for f in made)

    def test_rollback_returns_to_the_mark_also_in_a_child(self, backend: Backend) -> None:
        root = say(backend.open(seed=11), "Keep this.")
        mark, kept = root.mark(), ids(root)
        say(root, " Drop this.").generate(GREEDY)
        (child,) = root.fork(1)
        root.rollback(mark)
        child.rollback(mark)
        assert ids(root) == ids(child) == kept
        assert gen(root).usage["prompt_tokens"] == len(kept)

    def test_a_join_takes_over_the_winner_and_closes_it(self, backend: Backend) -> None:
        root = say(backend.open(seed=12), "Which way?")
        left, right = root.fork(2)
        say(left, " Left.")
        say(right, " Right.")
        made = right.generate(GREEDY)
        root.join(right, [left])
        after = ids(root)
        assert (
            after[-len(made.result(WAIT).token_ids) :] == list(made.result(WAIT).token_ids)
            or not made.result(0).token_ids
        )
        assert gen(root).usage["cached_tokens"] >= len(after) - 2

    def test_an_operation_on_a_branch_that_was_joined_away_ends_with_an_error(self, backend: Backend) -> None:
        root = say(backend.open(seed=12), "Which way?")
        (winner,) = root.fork(1)
        say(winner, " Left.").generate(GREEDY)
        root.join(winner)
        late = winner.generate(GREEDY)
        assert late.exception(WAIT) is not None
        assert gen(root) is not None

    def test_spans_are_appended_token_by_token_in_order(self, backend: Backend) -> None:
        root = say(backend.open(seed=13), "Facts:")
        mark, start = root.mark(), len(ids(root))
        first, second = root.fork(2)
        made = say(first, " one").generate(GREEDY)
        say(second, " two")
        root.append_spans([(first, mark), (second, mark)])
        spans = ids(first)[start:] + ids(second)[start:]
        made.result(WAIT)
        assert ids(root)[start:] == spans

    def test_a_lease_may_be_taken_and_given_back(self, backend: Backend) -> None:
        branch = say(backend.open(), "Back in a moment")
        branch.lease(5.0)
        branch.lease(0.0)
        assert ids(branch)

    # ---------------------------------------------------------------- failing, cancelling, closing

    def test_a_failed_operation_fails_all_later_ones_and_the_children_with_the_first_cause(
        self, backend: Backend
    ) -> None:
        branch = say(backend.open(), "A number: ")
        bad = branch.generate(Sampling(max_tokens=4, constraint=Constraint("regex", "(")))
        (child,) = branch.fork(1)
        later = [branch.generate(GREEDY), branch.score([" a", " b"], "sum"), child.generate(GREEDY)]
        first = bad.exception(WAIT)
        assert first is not None
        for future in later:
            error = future.exception(WAIT)
            assert error is not None and str(error) == str(first)
        assert gen(say(backend.open(), "Fine")) is not None

    def test_a_failed_winner_fails_the_branch_that_takes_it_over(self, backend: Backend) -> None:
        root = say(backend.open(), "Root")
        winner, loser = root.fork(2)
        bad = winner.generate(Sampling(constraint=Constraint("regex", "(")))
        root.join(winner, [loser])
        assert root.generate(GREEDY).exception(WAIT) is not None and bad.exception(WAIT) is not None

    def test_cancelling_a_future_ends_the_operation(self, backend: Backend) -> None:
        branch = say(backend.open(seed=14), "On and on")
        future = branch.generate(Sampling(max_tokens=4096, ignore_eos=True))
        future.cancel()
        with pytest.raises((CancelledError, Exception)):
            future.result(WAIT)
        assert self.is_settled(backend)

    def test_cancelling_a_branch_or_a_program_ends_what_runs_on_it(self, backend: Backend) -> None:
        program = backend.new_program()
        mine, other = backend.open(program=program), backend.open()
        futures = [say(b, "On and on").generate(Sampling(max_tokens=2048, ignore_eos=True)) for b in (mine, other)]
        backend.cancel_program(program)
        other.cancel()
        other.cancel()
        for future in futures:
            try:
                future.result(WAIT)
            except Exception as error:
                assert str(error)

    def test_dropping_or_closing_a_branch_releases_it(self, backend: Backend) -> None:
        before = self.settled_count(backend)
        kept = backend.open()
        dropped = [say(kept, "x").fork(2), backend.open()]
        closed = backend.open()
        assert self.count(backend) == before + 5
        closed.close()
        closed.close()
        del dropped
        gc.collect()
        assert self.settled_count(backend) == before + 1
        kept.close()
        assert self.settled_count(backend) == before

    def test_a_timeout_ends_an_operation_with_a_timeout_error(self, backend: Backend) -> None:
        branch, future = self.held(backend, Sampling(max_tokens=4096, ignore_eos=True, timeout=0.05))
        with pytest.raises(TimeoutError):
            future.result(WAIT)
        assert branch.generate(GREEDY).exception(WAIT) is not None

    # ---------------------------------------------------------------- looking, and many at once

    def test_an_explanation_covers_every_token_once(self, backend: Backend) -> None:
        branch = say(backend.open(seed=15), "Explain these tokens to me, please.")
        gen(branch, Sampling(max_tokens=4, temperature=0.0, ignore_eos=True))
        told = branch.explain().result(WAIT)
        assert told.length == len(ids(branch)) and 0 <= told.cached_now <= told.length
        edges = [0, *(span.stop for span in told.spans)]
        assert [span.start for span in told.spans] == edges[:-1] and edges[-1] == told.length
        assert any(span.origin == "generated" for span in told.spans)
        assert all(span.text for span in told.spans) and "".join(span.text for span in told.spans) == told.text

    def test_a_branch_that_only_got_text_knows_what_of_it_is_cached(self, backend: Backend) -> None:
        first = say(backend.open(seed=18), "A beginning that several branches share.")
        first.prefill().result(WAIT)
        again = say(backend.open(seed=19), "A beginning that several branches share. And an end.")
        (child,) = first.fork(1)
        say(child, " And an end.")
        shared = len(ids(first))
        for branch in (again, child):
            told = branch.explain().result(WAIT)
            assert [span.origin for span in told.spans] == ["cached", "pending"]
            assert told.spans[0].stop >= shared - 1 and told.cached_now >= shared - 1
        assert {span.origin for span in first.explain().result(WAIT).spans} <= {"cached", "computed"}

    def test_info_and_stats_tell_the_limits(self, backend: Backend) -> None:
        info = backend.info()
        assert info["context_length"] > 0 and info["vocab_size"] > 0 and info["page_size"] > 0
        assert isinstance(backend.stats().result(WAIT), dict)

    def test_many_branches_need_no_threads_of_their_own(self, backend: Backend) -> None:
        root = say(backend.open(seed=16), "Many")
        gen(root)
        before = threading.active_count()
        children = root.fork(getattr(self, "many", 64))
        futures = [c.generate(Sampling(max_tokens=2)) for c in children]
        assert threading.active_count() <= before + 1
        assert all(f.result(WAIT) is not None for f in futures)

    # ---------------------------------------------------------------- how a backend is looked at; override where it
    # differs

    def count(self, backend: Any) -> int:
        """Open branches."""
        return int(backend.open_branches())

    def settled_count(self, backend: Any) -> int:
        """Open branches once nothing changes any more: what earlier tests left may still be ending."""
        seen = [-1, -2, -3]
        for _ in range(200):
            gc.collect()
            seen = [*seen[1:], self.count(backend)]
            if len(set(seen)) == 1 and self.is_settled(backend):
                break
            time.sleep(0.03)
        return seen[-1]

    def is_settled(self, backend: Any) -> bool:
        """Whether nothing runs or waits."""
        return True

    def held(self, backend: Any, sampling: Sampling) -> Any:
        """A branch and a generation on it that outlasts its timeout."""
        branch = say(backend.open(), "This takes long")
        return branch, branch.generate(sampling)
