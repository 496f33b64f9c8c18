"""Small programs that use every primitive, in both spellings; data for tests against any backend.

A program takes the module that has the language's names (`import anabranch as ab`, or `import anabranch as sgl`) and
a backend, and returns what it observed as plain JSON. `check` asserts what must hold whatever the model says.
Everything is seeded, so two engines with one model must return equal observations.
"""

import asyncio
import dataclasses
import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Observed = dict[str, Any]


@dataclass(frozen=True)
class Case:
    name: str
    spelling: Literal["sglang", "ours"]
    run: Callable[[Any, Any], Observed]


CASES: list[Case] = []


def sglang(run: Callable[[Any, Any], Observed]) -> Callable[[Any, Any], Observed]:
    CASES.append(Case(run.__name__, "sglang", run))
    return run


def ours(run: Callable[[Any, Any], Observed]) -> Callable[[Any, Any], Observed]:
    CASES.append(Case(run.__name__, "ours", run))
    return run


# ---------------------------------------------------------------- as written for SGLang


@sglang
def few_shot_questions(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def few_shot_qa(s, question):  # type: ignore[no-untyped-def]
        s += "The following are questions with answers.\n\n"
        s += "Q: What is the capital of France?\n"
        s += "A: Paris\n"
        s += "Q: " + question + "\n"
        s += "A:" + sgl.gen("answer", stop="\n", temperature=0, max_tokens=8)

    state = few_shot_qa.run(question="What is the capital of Italy?", backend=backend, seed=1)
    batch = few_shot_qa.run_batch(
        [{"question": "What is the capital of Japan?"}, {"question": "What is the capital of China?"}],
        temperature=0.1,
        backend=backend,
        seed=1,
    )
    assert "\n" not in state["answer"]
    assert state.text().endswith("A:" + state["answer"])
    assert len(batch) == 2 and all("\n" not in x["answer"] for x in batch)
    return {"answer": state["answer"], "batch": [x["answer"] for x in batch]}


@sglang
def turns_as_calls_and_as_contexts(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def two_turns(s, question_1, question_2):  # type: ignore[no-untyped-def]
        s += sgl.system("You are a helpful assistant.")
        s += sgl.user(question_1)
        s += sgl.assistant(sgl.gen("answer_1"))
        with s.user():
            s += question_2
        with s.assistant():
            s += sgl.gen("answer_2")

    state = two_turns.run("Say hello.", "Again.", temperature=0.7, max_new_tokens=8, backend=backend, seed=2)
    roles = [m["role"] for m in state.messages()]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert state.messages()[-1]["content"] == state["answer_2"]
    return {"messages": state.messages()}


@sglang
def turns_with_begin_and_end(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def chat(s):  # type: ignore[no-untyped-def]
        s += sgl.user_begin() + "Name a colour." + sgl.user_end()
        s += sgl.assistant_begin() + sgl.gen("colour", max_tokens=4) + sgl.assistant_end()
        s.user("And another?")
        s += sgl.assistant(sgl.gen("other", max_tokens=4))

    state = chat.run(backend=backend, seed=3)
    assert [m["role"] for m in state.messages()] == ["user", "assistant", "user", "assistant"]
    return {"messages": state.messages()}


@sglang
def select_between_choices(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def true_or_false(s, statement):  # type: ignore[no-untyped-def]
        s += "Statement: " + statement + "\n"
        s += "Answer:" + sgl.select("answer", ["True", "False", "Unknown"])

    state = true_or_false.run(statement="The capital of Germany is Berlin.", backend=backend)
    meta = state.get_meta_info("answer")
    best = max(range(3), key=meta["normalized_prompt_logprobs"].__getitem__)
    assert state["answer"] == ["True", "False", "Unknown"][best]
    assert state.text().endswith("Answer:" + state["answer"])
    return {"answer": state["answer"]}


@sglang
def the_three_choice_methods(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def choose(s, method):  # type: ignore[no-untyped-def]
        s += "The largest city of France is"
        s += sgl.gen("city", choices=[" Paris", " Lyon", " Marseille"], choices_method=method)

    methods = [sgl.token_length_normalized, sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized]
    cities = [choose.run(m, backend=backend)["city"] for m in methods]
    assert set(cities) <= {" Paris", " Lyon", " Marseille"}
    return {"cities": cities}


@sglang
def integers_as_strings(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def decode_int(s):  # type: ignore[no-untyped-def]
        s += "The number of hours in a day is " + sgl.gen_int("hours", max_tokens=6) + "\n"
        s += "The number of days in a year is " + sgl.gen("days", dtype=int, max_tokens=6) + "\n"

    state = decode_int.run(temperature=0.1, backend=backend, seed=4)
    assert (
        isinstance(state["hours"], str) and isinstance(int(state["hours"]), int) and isinstance(int(state["days"]), int)
    )
    return {"hours": state["hours"], "days": state["days"]}


@sglang
def dtypes_and_setting_variables(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def dtype_gen(s):  # type: ignore[no-untyped-def]
        s += "A year: " + sgl.gen("int_res", dtype=int, max_tokens=6) + "\n"
        s += "Pi is about " + sgl.gen("float_res", dtype=float, max_tokens=8) + "\n"
        s += "Is the sky blue? " + sgl.gen("bool_res", dtype=bool) + "\n"

    state = dtype_gen.run(backend=backend, seed=5)
    assert state["bool_res"] in ("True", "False")
    state["int_res"] = int(state["int_res"])
    state.set_var("float_res", float(state["float_res"]))
    assert isinstance(state["int_res"], int) and isinstance(state.get_var("float_res"), float) and "int_res" in state
    return {"bool": state["bool_res"]}


@sglang
def a_scope_as_a_variable(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def decode_json(s):  # type: ignore[no-untyped-def]
        s += "A city as JSON:\n"
        with s.var_scope("json_output"):
            s += "{\n"
            s += '  "population": ' + sgl.gen_int(max_tokens=6) + ",\n"
            s += '  "rank": ' + sgl.gen(regex=r"[1-9][0-9]?", max_tokens=4) + "\n"
            s += "}"

    state = decode_json.run(backend=backend, seed=6)
    parsed = json.loads(state["json_output"])
    assert set(parsed) == {"population", "rank"} and state.text().endswith(state["json_output"])
    return {"json": parsed}


@sglang
def a_variable_in_the_middle_of_text(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def expert_answer(s, question):  # type: ignore[no-untyped-def]
        s += "Question: " + question + "\n"
        s += "A good person to answer this question is" + sgl.gen("expert", stop=[".", "\n"], max_tokens=6) + ".\n"
        s += "For example," + s["expert"] + " would say" + sgl.gen("answer", stop=".", max_tokens=6) + "."

    state = expert_answer.run(question="What is the capital of France?", temperature=0.1, backend=backend, seed=7)
    assert f"For example,{state['expert']} would say{state['answer']}." in state.text()
    return {"text": state.text()}


@sglang
def a_loop_that_reuses_names(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def react(s, question):  # type: ignore[no-untyped-def]
        s += "Question: " + question + "\n"
        for i in range(1, 4):
            s += f"Thought {i}:" + sgl.gen("thought", stop=[".", "\n"], max_tokens=6) + ".\n"
            s += f"Action {i}: " + sgl.select("action", ["Search", "Finish"])
            if s["action"] == "Finish":
                break
            s += " [" + sgl.gen(stop="]", max_tokens=4) + "]\n"

    state = react.run("Where does the creator of Linux live?", temperature=0.1, backend=backend, seed=8)
    last = re.findall(r"Thought \d:(.*?)\.\n", state.text(), re.DOTALL)[-1]
    assert state["thought"] == last  # the last value wins
    return {"text": state.text(), "action": state["action"]}


@sglang
def fork_fill_and_gather(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def parallel_decoding(s, topic):  # type: ignore[no-untyped-def]
        s += "Two tips for " + topic + ".\n"
        forks = s.fork(2)
        for i in range(2):
            forks[i] += f"Tip {i + 1}:"
            forks[i] += sgl.gen("detailed_tip", 6, stop=["\n\n"])
        forks.join()
        for i in range(2):
            s += f"Tip {i + 1}:" + forks[i]["detailed_tip"] + "\n"
        s += "In summary," + sgl.gen("summary", max_tokens=6)

    state = parallel_decoding.run(topic="writing a blog post", temperature=0.3, backend=backend, seed=9)
    assert isinstance(state["detailed_tip"], list) and len(state["detailed_tip"]) == 2
    assert state.text().count("Tip 1:" + state["detailed_tip"][0]) == 1
    return {"tips": state["detailed_tip"], "summary": state["summary"]}


@sglang
def join_by_appending(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def parallel_encoding(s, contexts):  # type: ignore[no-untyped-def]
        s += "USER: Please memorize these statements.\n"
        forks = s.fork(len(contexts))
        forks += lambda i: f"Statement {i}: " + contexts[i] + "\n"
        forks.join(mode="concate_and_append")
        s += "ASSISTANT:" + sgl.gen("answer", max_tokens=6)

    facts = ["Ethan is the father of Liam.", "Noah is the father of Julian."]
    state = parallel_encoding.run(facts, temperature=0, backend=backend, seed=10)
    statements = "".join(f"Statement {i}: {fact}\n" for i, fact in enumerate(facts))
    assert state.text() == "USER: Please memorize these statements.\n" + statements + "ASSISTANT:" + state["answer"]
    return {"text": state.text()}


@sglang
def what_a_group_takes(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def grow(s):  # type: ignore[no-untyped-def]
        s += "Letters:"
        group = s.fork(3)
        group += " x"
        group += [" a", " b", " c"]
        group += lambda i: f" {i}" + sgl.gen("more", max_tokens=3)
        s["texts"] = [g.text() for g in group]
        group.join()

    state = grow.run(backend=backend, seed=11)
    assert [t.split(" ")[1:4] for t in state["texts"]] == [["x", a, str(i)] for i, a in enumerate("abc")] or all(
        t.startswith(f"Letters: x {'abc'[i]} {i}") for i, t in enumerate(state["texts"])
    )
    return {"texts": state["texts"], "more": state["more"]}


@sglang
def copy_to_try_something(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def trial(s):  # type: ignore[no-untyped-def]
        s += "Once upon a time"
        with s.copy() as c:
            c += sgl.gen("attempt", max_tokens=4)
        s += " there was" + sgl.gen("story", max_tokens=4)

    state = trial.run(backend=backend, seed=12)
    assert isinstance(state["attempt"], list) and len(state["attempt"]) == 1
    assert state.text() == "Once upon a time there was" + state["story"]
    return {"attempt": state["attempt"], "story": state["story"]}


@sglang
def several_samples_of_one_gen(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def samples(s):  # type: ignore[no-untyped-def]
        s += "A word:"
        s += sgl.gen("x", n=3, max_tokens=4)
        s += "." + sgl.gen("after", max_tokens=2)

    state = samples.run(backend=backend, seed=13)
    assert isinstance(state["x"], list) and len(state["x"]) == 3
    assert state.text() == "A word:" + state["x"][0] + "." + state["after"]
    assert len(state.get_meta_info("x")) == 3
    return {"x": state["x"]}


@sglang
def streaming_all_and_one_variable(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def qa(s, question):  # type: ignore[no-untyped-def]
        s += "Q: " + question + "\nA:"
        s += sgl.gen("answer", max_tokens=8)

    state = qa.run(question="Who are you?", stream=True, backend=backend, seed=14)
    whole = "".join(state.text_iter())
    other = qa.run(question="Who are you?", stream=True, backend=backend, seed=14)
    answer = "".join(other.text_iter("answer"))
    assert whole == state.text() and answer == other["answer"] == state["answer"]
    return {"whole": whole}


@sglang
def streaming_in_an_event_loop(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def qa(s):  # type: ignore[no-untyped-def]
        s += "Count: one, two," + sgl.gen("rest", max_tokens=6)

    async def collect() -> tuple[str, Any]:
        state = qa.run(stream=True, backend=backend, seed=15)
        return "".join([chunk async for chunk in state.text_async_iter("rest")]), state

    rest, state = asyncio.run(collect())
    assert rest == state["rest"]
    return {"rest": rest}


@sglang
def constrained_by_regex(sgl: Any, backend: Any) -> Observed:
    regex = r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"

    @sgl.function
    def regex_gen(s):  # type: ignore[no-untyped-def]
        s += "The address is " + sgl.gen("answer", temperature=0, regex=regex, max_tokens=24)

    state = regex_gen.run(backend=backend)
    assert re.fullmatch(regex, state["answer"])
    return {"answer": state["answer"]}


@sglang
def constrained_by_json_schema_text(sgl: Any, backend: Any) -> Observed:
    schema = json.dumps(
        {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    )

    @sgl.function
    def judge(s):  # type: ignore[no-untyped-def]
        s += "Is this fine? " + sgl.gen("verdict", json_schema=schema, max_tokens=32)

    state = judge.run(backend=backend, seed=16)
    assert isinstance(state["verdict"], str) and isinstance(json.loads(state["verdict"])["ok"], bool)
    return {"verdict": state["verdict"]}


@sglang
def logprobs_on_request(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def measured(s):  # type: ignore[no-untyped-def]
        s += "The sky is" + sgl.gen("word", max_tokens=3, return_logprob=True, top_logprobs_num=1, temperature=0)

    state = measured.run(backend=backend)
    meta = state.get_meta_info("word")
    assert meta["finish_reason"]["type"] in ("stop", "length") and meta["prompt_tokens"] > 0
    assert len(meta["output_token_logprobs"]) >= 1 and all(lp <= 1e-6 for lp, _, _ in meta["output_token_logprobs"])
    return {"tokens": [t for _, t, _ in meta["output_token_logprobs"]]}


@sglang
def functions_bound_and_nested(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def expand(s, tip):  # type: ignore[no-untyped-def]
        s += "Expand: " + tip + "\n" + sgl.gen("detail", max_tokens=4)

    @sgl.function
    def inline(s, what):  # type: ignore[no-untyped-def]
        s += f"[{what}]"
        return len(what)

    @sgl.function
    def outer(s, topic, count=2):  # type: ignore[no-untyped-def]
        s += f"{count} tips for {topic}."
        first = expand(tip="be brief")  # a run of its own
        s["size"] = inline(s, "abc")  # on this very state
        s += first["detail"]

    state = outer.bind(topic="talks").run(backend=backend, seed=17)
    assert state.text().startswith("2 tips for talks.[abc]") and state["size"] == 3
    return {"text": state.text()}


@sglang
def reasoning_apart_from_the_answer(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def think(s):  # type: ignore[no-untyped-def]
        s += sgl.user("What is two and two?")
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("answer", max_tokens=8), model_type="qwen3"))

    state = think.run(backend=backend, seed=18)
    assert isinstance(state["answer"], str) and isinstance(state["answer_reasoning_content"], str)
    return {"answer": state["answer"], "reasoning": state["answer_reasoning_content"]}


@sglang
def a_batch_in_order(sgl: Any, backend: Any) -> Observed:
    @sgl.function
    def echo(s, x):  # type: ignore[no-untyped-def]
        s += f"{x}:" + sgl.gen("y", max_tokens=3)
        s["x"] = x

    states = echo.run_batch([{"x": i} for i in range(12)], num_threads=4, backend=backend, seed=19)
    lazily = list(
        echo.run_batch([[i] for i in range(5)], num_threads=2, generator_style=True, backend=backend, seed=19)
    )
    assert [s["x"] for s in states] == list(range(12)) and [s["x"] for s in lazily] == list(range(5))
    assert [s["y"] for s in lazily] == [s["y"] for s in states[:5]]
    return {"y": [s["y"] for s in states]}


# ---------------------------------------------------------------- as written for us


@ours
def the_winner_becomes_the_state(ab: Any, backend: Any) -> Observed:
    @ab.function
    def solve(s, question):  # type: ignore[no-untyped-def]
        s += ab.system("You are careful.") + ab.user(question)
        for b in (branches := s.fork(4)):
            b += ab.assistant(ab.gen("thought", max_tokens=6, temperature=0.8))
        best = max(branches, key=lambda b: b.logprob("thought"))
        s.join(best)
        s += ab.user("So the answer is?") + ab.assistant(ab.gen("answer", regex=r"-?\d{1,4}"))

    state = solve.run(question="What is 2 + 3?", backend=backend, seed=20)
    assert state.messages()[2]["content"] == state["thought"]
    assert re.fullmatch(r"-?\d{1,4}", state["answer"])
    return {"messages": state.messages(), "tokens": list(state.tokens("thought"))}


@ours
def mark_and_roll_back(ab: Any, backend: Any) -> Observed:
    @ab.function
    def careful(s):  # type: ignore[no-untyped-def]
        s += "The list: one, two"
        mark = s.mark()
        s += ab.gen("first", max_tokens=5, temperature=0)
        first = s["first"]
        s.rollback(mark)
        assert "first" not in s
        s += ab.gen("second", max_tokens=5, temperature=0)
        return [first, s["second"]]

    state = careful.run(backend=backend, seed=21)
    assert state.ret_value[0] == state.ret_value[1]  # greedy from the same tokens
    assert state.text() == "The list: one, two" + state["second"]
    return {"both": state.ret_value}


@ours
def a_lease_across_a_tool_call(ab: Any, backend: Any) -> Observed:
    @ab.function
    def agent(s):  # type: ignore[no-untyped-def]
        s += "calculate(" + ab.gen("expression", stop=")", max_tokens=4) + ") = "
        s["expression"]
        s.lease(5.0)
        result = "42"
        s.lease(0)
        s += result + "\n" + ab.gen("comment", max_tokens=4)

    state = agent.run(backend=backend, seed=22)
    assert ") = 42\n" in state.text()
    return {"text": state.text()}


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Box:
    width: int
    colour: Literal["red", "blue"]
    tags: list[str]


@ours
def values_with_types(ab: Any, backend: Any) -> Observed:
    @ab.function
    def typed(s):  # type: ignore[no-untyped-def]
        s += "n = " + ab.gen("n", type=int, max_tokens=24) + "\nf = " + ab.gen("f", type=float, max_tokens=48)
        s += "\nok = " + ab.gen("ok", type=bool) + "\ncolour = " + ab.gen("colour", type=Colour)
        s += "\nsize = " + ab.gen("size", type=Literal["small", "large"])

    state = typed.run(backend=backend, seed=23, temperature=0.5)
    assert type(state["n"]) is int and type(state["f"]) is float and type(state["ok"]) is bool
    assert isinstance(state["colour"], Colour) and state["size"] in ("small", "large")
    return {"n": state["n"], "f": state["f"], "ok": state["ok"], "colour": state["colour"].value, "size": state["size"]}


@ours
def values_with_structure(ab: Any, backend: Any) -> Observed:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }

    @ab.function
    def structured(s):  # type: ignore[no-untyped-def]
        s += "Verdict: " + ab.gen("verdict", schema=schema, max_tokens=24)
        s += "\nCorners: " + ab.gen("pair", type=tuple[bool, bool], max_tokens=24)

    state = structured.run(backend=backend, seed=24)
    assert isinstance(state["verdict"]["yes"], bool) and len(state["pair"]) == 2
    return {"verdict": state["verdict"], "pair": list(state["pair"])}


@ours
def async_programs_gather_branches(ab: Any, backend: Any) -> Observed:
    @ab.function
    async def explore(s, question):  # type: ignore[no-untyped-def]
        s += ab.user(question)

        async def one(b):  # type: ignore[no-untyped-def]
            b += ab.assistant_begin()
            await b.gen("idea", max_tokens=5)
            b += ab.assistant_end()
            return b

        branches = await asyncio.gather(*(one(b) for b in s.fork(3)))
        s.join(branches[1])
        s += ab.user("Go on.") + ab.assistant(ab.gen("more", max_tokens=4))
        return await s.value("more")

    state = explore.run(question="Name a sea.", backend=backend, seed=25)
    assert state.ret_value == state["more"] and len(state.messages()) == 4
    return {"messages": state.messages()}


@ours
def async_streams(ab: Any, backend: Any) -> Observed:
    @ab.function
    async def tell(s):  # type: ignore[no-untyped-def]
        s += "A tale:"
        s["chunks"] = [chunk async for chunk in s.stream(ab.gen("tale", max_tokens=6))]

    state = asyncio.run(tell.arun(backend=backend, seed=26))
    assert "".join(state["chunks"]) == state["tale"]
    return {"tale": state["tale"]}


@ours
def a_seed_fixes_every_branch(ab: Any, backend: Any) -> Observed:
    @ab.function
    def wander(s):  # type: ignore[no-untyped-def]
        s += "Somewhere"
        group = s.fork(3)
        group += ab.gen("where", max_tokens=5)
        inner = group[1].fork(2)
        inner += ab.gen("next", max_tokens=5)
        s["seen"] = group.values("where") + inner.values("next")

    first, again = (wander.run(backend=backend, seed=27)["seen"] for _ in range(2))
    assert first == again
    return {"seen": first}


@ours
def best_of_several(ab: Any, backend: Any) -> Observed:
    @ab.function
    def program(s):  # type: ignore[no-untyped-def]
        s += "A river is"
        ab.best_of_n(s, ab.gen("x", max_tokens=5), 4, score=lambda b: len(b["x"]))

    state = program.run(backend=backend, seed=28)
    assert state.text() == "A river is" + state["x"]
    return {"x": state["x"]}


@ours
def a_majority(ab: Any, backend: Any) -> Observed:
    @ab.function
    def program(s):  # type: ignore[no-untyped-def]
        s += "Heads or tails?"
        return ab.self_consistency(s, ab.gen("side", type=Literal[" heads", " tails"]), "side", 5)

    state = program.run(backend=backend, seed=29)
    vote = state.ret_value
    assert sum(vote.counts.values()) == 5 and vote.counts[vote.answer] >= 3 and state["side"] == vote.answer
    return {"counts": vote.counts}


@ours
def a_beam(ab: Any, backend: Any) -> Observed:
    levels: list[int] = []

    @ab.function
    def program(s):  # type: ignore[no-untyped-def]
        s += "Step by step:"
        step = " then" + ab.gen("x", max_tokens=3)
        ab.beam(s, step, "x", width=2, branching=3, depth=2, on_level=lambda level, kept: levels.append(len(kept)))

    state = program.run(backend=backend, seed=30)
    assert levels == [3, 6] and state.text().count(" then") >= 2
    return {"text": state.text()}


@ours
def tree_search_three_ways(ab: Any, backend: Any) -> Observed:
    @ab.function
    def thought(s):  # type: ignore[no-untyped-def]
        s += "Think:"
        return ab.tree_of_thought(s, "\n-" + ab.gen("x", max_tokens=3), "x", branching=2, depth=2)

    @ab.function
    def monte_carlo(s):  # type: ignore[no-untyped-def]
        s += "Think:"
        root = ab.mcts(s, "\n-" + ab.gen("x", max_tokens=3), "x", iterations=5, branching=2, depth=2)
        return sum(1 for _ in root.walk())

    tree, search = thought.run(backend=backend, seed=31), monte_carlo.run(backend=backend, seed=31)
    assert tree.ret_value is False and tree.text().count("\n-") == 2
    assert search.ret_value >= 3 and search.text().count("\n-") >= 1
    return {"tree": tree.text(), "search": search.text()}


@ours
def try_then_roll_back(ab: Any, backend: Any) -> Observed:
    seen: list[str] = []

    def long_enough(s: Any) -> bool:
        seen.append(s["x"])
        return len(seen) == 2

    @ab.function
    def program(s):  # type: ignore[no-untyped-def]
        s += "Say:"
        return ab.speculate(s, ab.gen("x", max_tokens=4), long_enough, tries=3)

    state = program.run(backend=backend, seed=32)
    assert state.ret_value is True and len(seen) == 2 and state.text() == "Say:" + seen[1]
    return {"seen": seen}


@ours
def solve_apart_then_merge(ab: Any, backend: Any) -> Observed:
    @ab.function
    def program(s):  # type: ignore[no-untyped-def]
        s += ab.user("Cats or dogs?")
        sides = [ab.assistant(f"{pet}:" + ab.gen(pet, max_tokens=4)) for pet in ("cats", "dogs")]
        ab.debate(s, sides, ab.user("Who won?") + ab.assistant(ab.select("winner", ["cats", "dogs"])))

    state = program.run(backend=backend, seed=33)
    assert [m["role"] for m in state.messages()] == ["user", "assistant", "assistant", "user", "assistant"]
    assert state["winner"] in ("cats", "dogs")
    return {"messages": state.messages()}


@ours
def sharing_is_visible(ab: Any, backend: Any) -> Observed:
    @ab.function
    def program(s):  # type: ignore[no-untyped-def]
        s += "A long shared preface, which every branch below has in common with all of the others: " * 3
        s.gen("opening", max_tokens=2).result()
        group = s.fork(4)
        group += ab.gen("x", max_tokens=2)
        group.join()

    state = program.run(backend=backend, seed=34)
    usage, told = state.usage(), state.explain()
    assert usage.operations == 5 and usage.cached_tokens > usage.computed_tokens and 0 < usage.saved < 1
    assert told.length == sum(span.stop - span.start for span in told.spans) and str(told) and state.tree()
    return {"operations": usage.operations}


@ours
def a_state_without_a_function(ab: Any, backend: Any) -> Observed:
    with ab.state(backend=backend, seed=35, max_tokens=4) as s:
        s += "Hello,"
        word = s.gen("word").result()
        kind = s.select("kind", [" warm", " cold"]).result()
        text = s.text()
    assert text == "Hello," + word + kind and s.closed
    return {"text": text}
