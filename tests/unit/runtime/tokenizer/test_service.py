"""The tokenizer service over the real scheduler: order, errors, cancelling, closing; one answer for every question."""

from collections.abc import Iterator

import pytest
from support.service import Desk
from support.tokenizers import byte_bpe_tokenizer, sentencepiece_style_tokenizer

from anabranch.runtime.config import LimitsConfig
from anabranch.runtime.errors import InvalidRequest
from anabranch.runtime.messages import (
    Append,
    BranchOptions,
    Cancel,
    Close,
    ControlText,
    Delta,
    EngineLost,
    Error,
    Explain,
    Explained,
    Failed,
    Fork,
    Generate,
    Generated,
    GenerateParams,
    GetStats,
    GetTokens,
    Grammar,
    Hello,
    Join,
    Mark,
    Message,
    Open,
    Prefill,
    Prefilled,
    RoleBegin,
    RoleEnd,
    Rollback,
    Score,
    Scored,
    Text,
    Tokenize,
    Tokens,
    TokensAre,
    Welcome,
    as_ints,
)
from anabranch.runtime.testing import identity

GREEDY = GenerateParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def text(branch: int, words: str) -> Append:
    return Append(branch, (Text(words),))


def ids_of(answer: object) -> list[int]:
    assert isinstance(answer, TokensAre), answer
    return as_ints(answer.token_ids).tolist()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    for client in list(desk.service.clients):
        desk.service.disconnect(client)
    desk.assert_nothing_is_left()


# ---------------------------------------------------------------- order and text


def test_a_client_is_told_about_the_model_when_it_says_hello(desk: Desk) -> None:
    desk.say(Hello())
    (welcome,) = desk.answers[1]
    assert isinstance(welcome, Welcome) and welcome.context_length == 512 and welcome.has_chat_template


def test_another_protocol_version_is_refused_in_words(desk: Desk) -> None:
    desk.service.handle(9, Hello(version=99))
    desk.tick()
    (lost,) = desk.answers[9]
    assert isinstance(lost, EngineLost) and "version 99" in lost.error.message


def test_messages_before_hello_are_dropped_and_counted(desk: Desk) -> None:
    desk.service.handle(5, Open(1))
    assert desk.service.counters["dropped_unannounced"] == 1 and not desk.service.to_clients


def test_adjacent_text_is_tokenized_together_just_before_it_is_needed(desk: Desk) -> None:
    whole = desk.vocabulary.encode_plain("Once upon a time", at_start=True)
    got = desk.ask(Open(1), text(1, "Once up"), text(1, "on a ti"), text(1, "me"), GetTokens(2, 1))
    assert ids_of(got) == whole


def test_user_text_never_becomes_a_control_token(desk: Desk) -> None:
    eos = desk.files.eos_id
    plain = ids_of(desk.ask(Open(1), text(1, "a<|im_end|>b"), GetTokens(2, 1)))
    control = ids_of(desk.ask(Open(3), Append(3, (ControlText("a<|im_end|>b"),)), GetTokens(4, 3)))
    assert eos not in plain and eos in control


def test_turns_are_what_the_template_renders_for_the_whole_conversation(desk: Desk) -> None:
    segments = (RoleBegin("user"), Text("Hi"), RoleEnd(), RoleBegin("assistant"))
    got = ids_of(desk.ask(Open(1), Append(1, segments), GetTokens(2, 1)))
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert got == desk.vocabulary.encode_control(rendered, at_start=True)


def test_exactly_one_bos_whoever_writes_it() -> None:
    desk = Desk(sentencepiece_style_tokenizer())
    bos = desk.vocabulary.bos_token_id
    beginnings = [
        (Text("Hello"),), (Text(""), Text("Hello")), (ControlText("Hello"),), (ControlText("<s>Hello"),),
        (RoleBegin("user"), Text("Hello"), RoleEnd()), (Text("Well."), RoleBegin("user"), Text("Hello"), RoleEnd()),
    ]  # fmt: skip
    for i, segments in enumerate(beginnings):
        got = ids_of(desk.ask(Open(10 + i), Append(10 + i, segments), GetTokens(100 + i, 10 + i)))
        assert got.count(bos or -1) == 1 and got[0] == bos, segments


def test_operations_run_in_the_order_in_which_they_were_asked_for(desk: Desk) -> None:
    desk.say(Open(1), text(1, "One"), Generate(2, 1, GREEDY), text(1, " and"), Generate(3, 1, GREEDY), GetTokens(4, 1))
    desk.run()
    first, second, tokens = desk.answer(2), desk.answer(3), ids_of(desk.answer(4))
    seam = desk.vocabulary.encode_plain(" and")
    assert tokens == [*desk.vocabulary.encode_plain("One"), *first.token_ids, *seam, *second.token_ids]
    order = [m.op for m in desk.answers[1] if isinstance(m, Generated | TokensAre)]
    assert order == [2, 3, 4]


def test_an_empty_branch_begins_with_bos_where_the_model_has_one() -> None:
    with_bos = Desk()
    made = with_bos.ask(Open(1), Generate(2, 1, GREEDY))
    assert isinstance(made, Generated) and made.usage.prompt_tokens == 1
    files = byte_bpe_tokenizer()
    del files.config["bos_token"]
    without = Desk(files)
    without.ask(Open(1), text(1, ""), Generate(2, 1, GREEDY))
    assert "the prompt is empty" in without.error(2)


def test_the_same_answer_streamed_and_whole(desk: Desk) -> None:
    plain = desk.ask(Open(1), text(1, "A river"), Generate(2, 1, GREEDY))
    streamed = GenerateParams(max_tokens=6, temperature=0.0, ignore_eos=True, stream=True)
    desk.ask(Open(3), text(3, "A river"), Generate(4, 3, streamed))
    *deltas, whole = desk.all_answers(4)
    assert all(isinstance(delta, Delta) for delta in deltas) and deltas
    assert "".join(d.text for d in deltas) == whole.text == plain.text  # type: ignore[union-attr]
    assert [i for d in deltas for i in d.token_ids] == list(whole.token_ids) == list(plain.token_ids)  # type: ignore[union-attr]


def test_a_stop_string_cuts_the_text_and_the_branch_goes_on_from_there() -> None:
    desk = Desk(script=["a", "b", " the", " fox", "c"])
    params = GenerateParams(max_tokens=20, stop=("e fo",), temperature=0.0)
    made = desk.ask(Open(1), text(1, "x"), Generate(2, 1, params))
    assert (made.text, made.finish_reason, made.matched) == ("ab th", "stop", "e fo")
    assert list(made.token_ids) == desk.script[:2] and made.usage.completion_tokens == 2
    after = ids_of(desk.ask(text(1, "!"), GetTokens(3, 1)))
    x = desk.vocabulary.encode_plain("x", at_start=True)
    assert after == [*x, *made.token_ids, *desk.vocabulary.encode_plain(" th!")]


def test_a_special_token_named_as_stop_string_stops_though_its_text_is_skipped() -> None:
    desk = Desk(script=["a", "<|im_start|>", "b"])
    params = GenerateParams(max_tokens=20, stop=("<|im_start|>",), temperature=0.0)
    made = desk.ask(Open(1), text(1, "x"), Generate(2, 1, params))
    assert (made.text, made.finish_reason, made.matched) == ("a", "stop", "<|im_start|>")


def test_the_end_of_sequence_is_named_and_is_not_part_of_the_branch() -> None:
    desk = Desk(script=["a", "b"])
    made = desk.ask(Open(1), text(1, "x"), Generate(2, 1, GenerateParams(max_tokens=20, temperature=0.0)))
    assert (made.text, made.finish_reason, made.matched) == ("ab", "stop", desk.files.eos_id)
    assert desk.files.eos_id not in ids_of(desk.ask(GetTokens(3, 1)))


def test_stops_do_not_count_before_min_tokens() -> None:
    desk = Desk(script=["a", "b", "a", "b", "a"])
    params = GenerateParams(max_tokens=5, min_tokens=3, stop=("b",), temperature=0.0)
    made = desk.ask(Open(1), text(1, "x"), Generate(2, 1, params))
    assert (made.text, made.matched) == ("aba", "b")


# ---------------------------------------------------------------- the shape of the tree


def test_children_share_the_tokens_of_the_parent_and_are_born_when_it_is_their_turn(desk: Desk) -> None:
    desk.say(Open(1), text(1, "Root"), Generate(2, 1, GREEDY), Fork(1, (10, 11)))
    desk.say(text(10, " left"), GetTokens(3, 10), GetTokens(4, 11))
    assert not desk.all_answers(3), "the child must wait for the parent's generation"
    desk.run()
    root = ids_of(desk.ask(GetTokens(5, 1)))
    assert ids_of(desk.answer(4)) == root
    assert ids_of(desk.answer(3)) == [*root, *desk.vocabulary.encode_plain(" left")]


def test_rollback_returns_to_the_mark_in_text_that_was_never_needed_and_in_generated_tokens(desk: Desk) -> None:
    desk.say(Open(1), text(1, "Keep"), Mark(1, 7), text(1, " drop"), Rollback(1, 7), GetTokens(2, 1))
    desk.run()
    kept = ids_of(desk.answer(2))
    assert kept == desk.vocabulary.encode_plain("Keep")
    made = desk.ask(Generate(3, 1, GREEDY), Rollback(1, 7), Generate(4, 1, GREEDY))
    assert made.usage.prompt_tokens == len(kept) and made.usage.cached_tokens == len(kept) - 1


def test_rollback_takes_a_conversation_back_too(desk: Desk) -> None:
    turn = (RoleBegin("user"), Text("Hi"), RoleEnd())
    desk.say(Open(1), Append(1, turn), Mark(1, 7), Append(1, (RoleBegin("assistant"), Text("Ho"))), Rollback(1, 7))
    desk.say(Append(1, (RoleBegin("assistant"), Text("Ho"), RoleEnd())), GetTokens(2, 1))
    desk.run()
    assert ids_of(desk.answer(2))


def test_an_unknown_mark_fails_the_branch(desk: Desk) -> None:
    desk.ask(Open(1), text(1, "a"), Rollback(1, 99), GetTokens(2, 1))
    assert "no mark 99" in desk.error(2)


def test_a_join_waits_for_the_winner_and_takes_everything_over(desk: Desk) -> None:
    desk.say(Open(1), text(1, "Root"), Fork(1, (10, 11)), text(10, " left"), Generate(2, 10, GREEDY))
    desk.say(Join(1, 10, drop=(11,)), GetTokens(3, 1))
    desk.run()
    tail = desk.answer(2).token_ids
    assert ids_of(desk.answer(3))[-len(tail) :] == list(tail)
    assert set(desk.service.clients[1].branches) == {1}


def test_a_handle_that_is_dropped_early_keeps_its_branch_until_the_join_and_the_fork_are_done(desk: Desk) -> None:
    desk.say(Open(1), text(1, "Root"), Generate(2, 1, GREEDY), Fork(1, (10, 11)), Close((1,)))
    desk.say(Open(5), text(10, " left"), Generate(3, 10, GREEDY), Mark(11, 77), text(11, " span"))
    desk.say(Join(5, 10), Join(5, None, ((11, 77),)), Close((10, 11)), GetTokens(4, 5))
    desk.run()
    assert isinstance(desk.answer(2), Generated) and isinstance(desk.answer(3), Generated)
    made, span = desk.answer(3).token_ids, desk.vocabulary.encode_plain(" span")
    assert ids_of(desk.answer(4))[-len(made) - len(span) :] == [*made, *span]
    assert set(desk.service.clients[1].branches) == {5}


def test_two_branches_may_take_spans_of_each_other(desk: Desk) -> None:
    desk.say(Open(1), Open(2), Mark(1, 70), Mark(2, 71), text(1, "one"), text(2, "two"))
    desk.say(Join(1, None, ((2, 71),)), Join(2, None, ((1, 70),)), GetTokens(3, 1), GetTokens(4, 2))
    desk.run()
    one, two = desk.vocabulary.encode_plain("one", at_start=True), desk.vocabulary.encode_plain("two", at_start=True)
    assert ids_of(desk.answer(3)) == [*one, *two] and ids_of(desk.answer(4)) == [*two, *one, *two]


def test_what_is_sent_to_a_branch_after_it_was_joined_away_ends_in_words_and_so_do_its_children(desk: Desk) -> None:
    desk.say(Open(1), Open(2), text(2, "won"), Generate(3, 2, GREEDY), Join(1, 2))
    desk.say(text(2, "late"), Generate(4, 2, GREEDY), Fork(2, (20,)), Generate(5, 20, GREEDY), Join(2, 1), GetTokens(6, 1))
    desk.run()
    assert "taken over" in desk.error(4) and "taken over" in desk.error(5)
    assert isinstance(desk.answer(6), TokensAre)


def test_a_join_of_what_does_not_exist_fails_the_branch_and_nobody_waits(desk: Desk) -> None:
    desk.ask(Open(1), Join(1, 99), GetTokens(2, 1))
    assert "branch 99 does not exist" in desk.error(2)
    desk.ask(Open(3), Join(3, 3), GetTokens(4, 3))
    assert "must be another branch" in desk.error(4)


def test_branches_of_another_salt_share_nothing_and_cannot_join(desk: Desk) -> None:
    desk.ask(Open(1, BranchOptions(salt="a")), text(1, "the same long text, twice"), Prefill(2, 1))
    other = desk.ask(Open(3, BranchOptions(salt="b")), text(3, "the same long text, twice"), Prefill(4, 3))
    same = desk.ask(Open(5, BranchOptions(salt="a")), text(5, "the same long text, twice"), Prefill(6, 5))
    assert other.usage.cached_tokens == 0 and same.usage.cached_tokens > 0
    desk.ask(Join(5, 3), GetTokens(7, 5))
    assert "same salt" in desk.error(7)


# ---------------------------------------------------------------- scoring


def test_scores_are_those_of_the_tokens_in_context_and_the_best_is_appended(desk: Desk) -> None:
    scored = desk.ask(Open(1), text(1, "The answer is"), Score(2, 1, (" yes", " no", " perhaps"), "sum"))
    assert isinstance(scored, Scored)
    assert [round(sum(lp.logprobs), 9) for lp in scored.logprobs] == [round(s, 9) for s in scored.scores]  # type: ignore[arg-type]
    assert scored.best == max(range(3), key=scored.scores.__getitem__)
    tail = scored.logprobs[scored.best].token_ids
    assert ids_of(desk.ask(GetTokens(3, 1)))[-len(tail) :] == list(tail)


def test_a_choice_that_completes_a_word_is_tokenized_with_it(desk: Desk) -> None:
    scored = desk.ask(Open(1), text(1, "the fo"), Score(2, 1, ("x", "xes"), "sum"))
    desk.ask(GetTokens(3, 1))
    choice = ("x", "xes")[scored.best]
    assert ids_of(desk.answer(3)) == desk.vocabulary.encode_plain("the fo" + choice, at_start=True)


def test_scoring_without_appending_leaves_the_branch_as_it_was(desk: Desk) -> None:
    before = desk.vocabulary.encode_plain("the fo", at_start=True)
    desk.ask(Open(1), text(1, "the fo"), Score(2, 1, ("x", "xes"), append=False))
    assert ids_of(desk.ask(GetTokens(3, 1))) == before


def test_choices_relative_to_no_context_count_the_first_token_as_zero(desk: Desk) -> None:
    choices = (" yes", " no", " perhaps so", " no")
    scored = desk.ask(Open(1), text(1, "Is it?"), Score(2, 1, choices, "unconditional_likelihood_normalized", False))
    for logprobs, score in zip(scored.logprobs, scored.scores):
        alone = [0.0]
        for i in range(1, len(logprobs.token_ids)):
            alone.append(desk.worker.model.logprob(identity(logprobs.token_ids[:i]), logprobs.token_ids[i]))
        expected = sum(a - b for a, b in zip(logprobs.logprobs, alone)) / len(alone)  # type: ignore[operator]
        assert score == pytest.approx(expected)
    assert scored.scores[1] == scored.scores[3]


# ---------------------------------------------------------------- errors


def test_a_failure_stays_with_its_first_cause_and_reaches_children_and_heirs(desk: Desk) -> None:
    bad = GenerateParams(temperature=-1.0)
    desk.say(Open(1), Open(9), text(1, "a"), Generate(2, 1, bad), text(1, "b"), Generate(3, 1, GREEDY), Fork(1, (10,)))
    desk.say(Generate(4, 10, GREEDY), Prefill(5, 1), Join(9, 10), GetTokens(6, 9), Score(7, 1, ("x",)), Explain(8, 1))
    desk.run()
    first = desk.error(2)
    assert "temperature must be" in first
    assert [desk.error(op) for op in (3, 4, 5, 6, 7, 8)] == [first] * 6


def test_a_bad_append_is_told_for_the_branch_and_fails_what_comes_after(desk: Desk) -> None:
    desk.say(Open(1), Append(1, (Tokens((10**6,)),)), Generate(2, 1, GREEDY))
    desk.run()
    told = [m for m in desk.answers[1] if isinstance(m, Failed) and m.op is None]
    assert [m.branch for m in told] == [1] and told[0].error.message == desk.error(2)
    assert "1000000" in desk.error(2)


def test_the_model_side_of_a_request_is_checked_too(desk: Desk) -> None:
    desk.ask(Open(1), text(1, "a"), Generate(2, 1, GenerateParams(logit_bias={512: 1.0})))
    assert "token id 512" in desk.error(2)
    kept = desk.ask(Open(3), text(3, "a"), Generate(4, 3, GenerateParams(max_tokens=2, logit_bias={511: 1.0})))
    assert isinstance(kept, Generated)
    desk.ask(Open(5), text(5, "a"), Generate(6, 5, GenerateParams(stop_regex=("(",))))
    assert "not a valid pattern" in desk.error(6)
    desk.ask(Open(7), text(7, "a"), Generate(8, 7, GenerateParams(grammar=Grammar("regex", "a"))))
    assert "not enabled" in desk.error(8)


def test_a_prompt_that_cannot_fit_is_refused_with_both_numbers_before_it_is_tokenized(desk: Desk) -> None:
    longest = desk.vocabulary.max_token_bytes
    desk.ask(Open(1), text(1, "x" * (600 * longest)), Generate(2, 1, GREEDY))
    assert "at least 600 tokens" in desk.error(2) and "512" in desk.error(2)
    assert desk.answer(2).error.code == "context_length_exceeded" and not desk.jobs
    desk.ask(Open(3), Append(3, (Tokens((5,) * 600),)), Generate(4, 3, GREEDY))
    assert "600" in desk.error(4) and "512" in desk.error(4) and desk.answer(4).error.code == "context_length_exceeded"


def test_an_internal_failure_ends_one_operation_and_the_service_goes_on(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.runtime.tokenizer.steps.sampling_of", broken)
        desk.ask(Open(1), text(1, "a"), Generate(2, 1, GREEDY))
    assert "internal error" in desk.error(2) and "on purpose" in desk.error(2)
    assert isinstance(desk.ask(Open(3), text(3, "a"), Generate(4, 3, GREEDY)), Generated)


def test_unknown_branches_and_used_numbers_are_refused_and_disturb_nobody(desk: Desk) -> None:
    desk.say(Open(1), text(1, "a"), Generate(2, 1, GREEDY), Generate(2, 1, GREEDY), Generate(3, 99, GREEDY), Open(1))
    desk.say(Fork(99, (5,)), Fork(1, (1,)), Fork(1, (6, 6)), Fork(1, ()), Mark(99, 1), Join(99, 1))
    desk.run()
    assert "branch 99 does not exist" in desk.error(3)
    answers = desk.all_answers(2)
    assert {type(a) for a in answers} == {Failed, Generated}, "the second was refused, the first answered"
    assert set(desk.service.clients[1].branches) == {1}


def test_caps_on_branches_operations_and_text_hold() -> None:
    limits = LimitsConfig(max_branches=2, max_queued_ops=3, max_text_bytes=40)
    desk = Desk(limits=limits)
    desk.say(Open(1), Open(2), Open(3), Generate(4, 3, GREEDY))
    assert "does not exist" in desk.error(4)
    desk.say(text(1, "a"), *(Generate(10 + i, 1, GREEDY) for i in range(6)))
    desk.run()
    failed = [m for i in range(6) if isinstance(m := desk.answer(10 + i), Failed)]
    assert failed and "operations wait on the branch" in failed[0].error.message
    desk.ask(text(2, "x" * 41), Generate(20, 2, GREEDY))
    assert "41 bytes" in desk.error(20) and "40" in desk.error(20)


# ---------------------------------------------------------------- work off the loop


def test_much_text_is_tokenized_off_the_loop_and_others_go_on_meanwhile() -> None:
    desk = Desk(limits=LimitsConfig(inline_text_bytes=64), context=2048, num_pages=1024)
    desk.say(Open(1), text(1, "word " * 200), Generate(2, 1, GREEDY), Open(3), text(3, "short"), Generate(4, 3, GREEDY))
    assert [lane for lane, _, _ in desk.jobs] == ["text"]
    while not desk.all_answers(4):
        desk.tick()
    assert not desk.all_answers(2)
    desk.run()
    prompt = desk.vocabulary.encode_plain("word " * 200, at_start=True)
    assert desk.answer(2).usage.prompt_tokens == len(prompt)


def test_a_grammar_is_checked_once_off_the_loop_and_its_refusal_names_it() -> None:
    checked: list[str] = []

    def check(grammar: Grammar) -> None:
        checked.append(grammar.source)
        if grammar.source == "(":
            raise InvalidRequest("invalid regex: unclosed group", param="grammar")

    desk = Desk(grammars=check)
    for i, source in enumerate(["3:0", "3:0", "("]):
        params = GenerateParams(max_tokens=8, temperature=0.0, grammar=Grammar("regex", source))
        desk.say(Open(10 + i), text(10 + i, "a"), Generate(20 + i, 10 + i, params))
        desk.run()
    assert checked == ["3:0", "("] and "unclosed group" in desk.error(22)
    assert isinstance(desk.answer(20), Generated) and isinstance(desk.answer(21), Generated)


def test_closing_while_a_grammar_is_checked_drops_the_result() -> None:
    desk = Desk(grammars=lambda grammar: None)
    params = GenerateParams(max_tokens=8, temperature=0.0, grammar=Grammar("regex", "3:0"))
    desk.say(Open(1), text(1, "a"), Generate(2, 1, params))
    assert len(desk.jobs) == 1
    desk.say(Close((1,)))
    assert "closed" in desk.error(2)
    desk.work()
    assert desk.service.counters["late_results"] == 1
    desk.assert_nothing_is_left()


# ---------------------------------------------------------------- cancelling, closing, time


def test_cancelling_ends_exactly_what_it_names_and_does_not_fail_the_branch(desk: Desk) -> None:
    long = GenerateParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    desk.say(Open(1), text(1, "a"), Generate(2, 1, long), Generate(3, 1, GREEDY), Generate(4, 1, GREEDY))
    desk.tick()
    desk.tick()
    desk.say(Cancel(ops=(3,)))
    assert desk.answer(3).error.type == "cancelled", "it only waited: the answer comes at once"
    desk.say(Cancel(ops=(2,)), Cancel(ops=(2, 77)))
    desk.run()
    assert desk.answer(2).finish_reason == "abort" and isinstance(desk.answer(4), Generated)
    kept = len(desk.answer(2).token_ids)
    assert desk.answer(4).usage.prompt_tokens == len(desk.vocabulary.encode_plain("a")) + kept


def test_cancelling_before_anything_ran_gives_the_prompt_back(desk: Desk) -> None:
    desk.say(Open(1), text(1, "the same"), Generate(2, 1, GREEDY), Cancel(ops=(2,)))
    desk.run()
    assert isinstance(desk.answer(2), Failed)
    assert ids_of(desk.ask(GetTokens(3, 1))) == desk.vocabulary.encode_plain("the same", at_start=True)
    assert isinstance(desk.ask(Generate(4, 1, GREEDY)), Generated)


def test_a_program_is_cancelled_as_a_whole_and_others_are_not(desk: Desk) -> None:
    long = GenerateParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    desk.say(Open(1, BranchOptions(program=7)), text(1, "a"), Generate(2, 1, long), Fork(1, (10,)), Generate(3, 10, long))
    desk.say(Open(4), text(4, "a"), Generate(5, 4, GREEDY))
    desk.tick()
    desk.say(Cancel(programs=(7,)))
    desk.run()
    assert isinstance(desk.answer(5), Generated)
    for op in (2, 3):
        answer = desk.answer(op)
        assert isinstance(answer, Failed) or answer.finish_reason == "abort"


def test_closing_ends_what_runs_and_answers_every_operation(desk: Desk) -> None:
    desk.say(Open(1), text(1, "a"), Generate(2, 1, GenerateParams(max_tokens=300)), Generate(3, 1, GREEDY))
    desk.tick()
    desk.say(Close((1, 99)), Close((1,)))
    assert "closed" in desk.error(2) and "closed" in desk.error(3)
    desk.run()
    assert desk.scheduler.is_idle and not desk.service.clients[1].branches


def test_a_parent_kept_for_a_child_alone_ends_with_it(desk: Desk) -> None:
    long = GenerateParams(max_tokens=300, temperature=0.0, ignore_eos=True)
    desk.say(Open(1), text(1, "a"), Generate(2, 1, long), Fork(1, (10,)), Close((1,)))
    desk.tick()
    assert not desk.all_answers(2), "the child needs the generation"
    desk.say(Close((10,)))
    assert "closed" in desk.error(2) and not desk.service.clients[1].branches
    desk.run()


def test_an_operation_that_waits_too_long_times_out_and_fails_its_branch(desk: Desk) -> None:
    long = GenerateParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    quick = GenerateParams(max_tokens=4, temperature=0.0, timeout_ms=20.0)
    desk.say(Open(1), text(1, "a"), Generate(2, 1, long), Generate(3, 1, quick), Generate(4, 1, GREEDY))
    for _ in range(30):
        desk.tick()
    assert desk.answer(3).error.type == "timeout_error", "the client is told in time"
    assert not desk.all_answers(2)
    desk.run()
    assert isinstance(desk.answer(2), Generated) and desk.error(4) == desk.error(3)


def test_a_running_operation_times_out(desk: Desk) -> None:
    long = GenerateParams(max_tokens=400, temperature=0.0, ignore_eos=True, timeout_ms=20.0)
    desk.ask(Open(1), text(1, "a"), Generate(2, 1, long))
    assert desk.answer(2).error.type == "timeout_error"


def test_a_client_that_leaves_takes_everything_with_it_and_nothing_of_others(desk: Desk) -> None:
    for client in (1, 2):
        desk.say(Open(1), text(1, "a"), Generate(2, 1, GREEDY), Fork(1, (3, 4)), Join(1, 3), client=client)
        desk.say(GetStats(50), Score(51, 4, ("x", "y")), client=client)
    desk.tick()
    desk.service.disconnect(1)
    desk.service.disconnect(1)
    desk.run()
    assert not any(isinstance(m, Generated) for m in desk.answers[1])
    assert isinstance(desk.answer(2, client=2), Generated) and isinstance(desk.answer(51, client=2), Scored)


def test_a_lost_engine_is_told_to_everybody_once_and_to_those_who_come_later(desk: Desk) -> None:
    lost = Error("internal_error", "the worker died", code="engine_lost")
    desk.say(Open(1), text(1, "a"), Generate(2, 1, GREEDY))
    desk.service.engine_lost(lost)
    desk.service.engine_lost(Error("internal_error", "again", code="engine_lost"))
    desk.say(Open(3), Generate(4, 3, GREEDY))
    desk.service.handle(7, Hello())
    desk._collect()
    assert [m.error for m in desk.answers[1] if isinstance(m, EngineLost)] == [lost]
    assert desk.error(4) == "the worker died" and desk.answers[7] == [EngineLost(lost)]


# ---------------------------------------------------------------- questions


def test_spans_tell_where_every_token_came_from(desk: Desk) -> None:
    prompt = "Explain where all of these tokens came from, please."
    desk.ask(Open(1), text(1, prompt), Prefill(2, 1))
    desk.say(Open(3), text(3, prompt), Generate(4, 3, GREEDY), text(3, " and"), Explain(5, 3))
    desk.run()
    told = desk.answer(5)
    assert isinstance(told, Explained)
    origins = [(s.origin, s.stop - s.start) for s in told.spans]
    size = len(desk.vocabulary.encode_plain(prompt, at_start=True))
    assert origins == [("cached", size - 1), ("computed", 1), ("generated", 6), ("pending", 1)]
    assert told.length == size + 7 and told.text.startswith(prompt) and told.text.endswith(" and")
    assert "".join(s.text for s in told.spans) == told.text and all(s.text for s in told.spans)
    assert told.spans[-1].text.endswith(" and") and (told.spans[0].text + told.spans[1].text) == prompt


def test_text_that_waits_is_looked_up_and_an_inherited_prompt_counts_as_cached(desk: Desk) -> None:
    prompt = "Explain where all of these tokens came from, please."
    size = len(desk.vocabulary.encode_plain(prompt, at_start=True))
    desk.ask(Open(1), text(1, prompt), Prefill(2, 1))
    desk.say(Open(3), text(3, prompt + " Again."), Explain(4, 3))  # nothing was sent for this branch yet
    desk.say(Fork(1, (5, 6)), text(5, " More"), Explain(7, 5), Explain(8, 1))
    desk.run()
    waiting, child, parent = (desk.answer(op) for op in (4, 7, 8))
    assert isinstance(waiting, Explained) and isinstance(child, Explained) and isinstance(parent, Explained)
    assert waiting.cached_now >= size - 1 and [s.origin for s in waiting.spans] == ["cached", "pending"]
    assert waiting.spans[0].stop == waiting.cached_now
    assert [(s.origin, s.text) for s in child.spans] == [("cached", prompt), ("pending", " More")]
    assert [s.origin for s in parent.spans] == ["computed"]  # what it computed stays its own


def test_a_character_cut_by_a_span_belongs_to_the_later_one_and_nothing_is_lost(desk: Desk) -> None:
    whole = desk.vocabulary.encode_plain("aé😀", at_start=True)
    assert len(whole) > 3  # tokens of single bytes
    for cut in range(1, len(whole)):
        desk.ask(Open(100 * cut), Append(100 * cut, (Tokens(tuple(whole[:cut])),)), Prefill(100 * cut + 1, 100 * cut))
        desk.say(Append(100 * cut, (Tokens(tuple(whole[cut:])),)), Explain(100 * cut + 2, 100 * cut))
        desk.run()
        told = desk.answer(100 * cut + 2)
        assert isinstance(told, Explained)
        assert "".join(s.text for s in told.spans) == told.text == "aé😀" and "�" not in told.text


def test_tokenizing_needs_no_branch_and_a_prefill_of_nothing_is_done_at_once(desk: Desk) -> None:
    assert ids_of(desk.ask(Tokenize(1, (Text("a b"),)))) == desk.vocabulary.encode_plain("a b", at_start=True)
    assert isinstance(desk.ask(Open(2), Prefill(3, 2)), Prefilled)
    desk.ask(Tokenize(4, (RoleEnd(),)))
    assert "no turn is open" in desk.error(4)


MALFORMED: list[Message] = [
    Generate(2, 1, GenerateParams(**{name: value}))  # type: ignore[arg-type]
    for name, values in {
        "max_tokens": (-1, 1 << 31, True, 1.5, "5", None), "min_tokens": (-1, 200), "temperature": (-1.0, 1e9, float("nan"), "x", True),
        "top_k": (-5, 1 << 40), "top_p": (-0.1, 1.5, float("inf")), "min_p": (2.0,), "repetition_penalty": (0.0, -1.0),
        "presence_penalty": (1e9,), "frequency_penalty": (float("-inf"),), "stop": (("",), ("x",) * 65, "abc", (5,), ("y" * 5000,)),
        "stop_regex": (("(",), ("a*",), ("x",) * 17), "stop_token_ids": ((-1,), (512,), (1.5,), (True,), (2**40,)),
        "logit_bias": ({-1: 1.0}, {512: 0.0}, {1: 1e9}, {1: None}, {"a": 1.0}, {1: float("nan")}, [1]), "seed": (2**63, 1.5),
        "num_top_logprobs": (-1, 10**6, True), "prompt_logprobs_from": (-1, 10**6), "timeout_ms": (0.0, -5.0, 1e18),
        "ignore_eos": (1,), "grammar": ("a", Grammar("regex", "a\ud800")),
    }.items()
    for value in values
]  # fmt: skip


@pytest.mark.parametrize("message", MALFORMED, ids=lambda m: str(m.params)[15:75])
def test_a_value_out_of_range_is_an_error_naming_the_parameter(message: Generate) -> None:
    desk = Desk(grammars=lambda grammar: None)
    desk.ask(Open(1), text(1, "a"), message)
    error = desk.answer(2).error
    assert error.type == "invalid_request_error" and error.param, error
    assert isinstance(desk.ask(Open(3), text(3, "a"), Generate(4, 3, GREEDY)), Generated)
