"""Constrained generation through the worker: what comes out is what the grammar says, whatever the model wants."""

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLParserLimits
from support.tiny_models import make_puppet_map, make_tiny_llama
from support.tokenizers import byte_bpe_tokenizer
from support.worker_driver import Branch, Driver, Row, errors_of

from anabranch.runtime.messages import Grammar, SamplingParams, as_ints
from anabranch.runtime.tokenizer.model_text import open_model_text
from anabranch.runtime.tokenizer.vocabulary import Vocabulary
from anabranch.runtime.worker import grammar as grammar_module
from anabranch.runtime.worker.worker import Worker

TREE = {
    "$defs": {"n": {
        "type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 1}},
        "required": ["c"], "additionalProperties": False,
    }},
    "$ref": "#/$defs/n",
}  # fmt: skip
PERSON = {
    "type": "object", "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


class Model:
    def __init__(self, path: Path, **options: Any) -> None:
        self.vocabulary: Vocabulary = open_model_text(path).vocabulary
        self.end = self.vocabulary.eos_token_ids[0]
        self.options = {"backend": "reference", "num_pages": 1024, "page_size": 4, "max_slots": 32} | options
        self.worker = Worker(path, vocabulary=self.vocabulary, **self.options)
        self.driver = Driver(self.worker)

    def params(self, kind: str, source: Any, **more: Any) -> SamplingParams:
        text = source if isinstance(source, str) else json.dumps(source)
        return SamplingParams(**({
            "temperature": 1.5, "stop_token_ids": (self.end,), "grammar": Grammar(kind, text),  # type: ignore[arg-type]
        } | more))  # fmt: skip

    def open(self, kind: str, source: Any, *, path: int = 0, prompt: str = "x", **more: Any) -> Branch:
        return self.driver.open(self.vocabulary.encode_plain(prompt), self.params(kind, source, **more), path=path)

    def generate(self, kind: str, source: Any, num_tokens: int = 400, **more: Any) -> Branch:
        branch = self.open(kind, source, **more)
        self.driver.generate(branch, num_tokens, stop=[self.end])
        self.driver.close(branch)
        return branch

    def text(self, branch: Branch) -> str:
        return self.vocabulary.decode(token for token in branch.output if token != self.end)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    model = Model(make_tiny_llama(tmp_path_factory.mktemp("tiny") / "m"))
    yield model
    model.worker.close()


@pytest.fixture
def speaks(tmp_path: Path) -> Iterator[Callable[[dict[str, float]], Model]]:
    """A model that prefers these tokens, whatever came before."""
    opened: list[Model] = []

    def make(wishes: dict[str, float]) -> Model:
        tokenizer = byte_bpe_tokenizer(300)
        ids = {tokenizer.tokenizer.encode(text).ids[0]: weight for text, weight in wishes.items()}
        opened.append(Model(make_puppet_map(tmp_path / "p", dict.fromkeys(range(300), ids), tokenizer)))
        return opened[-1]

    yield make
    for model in opened:
        model.worker.close()


# ---------------------------------------------------------------- what comes out


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose documents are short."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "pattern", "format"]
    kinds += ["object", "array", "tuple", "anyOf", "oneOf", "allOf", "ref"] if depth < 3 else []
    inner = lambda: random_schema(rng, depth + 1)  # noqa: E731
    match rng.choice(kinds):
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)}
        case "number":
            return {"type": "number", "minimum": rng.randint(-5, 0), "exclusiveMaximum": rng.randint(1, 9)}
        case "string":
            low = rng.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}
        case "enum":
            return {"enum": rng.sample(["a", 1, None, True, [1, "x"], {"k": 2}, 'say "é"'], 3)}
        case "const":
            return {"const": rng.choice(["x\n", 3, {"a": [1, {}]}])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^(yes|no)!$", r"^\d{3}-\d{4}$"])}
        case "format":
            return {"type": "string", "format": rng.choice(["date", "ipv4", "uuid", "time"])}
        case "object":
            names = rng.sample(["a", "b", "long name", "ü", "d/e~f"], rng.randint(1, 4))
            return {
                "type": "object", "properties": {name: inner() for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))), "additionalProperties": False,
            }  # fmt: skip
        case "array":
            low = rng.randint(0, 2)
            return {"type": "array", "items": inner(), "minItems": low, "maxItems": low + rng.randint(0, 2)}
        case "tuple":
            return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 2}
        case "anyOf":
            return {"anyOf": [inner(), inner()]}
        case "oneOf":
            return {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": kind}, "v": inner()},
                        "required": ["kind", "v"],
                        "additionalProperties": False,
                    }
                    for kind in ("p", "q")
                ]
            }
        case "allOf":
            return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]}
        case "ref":
            return {
                "$defs": {"t": {"type": "integer", "minimum": 0, "maximum": 7}},
                "type": "array",
                "items": {"$ref": "#/$defs/t"},
                "maxItems": 3,
            }
        case kind:
            return {"type": kind}


def without_nested_refs(schema: dict[str, Any]) -> bool:
    """Pointers of these test schemas are written for the root."""
    return '"$ref"' not in json.dumps({k: v for k, v in schema.items() if k not in ("$defs", "items")})


def test_two_hundred_random_schemas_give_valid_json_in_fewer_steps_than_tokens(tiny: Model) -> None:
    rng = random.Random(0)
    schemas: list[dict[str, Any]] = []
    while len(schemas) < 200:
        schema = random_schema(rng)
        if without_nested_refs(schema) and (
            "items" not in schema or "$defs" in schema or "$ref" not in json.dumps(schema)
        ):
            schemas.append(schema)
    num_steps = num_tokens = 0
    for start in range(0, 200, 25):
        branches = [tiny.open("json_schema", s, seed=start + i) for i, s in enumerate(schemas[start : start + 25])]
        while waiting := [b for b in branches if not b.done and b.output[-1:] != [tiny.end]]:
            for branch in waiting:
                branch.computed = min(branch.computed, len(branch.tokens) - 1)
            tiny.driver.step(*waiting)
            assert all(b.error is None for b in branches), [b.error for b in branches if b.error]
        for branch, schema in zip(branches, schemas[start:], strict=False):
            value = json.loads(tiny.text(branch))
            jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            ).validate(value)
            num_steps, num_tokens = num_steps + branch.steps, num_tokens + len(branch.output)
            tiny.driver.close(branch)
    assert num_steps < num_tokens


CHOICES = ["Dr. Smith", "a|b", "(x)", "C++", ".*", "{1,2}", "[a-z]", "^$", "\\d", 'q"q', "é\n\tü", "a/b", "", "a"]


def test_choices_are_literals_and_each_can_come(tiny: Model) -> None:
    seen = {tiny.text(tiny.generate("choices", CHOICES, seed=seed)) for seed in range(120)}
    assert seen <= set(CHOICES)
    assert len(seen) > len(CHOICES) // 2
    for choice in CHOICES:
        assert tiny.text(tiny.generate("choices", [choice])) == choice


def test_a_regex_matches_the_whole_output(tiny: Model) -> None:
    for seed in range(5):
        assert re.fullmatch(
            r"[A-C]{2}-\d{3}(x|yy)", tiny.text(tiny.generate("regex", r"^[A-C]{2}-\d{3}(x|yy)$", seed=seed))
        )


def test_recursive_grammars_and_schemas_end_by_themselves(tiny: Model) -> None:
    for seed in range(4):
        value = json.loads(tiny.text(tiny.generate("json_schema", TREE, seed=seed, logit_bias=_bias(tiny, "]}"))))
        jsonschema.validate(value, TREE)
        text = tiny.text(tiny.generate("ebnf", 'root ::= "(" root? ")"', seed=seed, logit_bias=_bias(tiny, ")")))
        assert text and text.count("(") == text.count(")") and text == "(" * text.count("(") + ")" * text.count(")")
    lark = tiny.text(tiny.generate("lark", 'start: "a" start "b" | "c"', logit_bias=_bias(tiny, "c")))
    assert lark.strip("ab") == "c"


def _bias(model: Model, characters: str) -> dict[int, float]:
    return {model.vocabulary.encode_plain(c)[0]: 3.0 for c in characters}


def test_the_limit_cuts_a_sentence_that_goes_on(tiny: Model) -> None:
    branch = tiny.open("json_schema", {"type": "string", "minLength": 60})
    tiny.driver.generate(branch, 5)
    assert not branch.done and branch.error is None
    assert tiny.text(branch).startswith('"')
    tiny.driver.close(branch)


# ---------------------------------------------------------------- forced tokens


def test_what_the_grammar_dictates_costs_no_steps(tiny: Model) -> None:
    branch = tiny.generate("json_schema", PERSON)
    assert jsonschema.validate(json.loads(tiny.text(branch)), PERSON) is None
    assert branch.steps < len(branch.output) / 2
    fixed = tiny.generate("choices", ["one long fixed sentence that nobody has to think about"])
    assert fixed.steps <= 2 and fixed.done


def test_logprobs_are_of_every_token_and_change_none(tiny: Model) -> None:
    """Where logprobs are wanted nothing is forced: each token is computed, and has its own logprob; the tokens are the same."""
    for temperature in (0.0, 1.5):
        quick = tiny.generate("json_schema", PERSON, temperature=temperature, seed=4)
        slow = tiny.generate("json_schema", PERSON, temperature=temperature, seed=4, num_top_logprobs=2)
        assert slow.output == quick.output
        assert len(slow.logprobs) == len(slow.output) and all(p.logprobs[0] <= 0 for p in slow.logprobs)
        assert [p.token_ids[0] for p in slow.logprobs] == slow.output


def test_a_forced_run_goes_on_over_several_steps(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny.generate("choices", ["one long fixed sentence"])
    monkeypatch.setattr(grammar_module, "MAX_FORCED", 3)
    parts = tiny.generate("choices", ["one long fixed sentence"])
    assert parts.output == whole.output and parts.steps > whole.steps


def test_forced_tokens_stop_at_a_stop_token(tiny: Model) -> None:
    whole = tiny.generate("choices", ["one long fixed sentence"]).output
    branch = tiny.open("choices", ["one long fixed sentence"], stop_token_ids=(tiny.end, whole[3]))
    tiny.driver.step(branch)
    assert branch.output == whole[: whole.index(whole[3]) + 1]
    tiny.driver.close(branch)


def test_nothing_comes_after_the_end(tiny: Model) -> None:
    """Once complete, only end-of-sequence is left, whatever bias or min_tokens say."""
    bias = dict.fromkeys(range(3, 200), 100.0)
    params = tiny.params("regex", "ab", temperature=0.0, min_tokens=30, banned_until_min=(tiny.end,), logit_bias=bias)
    branch = tiny.driver.open(tiny.vocabulary.encode_plain("x"), params)
    tiny.driver.generate(branch, 50, stop=[tiny.end])
    assert tiny.text(branch) == "ab" and branch.done
    tiny.driver.step(branch)  # planned before the end was known
    assert branch.output[-1] == tiny.end
    tiny.driver.close(branch)


def test_min_tokens_holds_where_the_grammar_leaves_a_choice(tiny: Model) -> None:
    bias = {tiny.end: 100.0}
    branch = tiny.generate("regex", "[a-z]*", min_tokens=6, banned_until_min=(tiny.end,), logit_bias=bias)
    assert len(branch.output) == 7 and branch.output[-1] == tiny.end and tiny.text(branch).isalpha()


# ---------------------------------------------------------------- white space


def test_white_space_is_bounded_and_the_answer_complete(speaks: Callable[[dict[str, float]], Model]) -> None:
    model = speaks({" ": 0.6, "\n": 0.3, "\t": 0.1})
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    branch = model.generate("json_schema", schema, 500, temperature=0.0)
    assert branch.done and jsonschema.validate(json.loads(model.text(branch)), schema) is None
    loose = model.generate("lark", 'start: "[" WS? NUM WS? "]"\nNUM: /[0-9]/\nWS: /[ \\n\\t]+/', 500, temperature=0.0)
    text = model.text(loose)
    assert loose.done and json.loads(text) in [[n] for n in range(10)]
    assert 0 < max(map(len, re.findall(r"\s+", text))) <= grammar_module.MAX_SPACE
    needed = model.generate("regex", " {100}x", 500)  # nothing else is allowed: not a matter of taste
    assert model.text(needed) == " " * 100 + "x"


# ---------------------------------------------------------------- slots and their state


def test_a_grammar_beside_others_gives_what_it_gives_alone(tiny: Model) -> None:
    kinds = [
        ("json_schema", PERSON),
        ("regex", "[ab]{4,9}"),
        ("choices", ["red", "green", "blue"]),
        ("ebnf", 'root ::= [0-9]+ "."'),
    ]
    more = {"repetition_penalty": 1.2, "frequency_penalty": 0.1}
    alone = [tiny.generate(kind, source, 30, path=i, **more).output for i, (kind, source) in enumerate(kinds)]
    branches = [tiny.open(kind, source, path=i, **more) for i, (kind, source) in enumerate(kinds)]
    plain = tiny.driver.open([5, 6, 7], SamplingParams(temperature=0.0))
    while waiting := [b for b in branches if not b.done and tiny.end not in b.output and len(b.output) < 30]:
        for branch in waiting:
            branch.computed = min(branch.computed, len(branch.tokens) - 1)
        tiny.driver.step(*waiting, plain)
    assert [b.output for b in branches] == alone
    for branch in (*branches, plain):
        tiny.driver.close(branch)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_branch_resumes_in_the_middle_of_its_grammar(tiny: Model, logprobs: int | None) -> None:
    """At every place, in the middle of a dictated run too: preempted, forked and rolled-back branches replay their tokens."""
    whole = tiny.generate("json_schema", PERSON, seed=8, num_top_logprobs=logprobs)
    prompt = tiny.vocabulary.encode_plain("x")
    params = tiny.params("json_schema", PERSON, seed=8, num_top_logprobs=logprobs)
    for cut in range(len(whole.output)):
        resumed = tiny.driver.open(prompt, params, generated=whole.output[:cut])
        tiny.driver.generate(resumed, 400, stop=[tiny.end])
        assert resumed.output == whole.output
        tiny.driver.close(resumed)


def test_a_grammar_that_rejects_what_was_generated_fails_its_slot_alone(tiny: Model) -> None:
    bad = tiny.driver.open([5], tiny.params("regex", "abc"), generated=tiny.vocabulary.encode_plain("z"))
    good = tiny.open("regex", "abc")
    result = tiny.driver.step(bad, good)
    assert errors_of(result).keys() == {bad.slot} and tiny.text(good) == "abc"
    for branch in (bad, good):
        tiny.driver.close(branch)


def test_a_grammar_that_does_not_compile_fails_its_slot_alone(tiny: Model) -> None:
    bad, good = tiny.open("regex", "("), tiny.driver.open([5, 6], SamplingParams(temperature=0.0))
    result = tiny.driver.step(bad, good)
    assert "unclosed group" in errors_of(result)[bad.slot].error.message
    assert len(good.output) == 1
    for branch in (bad, good):
        tiny.driver.close(branch)


def test_a_grammar_that_runs_dry_fails_its_slot_with_a_reason(tiny: Model) -> None:
    branch, other = (
        tiny.open("lark", 'start: "a" b\nb: b "x"'),
        tiny.driver.open([5, 6], SamplingParams(temperature=0.0)),
    )
    tiny.driver.generate(branch, 10)
    assert tiny.text(branch) in ("", "a") and branch.error is not None and "allow" in branch.error
    tiny.driver.step(other)
    assert len(other.output) == 1
    for used in (branch, other):
        tiny.driver.close(used)


def test_a_limit_that_others_have_used_up_does_not_fail_a_slot(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of one grammar share lexer states. Whoever runs out of them gets a fresh grammar, and goes on where it was."""
    source = "(a|b)*a(a|b){40}c"
    monkeypatch.setattr(
        grammar_module, "parser_limits", lambda: LLParserLimits(max_lexer_states=400, verbose_errors=False)
    )
    grammars, num_compiled = tiny.worker._grammars, 0
    assert grammars is not None
    compile_now = grammars._compile

    def counted(grammar: Grammar) -> object:
        nonlocal num_compiled
        num_compiled += 1
        return compile_now(grammar)

    monkeypatch.setattr(grammars, "_compile", counted)
    outputs = []
    for seed in range(8):
        branch = tiny.open("regex", source, seed=seed, temperature=100.0)
        tiny.driver.generate(branch, 40)
        tiny.driver.close(branch)
        assert branch.error is None
        outputs.append(branch.output)
    assert len({tuple(output) for output in outputs}) == 8
    assert 1 < num_compiled < 8
    for seed, output in enumerate(outputs):
        grammars._compiled.clear()
        assert tiny.generate("regex", source, 40, seed=seed, temperature=100.0).output[:40] == output[:40]
    branch = tiny.generate(
        "regex", "(a|b)*a(a|b){500}c", 3000, temperature=100.0
    )  # alone it runs out, too: that is its own fault
    assert branch.error is not None and "too many states" in branch.error


def test_a_worker_without_a_vocabulary_says_that_grammars_are_off(tmp_path: Path, tiny: Model) -> None:
    driver = Driver(Worker(make_tiny_llama(tmp_path / "m"), backend="reference", num_pages=8))
    branch, other = driver.open([5], tiny.params("regex", "abc")), driver.open([5, 6])
    result = driver.step(branch, other)
    assert errors_of(result).keys() == {branch.slot}
    assert "not enabled" in errors_of(result)[branch.slot].error.message and len(other.output) == 1


def test_a_grammar_still_being_compiled_holds_up_nobody(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = tiny.worker._grammars
    assert grammars is not None
    compile_now, release = grammars._compile, threading.Event()

    def slow(grammar: Grammar) -> object:
        release.wait(30)
        return compile_now(grammar)

    monkeypatch.setattr(grammars, "_compile", slow)
    branch, other = tiny.open("regex", "held up"), tiny.driver.open([5, 6], SamplingParams(temperature=0.0))
    for _ in range(3):
        branch.computed = 0
        tiny.driver.step(branch, other)
        assert branch.output == [] and branch.error is None
    assert len(other.output) == 3
    release.set()
    branch.computed = 0
    tiny.driver.generate(branch, 20)
    assert tiny.text(branch) == "held up"
    for used in (branch, other):
        tiny.driver.close(used)


def test_compiled_grammars_are_shared_and_bounded(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = tiny.worker._grammars
    assert grammars is not None
    tiny.generate("regex", "aa")
    compiled = grammars._compiled[Grammar("regex", "aa")]
    tiny.generate("regex", "aa")
    assert grammars._compiled[Grammar("regex", "aa")] is compiled
    monkeypatch.setattr(grammar_module, "CACHE_ENTRIES", 3)
    for text in ("bb", "cc", "dd", "ee"):
        assert tiny.text(tiny.generate("regex", text)) == text
    assert len(grammars._compiled) == 3 and Grammar("regex", "aa") not in grammars._compiled


def test_a_position_that_is_known_already_is_not_sampled_again(tiny: Model) -> None:
    """A row planned one step ahead of a forced run computes the right token, and yields no second one."""
    branch = tiny.open("choices", ["one long fixed sentence"])
    tiny.driver.step(branch)
    assert len(branch.output) > 2
    row = Row(branch, feedback=True)
    result = tiny.worker.execute(tiny.driver.plan([row]))
    assert as_ints(result.slots).tolist() == [branch.slot] and as_ints(result.counts).tolist() == [0]
    tiny.driver.close(branch)


def test_special_tokens_are_no_text(tiny: Model) -> None:
    """The mask inside a free string leaves out every control token, though their names would fit."""
    worker = tiny.worker
    params = tiny.params("json_schema", {"type": "string"}, num_top_logprobs=0)
    quote = tiny.vocabulary.encode_plain('"')
    assert worker._grammars is not None
    state = worker._grammars.start(params.grammar, generated=quote, stop_ids=frozenset(), forcing=False)  # type: ignore[arg-type]
    assert state.wait(10)
    row = np.zeros(512 // 32, np.uint32)
    state.write_mask(row, np.empty(0, np.int32))
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    assert len(allowed) > 100 and not any(tiny.vocabulary.is_special(int(token)) for token in allowed)
