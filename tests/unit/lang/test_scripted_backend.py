"""The scripted backend keeps the contract of the real one, and says what it is told to."""

from typing import Any

import pytest
from support.backend_contract import GREEDY, WAIT, BackendContract, gen, say

from anabranch.lang.backend import Sampling
from anabranch.lang.testing import Gate, Prompt, Reply, ScriptedBackend


class TestScriptedBackendKeepsTheContract(BackendContract):
    many = 500

    @pytest.fixture
    def backend(self) -> ScriptedBackend:
        def script(prompt: Prompt) -> Any:
            return Reply(Gate()) if prompt.text.startswith("This takes long") else None

        return ScriptedBackend(script)

    def is_settled(self, backend: ScriptedBackend) -> bool:
        return backend.stats().result(WAIT)["waiting_ops"] == 0


def test_a_mapping_answers_by_the_key_that_occurs_last() -> None:
    backend = ScriptedBackend({"first": "1", "second": "2"})
    assert gen(say(backend.open(), "first, then second")).text == "2"
    assert gen(say(backend.open(), "second, then first")).text == "1"
    assert backend.prompts == ["first, then second", "second, then first"]


def test_a_list_answers_in_order_and_an_exception_fails_the_branch() -> None:
    backend = ScriptedBackend(["one", ValueError("no"), "three"])
    assert gen(say(backend.open(), "a")).text == "one"
    bad = say(backend.open(), "b")
    assert str(bad.generate(GREEDY).exception(WAIT)) == "no"
    assert gen(say(backend.open(), "c")).text == "three"


def test_replies_respect_stop_strings_and_max_tokens_however_they_are_cut_into_pieces() -> None:
    for pieces in (["a b|", "c d"], ["a b", "|c d"], ["a b|c d"]):
        backend, seen = ScriptedBackend([Reply(*pieces), Reply(*pieces), Reply(*pieces)]), list[str]()
        streamed = say(backend.open(), "x")
        made = streamed.generate(Sampling(stop=("|",)), seen.append).result(WAIT)
        assert (made.text, made.finish_reason, made.matched, "".join(seen)) == ("a b", "stop", "|", "a b")
        made = gen(say(backend.open(), "x"), Sampling(stop=("|",), keep_stop_text=True))
        assert made.text == "a b|"
        made = gen(say(backend.open(), "x"), Sampling(max_tokens=1))
        assert (made.text, made.finish_reason) == ("a", "length")


def test_a_gate_holds_a_reply_until_it_is_opened_and_others_go_on() -> None:
    gate = Gate()
    backend = ScriptedBackend({"slow": Reply("at ", gate, "last"), "quick": "now"})
    seen: list[str] = []
    branch = say(backend.open(), "slow")
    slow = branch.generate(GREEDY, seen.append)
    assert gen(say(backend.open(), "quick")).text == "now"
    assert not slow.done() and seen == ["at "]
    gate.open()
    assert slow.result(WAIT).text == "at last" and seen == ["at ", "last"]


def test_a_failure_in_the_middle_of_a_reply_comes_after_what_was_streamed() -> None:
    seen: list[str] = []
    branch = say(ScriptedBackend([Reply("half", RuntimeError("lost"))]).open(), "x")
    future = branch.generate(GREEDY, seen.append)
    assert str(future.exception(WAIT)) == "lost" and seen == ["half"]


def test_scripted_scores_decide_by_each_rule() -> None:
    scores = {"Paris": [-0.2], "Antidisestablishmentarianism": [-0.1, -0.1, -0.9]}
    backend = ScriptedBackend(lambda prompt: Reply(scores=scores))
    branch, choices = say(backend.open(), "?"), list(scores)
    assert branch.score(choices, "sum", append=False).result(WAIT).best == 0
    assert branch.score(choices, "token_length_normalized", append=False).result(WAIT).best == 0
    assert branch.score(choices, "greedy_token_selection", append=False).result(WAIT).best == 1


def test_when_the_engine_dies_everything_open_and_everything_later_fails() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda prompt: Reply(gate, "never"))
    before = say(backend.open(), "x")
    waiting = before.generate(GREEDY)
    backend.die(ConnectionError("gone"))
    after = say(backend.open(), "y")
    assert isinstance(waiting.exception(WAIT), ConnectionError)
    assert isinstance(after.generate(GREEDY).exception(WAIT), ConnectionError)


def test_a_branch_that_exceeds_the_context_fails_and_names_the_numbers() -> None:
    branch = say(ScriptedBackend(context_length=3).open(), "one two three four")
    future = branch.generate(GREEDY)
    assert "4 tokens" in str(future.exception(WAIT)) and "3" in str(future.exception(WAIT))


def test_the_cache_is_by_salt_and_emptied_by_a_flush() -> None:
    backend = ScriptedBackend()

    def cached(salt: str) -> int:
        return int(gen(say(backend.open(salt=salt), "a b c d")).usage["cached_tokens"])

    assert [cached("x"), cached("x"), cached("y")] == [0, 3, 0]
    backend.flush_cache().result(WAIT)
    assert cached("x") == 0
