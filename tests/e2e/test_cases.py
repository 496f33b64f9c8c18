"""Known ways to break an LLM runtime, tried end to end. `CASES.md` beside this file says which test shows which case.

Each client-side test runs twice: embedded, where messages are objects, and connected, where they are bytes. After each, the engine
must answer a plain request as if nothing had happened, and hold nothing.
"""

import enum
import gc
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.service import Desk
from support.tiny_models import (
    llama_config,
    make_puppet,
    make_tiny_llama,
    random_llama_tensors,
    write_safetensors,
)

import anabranch as ab
from anabranch.lang.backend import Constraint, Sampling, Text, Tokens
from anabranch.lang.errors import Unsupported
from anabranch.runtime.config import LimitsConfig
from anabranch.runtime.engine import Engine
from anabranch.runtime.errors import ConfigError, EngineStartError, InvalidRequest, RequestTimeout
from anabranch.runtime.messages import Append, Cancel, Close, Generate, GetTokens, Join, Open, Score
from anabranch.runtime.messages import Text as WireText

WAIT = 60
NO_NUMBERS: list[Any] = [10**400, -(10**400), 10**5000, float("nan"), float("inf"), True, "5", [1], 1j, b"1", np.float32(1)]
NUMBERS = [
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "num_top_logprobs", "prompt_logprobs_from", "timeout",
]  # fmt: skip


class Word(str):
    """What template libraries and numpy give: a string like any other, but not for a message encoder."""


class Size(enum.IntEnum):
    FOUR = 4


class Real(float):
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("cases") / "tiny", seed=5)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Engine]:
    with Engine(str(model), num_pages=256, page_size=4, num_threads=1, listen=True, mode="inprocess") as engine:
        yield engine


@pytest.fixture(scope="module", params=["embedded", "connected"])
def client(request: pytest.FixtureRequest, served: Engine) -> Iterator[Engine]:
    if request.param == "embedded":
        yield served
        return
    with Engine.connect(served.address) as engine:
        yield engine


@pytest.fixture
def engine(client: Engine) -> Iterator[Engine]:
    yield client
    assert say(client, "Still") == say(client, "Still"), "the engine does not answer as before"
    gc.collect()
    assert client.tokenize("x")  # a round trip: what was dropped has arrived
    stats = client.stats(check=True).result(WAIT)
    assert stats["check"] == "ok" and stats["running"] == stats["waiting"] == stats["branches"] == 0, stats
    assert stats["pages_in_use"] == stats["pages_locked"] == 0, stats


def say(engine: Engine, prompt: Any, **params: Any) -> Any:
    return engine.generate(prompt, **{"max_tokens": 4, "temperature": 0, "timeout": WAIT} | params).token_ids


def branch(engine: Engine, text: str = "hello") -> Any:
    made = engine.open(seed=1)
    made.append([Text(text)])
    return made


# ---------------------------------------------------------------- values (172, 174, 176, 105, 167, 178)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_value_that_is_no_number_in_range_is_refused_by_name_where_it_is_written(engine: Engine, name: str) -> None:
    for value in NO_NUMBERS:
        with pytest.raises(InvalidRequest, match=name):
            engine.generate("hi", **{"max_tokens": 2, name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-1, -1e-9, 101]),
        ("top_p", [-1, 1.5]),
        ("top_k", [-5, 2**31]),
        ("min_p", [2]),
        ("repetition_penalty", [0, -1]),
        ("presence_penalty", [1e9]),
        ("seed", [2**63, 2**64, -(2**63) - 1]),
        ("num_top_logprobs", [-1, 10**6]),
        ("max_tokens", [-1, 2**31]),
        ("logit_bias", [{512: 1}, {-1: 1}, {"a": 1}, {1.5: 1}, {True: 1}, {1: None}, {1: float("nan")}, {1: 10**400}, {10**5000: 1}, [1]]),
        ("stop", ["", [""], [None], 5, 5.5, "x" * 5000, ["a"] * 1_000_000, "\ud800"]),
        ("stop_token_ids", [[512], [-1], [True], 10**5000, "ab", 1.5]),
        ("stop_regex", ["(", 5, ["a"] * 100]),
        ("ignore_eos", [1, "yes"]),
        ("n", [0, True, "2", 257, 10**5000]),
    ],
)  # fmt: skip
def test_a_value_out_of_bounds_is_refused_by_name(engine: Engine, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as refusal:
            engine.generate("hi", **{"max_tokens": 2, name: value})
        assert name in str(refusal.value) or "token id" in str(refusal.value) or "stop string" in str(refusal.value)
        assert len(str(refusal.value)) < 400


def test_values_of_subclasses_are_values_like_others(engine: Engine) -> None:
    plain = {"temperature": 0.5, "max_tokens": 4, "stop": ["qqq"], "logit_bias": {4: 1.0}, "seed": 4, "top_p": 0.5}
    odd = {
        "temperature": np.float64(0.5), "max_tokens": Size.FOUR, "stop": [np.str_("qqq")], "logit_bias": {Size.FOUR: Real(1)},
        "seed": Size.FOUR, "top_p": Real(0.5),
    }  # fmt: skip
    assert say(engine, Word("hi"), **odd) == say(engine, "hi", **plain)
    assert say(engine, [Size.FOUR], **odd) == say(engine, [4], **plain)
    assert say(engine, "hi", regex=Word("a{4}")) == say(engine, "hi", regex="a{4}")
    held = branch(engine, Word("hello"))
    assert held.score([Word("a"), np.str_("b")], append=False).result(WAIT).scores
    engine.open(salt=Word("x"), priority=Size.FOUR).close()


def test_what_was_given_to_a_request_may_be_changed_afterwards(engine: Engine) -> None:
    bias = {5: 900.0}
    held = branch(engine)
    made = held.generate(Sampling(max_tokens=3, temperature=0.0, logit_bias=bias))
    bias.clear()
    bias[10**6] = 1.0
    assert set(made.result(WAIT).token_ids) == {5}


def test_what_is_no_prompt_is_refused(engine: Engine) -> None:
    no_ids: list[Any] = [[1.5], [True], [-1], [1, -1], [[1, -1]], [512], [200_000], [2**40], [10**5000], [["a"]]]
    for prompt in (*no_ids, None, 5, 1.5, b"abc", {1: 2}, ["a", None], "\ud800", ["a", "\udfff"], np.array([1, 2])):
        with pytest.raises(InvalidRequest):
            engine.generate(prompt, max_tokens=2, timeout=WAIT)


@pytest.mark.parametrize("prompt", ["", [], [[]], [""]])
def test_an_empty_prompt_begins_with_the_beginning_of_sequence(engine: Engine, prompt: Any) -> None:
    made = engine.generate(prompt, max_tokens=2, ignore_eos=True, timeout=WAIT)
    made = made[0] if isinstance(made, list) else made
    assert made.usage["prompt_tokens"] == 1 and len(made.token_ids) == 2


def test_parameters_that_would_be_ignored_are_refused(engine: Engine) -> None:
    for params in ({"stream": True}, {"foo": 1}, {"regex": "a", "choices": ["b"]}, {"grammar": "x", "regex": "a"}):
        with pytest.raises(ConfigError):
            engine.generate("hi", **params)
    for params in ({"regex": 5}, {"ebnf": ["x"]}, {"json_schema": {"const": float("nan")}}, {"json_schema": object()}, {"grammar": "x"}):
        with pytest.raises(InvalidRequest):
            engine.generate("hi", **params)


def test_the_last_id_can_be_biased_and_a_tiny_temperature_is_greedy(engine: Engine) -> None:
    assert set(say(engine, "hi", logit_bias={511: 1000})) == {511}
    greedy = say(engine, "hi")
    assert all(say(engine, "hi", temperature=t) == greedy for t in (1e-30, 1e-8, -0.0))
    assert say(engine, "hi", temperature=5.0, top_p=0) == greedy


# ---------------------------------------------------------------- arguments of branches (124, 150, kinds 12 and 23)


def test_an_argument_that_no_message_can_carry_is_refused_and_nobody_waits(engine: Engine) -> None:
    held, other = branch(engine), branch(engine)
    wrong: list[Callable[[], Any]] = [
        lambda: held.score(["a"], "nonsense"),
        lambda: held.score(["a"], append="yes"),
        lambda: held.score(None),
        lambda: held.score([[10**5000]]),
        lambda: held.score(["a"], timeout=float("nan")),
        lambda: held.rollback("x"),
        lambda: held.rollback(2**70),
        lambda: held.rollback([]),
        lambda: held.append_spans([(other, "x")]),
        lambda: held.join("x"),
        lambda: held.lease(10**5000),
        lambda: held.fork(10**5000),
        lambda: held.fork(10**9),
        lambda: held.append(None),
        lambda: engine.cancel_program("x"),  # type: ignore[arg-type]
        lambda: engine.open(seed=10**5000),
        lambda: engine.open(program=2**63),
        lambda: engine.open(salt=5),  # type: ignore[arg-type]
    ]
    for call in wrong:
        with pytest.raises(InvalidRequest):
            call()
    assert held.token_ids().result(WAIT) == other.token_ids().result(WAIT)  # nothing failed, nothing changed


def test_a_branch_of_another_engine_is_never_taken_for_one_of_this(engine: Engine, model: Path, served: Engine) -> None:
    """Labels are a client's own: the same number names another branch, with another user's tokens, to another client."""
    with Engine.connect(served.address) as other:
        mine, secrets = branch(engine), [branch(engine, f"secret {i}") for i in range(20)]
        before = mine.token_ids().result(WAIT)
        for foreign in [other.open() for _ in range(20)]:
            with pytest.raises(InvalidRequest, match="same engine"):
                mine.join(foreign)
            with pytest.raises(InvalidRequest, match="same engine"):
                mine.join(None, [foreign])
            with pytest.raises(InvalidRequest, match="same engine"):
                mine.append_spans([(foreign, foreign.mark())])
            foreign.close()
        assert mine.token_ids().result(WAIT) == before
        assert all(s.token_ids().result(WAIT) for s in secrets)
        assert other.tokenize("x")  # what was closed is closed by now


def test_more_ids_than_the_context_are_refused_as_they_come_and_not_kept(engine: Engine) -> None:
    held = engine.open()
    for _ in range(3):
        held.append([Tokens(tuple([7] * 500))])
    with pytest.raises(InvalidRequest, match="1500 tokens"):
        held.token_ids().result(WAIT)
    root = branch(engine)
    mark = root.mark()
    child = root.fork(1)[0]
    child.append([Tokens(tuple([7] * 600))])
    root.append_spans([(child, mark)])
    root.append_spans([(child, mark)])
    with pytest.raises(InvalidRequest, match="context"):
        root.token_ids().result(WAIT)


def test_cancelling_a_score_while_its_choices_are_tokenized_keeps_the_text_before_them() -> None:
    desk = Desk(limits=LimitsConfig(inline_text_bytes=4))
    text = "some text that stands before"
    desk.say(Open(1), Open(2), Append(1, (WireText(text),)), Append(2, (WireText(text),)))
    desk.say(Score(10, 1, ("choice one", "choice two"), append=False))
    assert desk.jobs, "the choices are tokenized off the loop"
    desk.say(Cancel(ops=(10,)))
    mine, reference = desk.ask(GetTokens(11, 1)), desk.ask(GetTokens(12, 2))
    assert mine.token_ids == reference.token_ids != b""


def test_two_branches_may_drop_each_other() -> None:
    """Both wait for a winner; whoever joins first closes the other, in the middle of whose join it is."""
    desk = Desk()
    desk.say(*(Open(i) for i in range(1, 5)), *(Append(i, (WireText(f"branch {i}"),)) for i in range(1, 5)))
    desk.say(Generate(10, 3), Generate(11, 4), Join(1, 3, drop=(2,)), Join(2, 4, drop=(1,)), GetTokens(12, 1), GetTokens(13, 2))
    desk.run()
    answers = [desk.answer(op) for op in (10, 11, 12, 13)]
    assert len(answers) == 4 and desk.service.counters["internal_errors"] == 0
    desk.say(Close((1, 2, 3, 4)))
    desk.assert_nothing_is_left()


def test_a_timeout_of_zero_is_over_at_once_and_a_wrong_one_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestTimeout):
        engine.generate("hi", timeout=0)
    for wrong in (-1, "x", float("nan"), 10**400, True):
        with pytest.raises(InvalidRequest, match="timeout"):
            engine.generate("hi", timeout=wrong)


# ---------------------------------------------------------------- conversations (079, 081, 084-090 where there is no HTTP)


def test_a_conversation_is_taken_as_clients_write_it_or_refused_by_its_place(engine: Engine) -> None:
    def chat(*messages: Any) -> Any:
        return engine.chat(list(messages), max_tokens=3, temperature=0).token_ids

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat({"role": "user", "content": parts}) == chat({"role": "user", "content": "a\nb", "name": None})
    assert chat({"role": "user", "content": None}) == chat({"role": "user", "content": ""}) == chat({"role": "user"})
    for wrong in (
        {"content": "x"}, {"role": 5, "content": "x"}, {"role": "user", "content": 5}, 5, None, "x",
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match=r"messages\[1\]"):
            chat({"role": "user", "content": "x"}, wrong)
    for wrong in ([], None, "hello", 5):
        with pytest.raises(InvalidRequest, match="messages"):
            engine.chat(wrong)


def test_a_conversation_goes_on_after_an_answer_was_broken_off_or_refused(engine: Engine) -> None:
    talk = engine.conversation(system="Be brief.")
    answer = talk.say("one", max_tokens=500, ignore_eos=True)
    assert next(answer)
    answer.close()  # type: ignore[attr-defined]  # a generator
    for wrong in ({"temperature": "x"}, {"max_tokens": -1}, {"foo": 1}):
        with pytest.raises(ValueError):
            list(talk.say("two", **wrong))
    with pytest.raises(InvalidRequest):
        list(talk.say("\ud800"))
    assert "".join(talk.say("three", max_tokens=6, ignore_eos=True))


def test_a_call_that_scores_or_explains_holds_its_branch_until_it_has_its_answer(engine: Engine) -> None:
    choices = [" yes", " no"]
    held = branch(engine)
    assert engine.score("hello", choices).scores == held.score(choices, append=False).result(WAIT).scores
    assert engine.explain("hello").length == len(engine.tokenize("hello"))


# ---------------------------------------------------------------- grammars (060, 061, 063, 067, 072; kinds 5 and 7)

REFUSED = [
    ("regex", "("), ("regex", "[a-"), ("regex", "*a"), ("regex", "(?=a)b"), ("regex", r"(a)\1"), ("regex", "(" * 500 + ")" * 500),
    ("regex", "(a{1000}){1000}"), ("regex", "(a?){5000}a{5000}"),
    ("json_schema", '{"type":"strin"}'), ("json_schema", '{"type":"object","properties":5}'), ("json_schema", "7"), ("json_schema", "{"),
    ("json_schema", '{"$ref":"#"}'), ("json_schema", '{"$ref":"http://127.0.0.1:9/x"}'), ("json_schema", '{"$ref":"#/nowhere"}'),
    ("json_schema", '{"type":"array","uniqueItems":true}'), ("json_schema", '{"const":1e400}'),
    ("json_schema", '{"type":"integer","type":"string"}'),
    ("ebnf", "root ::="), ("ebnf", "x y z"), ("ebnf", "root ::= root"), ("ebnf", 'root ::= "a" root'), ("ebnf", 'root ::= "a"{1000000}'),
    ("lark", "start: start"), ("lark", "start: /(/"), ("lark", "start: @other"), ("lark", "start: <|im_end|>"),
    ("choices", "[]"), ("choices", '["a",null]'), ("choices", "5"),
]  # fmt: skip


def test_a_grammar_that_cannot_be_used_is_the_requests_error_and_nobody_elses(engine: Engine) -> None:
    """Also one that compiles but grows beyond every bound while it runs: that is no failure of the engine."""
    for kind, source in REFUSED:
        held = branch(engine)
        made = held.generate(Sampling(max_tokens=8, temperature=0.0, constraint=Constraint(kind, source)))  # type: ignore[arg-type]
        fault = made.exception(WAIT)
        assert isinstance(fault, InvalidRequest), f"{kind} {source[:40]}: {fault!r}"
        assert "nternal" not in str(fault) and len(str(fault)) < 900


@pytest.mark.parametrize("choices", [["Dr. Smith", "a|b", "(x)", "C++", ".*"], ["a", "a"], ["a", "ab", "abc"], ["\x00"], ["é\U0001f600"]])
def test_choices_are_literals(engine: Engine, choices: list[str]) -> None:
    assert engine.generate("hi", choices=choices, max_tokens=64, seed=3).text in choices
    held = branch(engine)
    scores = held.score(choices, append=False).result(WAIT)
    assert len(scores.scores) == len(choices)
    assert all(a == b for x, a in zip(choices, scores.scores) for y, b in zip(choices, scores.scores) if x == y)


# ---------------------------------------------------------------- programs (147, 148, 161; kinds 12 and 23)


@pytest.fixture
def run_on(engine: Engine) -> Any:
    return lambda **options: ab.state(backend=engine, max_tokens=3, temperature=0, timeout=WAIT, **options)


def test_what_a_statement_cannot_mean_is_refused_where_it_stands(run_on: Any) -> None:
    s = run_on()
    s += "hello"
    for wrong in (
        lambda: ab.gen("x", choices=[]),
        lambda: ab.gen("x", choices=["a"], regex="b"),
        lambda: ab.gen("x", choices=["a"], type=int),
        lambda: ab.gen("x", choices=["a"], n=3),
        lambda: ab.gen("x", n=True),
        lambda: ab.gen("x", n=0),
        lambda: ab.select("x", [], 0.0),
        lambda: ab.select("x", iter(())),
        lambda: ab.select("x", "abc"),
        lambda: ab.select("x", ["a", ""]),
        lambda: ab.select("x", ["a"], float("nan")),
        lambda: s.fork(10**9),
        lambda: s.fork(10**5000),
        lambda: s.fork(True),
        lambda: s.fork(1.0),
        lambda: s.fork(-1),
        lambda: s.rollback("x"),
        lambda: s.rollback(None),
    ):
        with pytest.raises((ValueError, TypeError, Unsupported, ab.AnabranchError)):
            wrong()  # type: ignore[no-untyped-call]
    s += ab.select("x", (c for c in (" one", " two")))
    assert s["x"] in (" one", " two")


# ---------------------------------------------------------------- KV (007, 012, 020, 170; kinds 3, 4 and 18)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_going_back_to_any_place_in_a_page_and_on_another_way_is_as_if_it_had_been_said_at_once(page_size: int, model: Path) -> None:
    with (
        Engine(str(model), num_pages=640 // page_size, page_size=page_size, num_threads=1, mode="inprocess") as warm,
        Engine(str(model), num_pages=640 // page_size, page_size=page_size, num_threads=1, cache=False, mode="inprocess") as cold,
    ):
        common = list(range(20, 20 + 16))
        for keep in range(1, 18):
            root = warm.open(seed=1)
            root.append([Tokens(tuple(common[:keep]))])
            mark = root.mark()
            first = root.generate(Sampling(max_tokens=9, temperature=0.0, ignore_eos=True))
            child, grandchild = root.fork(1)[0], None
            root.rollback(mark)
            root.append([Tokens((99, 98))])
            child.append([Tokens((97,))])
            grandchild = child.fork(1)[0]
            grandchild.rollback(mark)
            grandchild.append([Tokens((96,))])
            made = [b.generate(Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)) for b in (root, child, grandchild)]
            said = list(first.result(WAIT).token_ids)
            prompts = [[*common[:keep], 99, 98], [*common[:keep], *said, 97], [*common[:keep], 96]]
            for prompt, future in zip(prompts, made, strict=True):
                assert future.result(WAIT).token_ids == say(cold, prompt, max_tokens=5, ignore_eos=True), f"kept {keep}: {prompt}"
            root.join(grandchild, [child])
            root.append([Tokens((95,))])
            joined = root.token_ids().result(WAIT)
            assert joined == [*prompts[2], *made[2].result(WAIT).token_ids, 95]
            after = root.generate(Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)).result(WAIT)
            assert after.token_ids == say(cold, joined, ignore_eos=True), f"joined at {keep}"


# ---------------------------------------------------------------- weights that are no numbers (kind 16)


def test_a_token_whose_weights_are_nan_fails_its_requests_and_no_others(tmp_path: Path, model: Path) -> None:
    spec = llama_config(layers=2, hidden=64, vocab=512, heads=4, kv_heads=2, head_dim=16, inner=128, tie=False, eos=1, bos=0)
    broken = make_tiny_llama(tmp_path / "broken", seed=5)
    tensors = random_llama_tensors(spec, seed=5)
    tensors["model.embed_tokens.weight"][300] = np.nan
    write_safetensors(broken, tensors)
    clean = [20, 21, 22, 23, 24]
    with Engine(str(broken), num_pages=64, page_size=4, num_threads=1, mode="inprocess") as engine:
        alone = say(engine, clean, ignore_eos=True)
        held = [engine.open(seed=1) for _ in range(8)]
        for i, one in enumerate(held):
            one.append([Tokens((*clean, 300) if i % 2 else tuple(clean))])
        made = [one.generate(Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)) for one in held]
        for i, future in enumerate(made):
            if i % 2:
                assert future.exception(WAIT) is not None
            else:
                assert future.result(WAIT).token_ids == alone
        assert say(engine, [*clean, 25], ignore_eos=True) == say(engine, [*clean, 25], ignore_eos=True)
        with pytest.raises(ab.AnabranchError):
            say(engine, [*clean, 300, 25])
        assert engine.stats(check=True).result(WAIT)["check"] == "ok"


# ---------------------------------------------------------------- model directories (144; kinds 2, 5 and 7)


def with_normalizer(model: Path, to: Path, *steps: dict[str, Any]) -> str:
    shutil.copytree(model, to)
    spec = json.loads((to / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "Sequence", "normalizers": list(steps)}
    (to / "tokenizer.json").write_text(json.dumps(spec))
    return str(to)


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def test_a_tokenizer_that_gives_up_on_a_text_ends_that_request_alone(model: Path, tmp_path: Path) -> None:
    """Its native library panics, which is no `Exception` in Python: unnoticed, it ends the engine's thread."""
    path = with_normalizer(model, tmp_path / "slow", replace({"Regex": "(a+)+$"}, "b"))
    with Engine(path, num_pages=64, num_threads=1, mode="inprocess") as engine:
        before = say(engine, "hello")
        for text in ("a" * 300 + "!", "a" * 300 + "!" * 20_000):  # on the loop, and off it
            with pytest.raises(InvalidRequest):
                say(engine, text)
        with pytest.raises(InvalidRequest):
            engine.tokenize("a" * 300 + "!")
        assert say(engine, "hello") == before


def test_a_normalizer_that_multiplies_text_is_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    doubling = [replace({"String": "a"}, "aa")] * 40
    nested = {"type": "Sequence", "normalizers": [replace({"Regex": "."}, "xxxxxxxx")] * 3}
    for name, steps in (("flat", doubling), ("nested", [nested]), ("long", [replace({"String": "a"}, "b" * 10_000)])):
        path = with_normalizer(model, tmp_path / name, *steps)
        with pytest.raises(EngineStartError, match="times longer"):
            Engine(path, num_pages=64, num_threads=1, mode="inprocess")
    usual = [replace({"String": " "}, "▁"), replace({"String": "``"}, '"'), replace({"Regex": " {2,}"}, " ")]
    with Engine(with_normalizer(model, tmp_path / "usual", *usual), num_pages=64, num_threads=1, mode="inprocess") as engine:
        assert say(engine, "hello there", ignore_eos=True)


def test_every_test_that_the_table_of_cases_names_exists() -> None:
    here = Path(__file__)
    named = set(re.findall(r"`(test_\w+)`", (here.parent / "CASES.md").read_text()))
    defined = {name for file in here.parents[1].rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert len(named) > 80 and named <= defined, sorted(named - defined)


# ---------------------------------------------------------------- chat templates (094)


@pytest.mark.parametrize("own", [None, "{% for %}"])
def test_a_model_whose_template_is_missing_or_broken_says_so_and_takes_one_from_a_file(tmp_path: Path, own: str | None) -> None:
    folder = make_puppet(tmp_path / "base", ["yes"], template="").path
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | ({} if own is None else {"chat_template": own})))
    given = tmp_path / "mine.jinja"
    given.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    talk = [{"role": "user", "content": "is it?"}]
    with Engine(str(folder), mode="inprocess", backend="reference") as engine:
        with pytest.raises(InvalidRequest, match="no chat template" if own is None else "cannot be used") as refused:
            engine.chat(talk, max_tokens=4)
        assert "chat_template=FILE" in str(refused.value)
        assert engine.generate("is it?", max_tokens=1).text == "yes"
    with Engine(str(folder), chat_template=given, mode="inprocess", backend="reference") as engine:
        assert engine.chat(talk, max_tokens=4, temperature=0).text == "yes"
    given.write_text("{% for %}")
    with pytest.raises((ConfigError, EngineStartError), match="mine.jinja"):
        Engine(str(folder), chat_template=given, mode="inprocess", backend="reference")
