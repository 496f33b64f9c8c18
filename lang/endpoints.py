"""Servers elsewhere as backends: an SGLang-compatible one (`RuntimeEndpoint`) and an OpenAI-compatible one (`OpenAI`).

These are text backends: the branches live here as text, every generation sends its whole text, and sharing is
whatever the server's own cache makes of that. Programs run unchanged; token ids, leases and exact spans need an
engine of ours. A program with turns goes to the server's chat endpoint, so that the model's own template is used;
one without goes to its text endpoint.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from anabranch.lang.backend import (
    Constraint,
    Explanation,
    Generation,
    RoleBegin,
    RoleEnd,
    Sampling,
    Scores,
    Segment,
    Text,
    TokenLogprobs,
)
from anabranch.lang.choices import apply_rule
from anabranch.lang.errors import Unsupported
from anabranch.lang.http_calls import Call, Caller
from anabranch.lang.ordered import Core, Machine, Op, OrderedBackend

MAX_CONNECTIONS = 64


class Transcript:
    """A branch's content as segments of text and turns."""

    def __init__(self, segments: Sequence[Segment] = ()) -> None:
        self.segments = list(segments)

    def append(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            if not isinstance(segment, Text | RoleBegin | RoleEnd):
                raise Unsupported(
                    "a text endpoint takes text and turns, no token ids; use the embedded engine for those"
                )
            self.segments.append(segment)

    def end(self) -> int:
        return len(self.segments)

    def cut(self, position: int) -> None:
        del self.segments[position:]

    def copy(self) -> "Transcript":
        return Transcript(self.segments)

    def since(self, position: int) -> list[Segment]:
        return self.segments[position:]

    def extend(self, part: Sequence[Segment]) -> None:
        self.segments.extend(part)

    def has_turns(self) -> bool:
        return any(isinstance(s, RoleBegin) for s in self.segments)

    def text(self) -> str:
        return "".join(s.text for s in self.segments if isinstance(s, Text))

    def messages(self) -> tuple[list[dict[str, str]], bool]:
        """The turns, and whether the last one is still open (its content is then the beginning of the answer)."""
        messages: list[dict[str, str]] = []
        is_open = False
        for segment in self.segments:
            if isinstance(segment, RoleBegin):
                messages.append({"role": segment.role, "content": ""})
                is_open = True
            elif isinstance(segment, RoleEnd):
                is_open = False
            elif isinstance(segment, Text) and not is_open:
                if segment.text.strip():
                    raise Unsupported(f"a chat endpoint takes no text between turns, got {segment.text[:40]!r}")
            elif isinstance(segment, Text):
                messages[-1]["content"] += segment.text
        return messages, is_open


class _EndpointMachine(Machine):
    """Operations as HTTP calls, made by a bounded number of threads."""

    def __init__(self, caller: Caller) -> None:
        super().__init__()
        self.caller = caller

    def new_content(self) -> Transcript:
        return Transcript()

    def stop(self, op: Op) -> None:
        if isinstance(op.run, Call):
            op.run.cancel()

    def call(self, core: Core, op: Op, work: Callable[[Call], Any]) -> bool:
        """Begin the call, or see whether it has ended. True: its result is in `op.run.result`."""
        if op.run is None:
            op.run = self.caller.start(work, lambda: self.inbox.put(("advance", core)), op.deadline)
        if not op.run.done:
            return False
        if op.run.error is not None:
            raise op.run.error
        return True

    def op_generate(self, core: Core, op: Op) -> bool:
        content, sampling, on_text = core.content, op.args["sampling"], op.args["on_text"]
        if op.run is None:
            frozen = content.copy()
            work: Callable[[Call], Generation] = lambda call: self.generate(call, frozen, sampling, on_text)  # noqa: E731
            if not self.call(core, op, work):
                return False
        elif not self.call(core, op, lambda call: None):
            return False
        made: Generation = op.run.result
        if made.text:
            content.append([Text(made.text)])
        return self.resolve(op, made)

    def op_score(self, core: Core, op: Op) -> bool:
        if op.run is None:
            frozen, choices, method = core.content.copy(), op.args["choices"], op.args["method"]
            if not self.call(core, op, lambda call: self.score(call, frozen, choices, method)):
                return False
        elif not self.call(core, op, lambda call: None):
            return False
        scores: Scores = op.run.result
        if op.args["append"]:
            core.content.append([Text(op.args["choices"][scores.best])])
        return self.resolve(op, scores)

    def op_prefill(self, core: Core, op: Op) -> bool:
        return self.resolve(op, {})  # nothing to compute here; the server caches as it likes

    def op_token_ids(self, core: Core, op: Op) -> bool:
        raise Unsupported("a text endpoint knows no token ids; use the embedded engine for those")

    def op_explain(self, core: Core, op: Op) -> bool:
        text = core.content.text()
        return self.resolve(op, Explanation(0, 0, (), "a text endpoint does not tell what its server cached", text))

    def generate(self, call: Call, content: Transcript, sampling: Sampling, on_text: Any) -> Generation:
        raise NotImplementedError

    def score(self, call: Call, content: Transcript, choices: Sequence[str], method: Any) -> Scores:
        if content.has_turns():
            raise Unsupported(
                "select needs the logprobs of given text, which chat endpoints do not tell; use gen(type=Literal[...]), "
                "a program without turns, or the embedded engine"
            )
        rows = self.logprobs(call, content.text(), choices)
        alone = self.logprobs(call, "", choices) if method == "unconditional_likelihood_normalized" else [[]]
        pairs = [[lp for lp, _ in row] for row in rows]
        best, scores = apply_rule(method, pairs, [[lp for lp, _ in row] for row in alone])
        logprobs = tuple(TokenLogprobs(tuple(t for _, t in row), tuple(lp for lp, _ in row)) for row in rows)
        return Scores(best, tuple(scores), logprobs)

    def logprobs(self, call: Call, text: str, choices: Sequence[str]) -> list[list[tuple[float, int]]]:
        """(logprob, token id) of each token of each choice after `text`."""
        raise NotImplementedError

    def do_flush_cache(self, future: "Future[None]") -> None:
        self.ask(future, "POST", "/flush_cache", lambda answer: None)

    def do_stats(self, future: "Future[dict[str, Any]]") -> None:
        self.ask(future, "GET", self.stats_path, lambda answer: answer if isinstance(answer, dict) else {})

    stats_path = "/get_server_info"

    def ask(self, future: "Future[Any]", verb: str, path: str, read: Callable[[Any], Any]) -> None:
        def work(call: Call) -> None:
            try:
                future.set_result(read(call.request(verb, path)))
            except Exception as error:
                future.set_exception(error)

        self.caller.start(work, lambda: None, None)


# ---------------------------------------------------------------- SGLang's native call


class _RuntimeMachine(_EndpointMachine):
    def info(self) -> dict[str, Any]:
        told = self.caller.now("GET", "/get_model_info")
        return {"model": told.get("model_path", ""), "has_chat_template": True, **told}

    def generate(self, call: Call, content: Transcript, sampling: Sampling, on_text: Any) -> Generation:
        if content.has_turns():
            return chat(call, content, sampling, on_text, model="default", extras=True)
        body = {"text": content.text(), "sampling_params": native_params(sampling), "stream": on_text is not None}
        if sampling.num_top_logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": sampling.num_top_logprobs, "logprob_start_len": -1}
        answer: dict[str, Any] = {}
        told = 0
        if on_text is None:
            answer = call.request("POST", "/generate", body)
        else:
            for answer in call.events("POST", "/generate", body):
                on_text(answer["text"][told:])  # the text so far, each time
                told = len(answer["text"])
        return native_generation(answer)

    def logprobs(self, call: Call, text: str, choices: Sequence[str]) -> list[list[tuple[float, int]]]:
        body = {
            "text": [text + choice for choice in choices],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": 0,
        }
        answers = call.request("POST", "/generate", body)
        return [
            tail(answer["meta_info"]["input_token_logprobs"], choice)
            for answer, choice in zip(answers, choices, strict=True)
        ]


def native_params(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters under SGLang's names; what was not said is left out."""
    named: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens, "min_new_tokens": sampling.min_tokens, "temperature": sampling.temperature,
        "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p, "ignore_eos": sampling.ignore_eos,
        "frequency_penalty": sampling.frequency_penalty, "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty, "sampling_seed": sampling.seed,
        "skip_special_tokens": sampling.skip_special_tokens, "no_stop_trim": sampling.keep_stop_text,
        "logit_bias": sampling.logit_bias, "stop": list(sampling.stop) or None,
        "stop_regex": list(sampling.stop_regex) or None, "stop_token_ids": list(sampling.stop_token_ids) or None,
    }  # fmt: skip
    return {k: v for k, v in named.items() if v is not None} | constraint_params(sampling.constraint)


def constraint_params(constraint: Constraint | None) -> dict[str, Any]:
    if constraint is None:
        return {}
    if constraint.kind == "choices":
        return {"regex": "|".join(re.escape(choice) for choice in json.loads(constraint.source))}
    if constraint.kind == "lark":
        raise Unsupported("a text endpoint takes no lark grammar; use regex, json_schema or ebnf")
    return {constraint.kind: constraint.source}


def native_generation(answer: Mapping[str, Any]) -> Generation:
    meta = answer["meta_info"]
    reason = meta.get("finish_reason") or {"type": "stop"}
    triples = meta.get("output_token_logprobs") or []
    ids = tuple(answer.get("output_ids") or [t[1] for t in triples])
    tops = tuple(
        (tuple(t[1] for t in place or ()), tuple(t[0] for t in place or ()))
        for place in meta.get("output_top_logprobs") or ()
    )
    logprobs = TokenLogprobs(tuple(t[1] for t in triples), tuple(t[0] for t in triples), tops) if triples else None
    return Generation(answer["text"], ids, reason["type"], reason.get("matched"), usage_of(meta), logprobs)


def usage_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """Our usage fields from either server's; cached tokens where it tells them."""
    prompt = int(told.get("prompt_tokens") or 0)
    details = told.get("prompt_tokens_details") or {}
    cached = int(told.get("cached_tokens") or details.get("cached_tokens") or 0)
    completion = int(told.get("completion_tokens") or 0)
    return {
        "prompt_tokens": prompt, "cached_tokens": cached, "computed_tokens": prompt - cached, "completion_tokens": completion,
    }  # fmt: skip


def tail(triples: Sequence[Sequence[Any]], choice: str) -> list[tuple[float, int]]:
    """The last tokens whose texts make up `choice`; the first of them may begin before it, where tokens merged."""
    kept: list[tuple[float, int]] = []
    length = 0
    for logprob, token, text in reversed(triples):
        if length >= len(choice):
            break
        kept.append((logprob or 0.0, token))
        length += len(text)
    return kept[::-1]


# ---------------------------------------------------------------- the OpenAI calls


class _OpenAIMachine(_EndpointMachine):
    stats_path = "/models"

    def __init__(self, caller: Caller, model: str, extras: bool) -> None:
        super().__init__(caller)
        self.model, self.extras = model, extras

    def info(self) -> dict[str, Any]:
        return {"model": self.model, "has_chat_template": True}

    def generate(self, call: Call, content: Transcript, sampling: Sampling, on_text: Any) -> Generation:
        if content.has_turns():
            return chat(call, content, sampling, on_text, model=self.model, extras=self.extras)
        body = {"model": self.model, "prompt": content.text(), **openai_params(sampling, self.extras)}
        return fold(call, "/completions", body, on_text, lambda choice: choice.get("text") or "")

    def logprobs(self, call: Call, text: str, choices: Sequence[str]) -> list[list[tuple[float, int]]]:
        prompts = [text + choice for choice in choices]
        body = {"model": self.model, "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
        answer = call.request("POST", "/completions", body)
        told = [c["logprobs"] for c in sorted(answer["choices"], key=lambda c: c["index"])]
        if not all(told):
            raise Unsupported(f"{self.model} does not tell the logprobs of its prompt, which select needs")
        return [
            tail([(lp, 0, text) for lp, text in zip(t["token_logprobs"], t["tokens"], strict=True)], choice)
            for t, choice in zip(told, choices, strict=True)
        ]


def chat(call: Call, content: Transcript, sampling: Sampling, on_text: Any, *, model: str, extras: bool) -> Generation:
    messages, is_open = content.messages()
    body: dict[str, Any] = {"model": model, **openai_params(sampling, extras)}
    if is_open and messages[-1]["role"] == "assistant":
        if messages[-1]["content"]:
            if not extras:
                raise Unsupported(
                    "this chat endpoint cannot continue an answer that was begun; put gen first in its turn"
                )
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            messages.pop()
    elif is_open:
        raise Unsupported(f"a chat endpoint generates in assistant turns only, not in a {messages[-1]['role']} turn")
    body["messages"] = messages
    path = "/v1/chat/completions" if extras and not call.caller.path.endswith("/v1") else "/chat/completions"
    return fold(call, path, body, on_text, lambda c: (c.get("delta") or c.get("message") or {}).get("content") or "")


def openai_params(sampling: Sampling, extras: bool) -> dict[str, Any]:
    """Sampling parameters under OpenAI's names. What the API has no name for is refused, unless the server takes
    `extras`.
    """
    named: dict[str, Any] = {
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
        "frequency_penalty": sampling.frequency_penalty, "presence_penalty": sampling.presence_penalty,
        "seed": sampling.seed, "stop": list(sampling.stop) or None, "logit_bias": sampling.logit_bias,
    }  # fmt: skip
    extra = {
        "top_k": sampling.top_k, "min_p": sampling.min_p, "min_tokens": sampling.min_tokens, "ignore_eos": sampling.ignore_eos,
        "repetition_penalty": sampling.repetition_penalty, "stop_regex": list(sampling.stop_regex) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None, "no_stop_trim": sampling.keep_stop_text,
    }  # fmt: skip
    constraint = sampling.constraint
    if constraint is not None and constraint.kind == "json_schema":
        schema = {"name": "value", "strict": True, "schema": json.loads(constraint.source)}
        named["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        extra |= constraint_params(constraint)
    said = {k: v for k, v in extra.items() if v is not None}
    if said and not extras:
        raise Unsupported(f"the OpenAI API has no {' or '.join(said)}; pass extras=True if this server takes it")
    return {k: v for k, v in named.items() if v is not None} | said


def fold(call: Call, path: str, body: dict[str, Any], on_text: Any, text_of: Callable[[Any], str]) -> Generation:
    """One generation; streamed, its text is the sum of the pieces."""
    if on_text is None:
        answer = call.request("POST", path, body)
        choice = answer["choices"][0]
        return Generation(text_of(choice), (), reason_of(choice), usage=usage_of(answer.get("usage") or {}))
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    reason: Any = "stop"
    for event in call.events("POST", path, {**body, "stream": True, "stream_options": {"include_usage": True}}):
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            if piece := text_of(choice):
                pieces.append(piece)
                on_text(piece)
            reason = reason_of(choice) if choice.get("finish_reason") else reason
    return Generation("".join(pieces), (), reason, usage=usage_of(usage))


def reason_of(choice: Mapping[str, Any]) -> Any:
    return {"length": "length", "abort": "abort"}.get(str(choice.get("finish_reason")), "stop")


# ---------------------------------------------------------------- what users make


class RuntimeEndpoint(OrderedBackend):
    """A server that speaks SGLang's native `/generate`: SGLang itself, or ours.

    base_url         such as "http://127.0.0.1:30000"
    api_key          sent as a bearer token
    max_connections  how many calls may be under way at once; more wait their turn
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, max_connections: int = MAX_CONNECTIONS) -> None:
        caller = Caller(base_url, api_key, max_connections)
        super().__init__(_RuntimeMachine(caller))
        self.base_url = base_url


class OpenAI(OrderedBackend):
    """A server that speaks the OpenAI API.

    model     its name there
    base_url  such as "http://127.0.0.1:8000/v1"
    extras    whether the server takes what OpenAI's own API does not: top_k, regex, continuing an answer that was
              begun ...
    """

    def __init__(
        self, model: str, base_url: str = "https://api.openai.com/v1", api_key: str | None = None, *,
        extras: bool = False, max_connections: int = MAX_CONNECTIONS,
    ) -> None:  # fmt: skip
        super().__init__(_OpenAIMachine(Caller(base_url, api_key, max_connections), model, extras))
        self.model, self.base_url = model, base_url


def Anthropic(*args: Any, **kwargs: Any) -> Any:
    """Refused: use a server with an OpenAI-compatible endpoint."""
    raise Unsupported(
        "the Anthropic API is not spoken here; use OpenAI(model, base_url=...) with a compatible endpoint"
    )
