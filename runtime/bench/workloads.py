"""The workloads of our users, as functions from a target to figures. Each run uses fresh text; only what a workload shares can hit the cache."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from anabranch.runtime.bench import least, records
from anabranch.runtime.bench.figures import percentile
from anabranch.runtime.bench.floor import Step
from anabranch.runtime.bench.targets import Node, Reply, Target
from anabranch.runtime.bench.texts import Texts

TIMEOUT = 600.0  # seconds that one answer may take before the benchmark gives up
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Workload:
    """`headline` is the figure that ratios are made of; `better` says which direction.

    shares_prefixes   some of its text is shared on purpose: else cached tokens are an accident
    least             the fewest steps that do it at a scale, given the figures of a run; None where that has no answer
    """

    name: str
    about: str
    run: Callable[[Target, Texts, float], Figures]
    headline: str
    better: str  # "lower" | "higher"
    shares_prefixes: bool = False
    least: Callable[[float, Figures], list[Step]] | None = None


UNITS = {
    "tpot_ms": "ms", "ttft_ms": "ms", "total_s": "s", "output_tok_s": "tok/s", "prefill_tok_s": "tok/s",
    "itl_p50_ms": "ms", "itl_p99_ms": "ms", "select_ms": "ms", "forward_ms": "ms", "fork_us": "us",
    **{f"{name}_{p}_ms": "ms" for name in ("ttft", "itl", "tpot", "queue", "lag") for p in ("p50", "p90", "p99")},
    "offered_per_s": "/s", "achieved_per_s": "/s",
}  # fmt: skip


def ask(target: Target, prompt: str, max_tokens: int) -> tuple[Node, "Future[Reply]"]:
    node = target.open()
    node.extend(prompt)
    return node, node.generate(max_tokens)


def finish(started: Sequence[tuple[Node, "Future[Reply]"]]) -> list[Reply]:
    replies = [future.result(TIMEOUT) for _, future in started]
    for node, _ in started:
        node.close()
    return replies


def in_waves(target: Target, prompts: Sequence[str], max_tokens: int, concurrency: int) -> list[Reply]:
    """Closed loop: `concurrency` requests in flight, the next one starts when one ends."""
    waiting, running, replies = list(prompts), {}, []  # type: ignore[var-annotated]
    while waiting or running:
        while waiting and len(running) < concurrency:
            node, future = ask(target, waiting.pop(0), max_tokens)
            running[future] = node
        done, _ = wait(running, TIMEOUT, FIRST_COMPLETED)
        assert done, f"no answer within {TIMEOUT} s"
        for future in done:
            running.pop(future).close()
            replies.append(future.result())
    return replies


def gaps_ms(replies: Sequence[Reply]) -> list[float]:
    return [1000 * (b - a) for r in replies for a, b in zip(r.arrivals, r.arrivals[1:])]


def latency(target: Target, texts: Texts, scale: float) -> Figures:
    (reply,) = finish([ask(target, texts.passage(int(128 * scale)), int(128 * scale))])
    gaps = gaps_ms([reply])
    return {
        "tpot_ms": 1000 * reply.tpot, "ttft_ms": 1000 * reply.ttft, "itl_p50_ms": percentile(gaps, 0.5), "itl_p99_ms": percentile(gaps, 0.99),
        "output_tokens": reply.num_output, **cache_use([reply]),
    }  # fmt: skip


def prefill(target: Target, texts: Texts, scale: float) -> Figures:
    (reply,) = finish([ask(target, texts.passage(int(2048 * scale)), 1)])
    return {
        "prefill_tok_s": (reply.num_prompt - reply.num_cached) / reply.total,
        "ttft_ms": 1000 * reply.total,
        **cache_use([reply]),
    }


def throughput(target: Target, texts: Texts, scale: float) -> Figures:
    prompts = [texts.passage(int(256 * scale)) for _ in range(16)]
    start = time.perf_counter()
    replies = finish([ask(target, prompt, int(128 * scale)) for prompt in prompts])
    total = time.perf_counter() - start
    gaps = gaps_ms(replies)
    return {
        "output_tok_s": (num_output := sum(r.num_output for r in replies)) / total,
        "output_tokens": num_output,
        "total_s": total,
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
        **cache_use(replies),
    }


def prefix(target: Target, texts: Texts, scale: float) -> Figures:
    shared = texts.passage(int(1024 * scale))
    prompts = [shared + "\n" + texts.passage(int(32 * scale)) for _ in range(32)]
    start = time.perf_counter()
    replies = in_waves(target, prompts, 16, 8)
    total = time.perf_counter() - start
    return {"total_s": total, **cache_use(replies)}


def chat(target: Target, texts: Texts, scale: float) -> Figures:
    """Eight conversations of four turns, all at once; each turn adds about 64 tokens and gets 32 back.

    cached_of_cacheable: of the tokens that the turn before left in the cache, all but the last one of its answer, how many were found.
    """
    talks = [target.open() for _ in range(8)]
    start, turns = time.perf_counter(), []
    for _ in range(4):
        for talk in talks:
            talk.extend("\nUser: " + texts.passage(int(64 * scale)) + "\nAssistant:")
        turn = [talk.generate(32) for talk in talks]
        turns.append([future.result(TIMEOUT) for future in turn])
    total = time.perf_counter() - start
    for talk in talks:
        talk.close()
    cacheable = sum(r.num_prompt + r.num_output - 1 for turn in turns[:-1] for r in turn)
    found = sum(r.num_cached for turn in turns[1:] for r in turn)
    replies = [r for turn in turns for r in turn]
    return {"total_s": total, **cache_use(replies), "cacheable_tokens": cacheable, "cached_of_cacheable": found / cacheable}


def tree(target: Target, texts: Texts, scale: float) -> Figures:
    """512-token root, three levels, four children per node, the best four kept (by length of the answer: any rule does), 32 tokens each.

    computed_over_distinct: tokens that went through the model, over the tokens of the tree that had to. Nothing is closed before the end: it
    is not measured, and their tokens are counted then.
    """
    root = target.open()
    root.extend(texts.passage(int(512 * scale)))
    before = target.computed_tokens()
    start, level, replies, nodes = time.perf_counter(), [root], [], []
    for depth in range(3):
        children = [child for node in level for child in node.fork(4)]
        for i, child in enumerate(children):
            child.extend(f"\nStep {depth + 1}, idea {i % 4 + 1}:")
        answers = [child.generate(32, temperature=0.8) for child in children]
        replies += (latest := [answer.result(TIMEOUT) for answer in answers])
        ranked = sorted(range(len(children)), key=lambda i: (-len(set(latest[i].text)), i))
        level = [children[i] for i in ranked[:4]]
        nodes += children
    total = time.perf_counter() - start
    figures = {"total_s": total, **cache_use(replies)}
    if before is not None:
        computed = (target.computed_tokens() or 0) - before
        distinct = distinct_tokens(ids for node in nodes if (ids := node.token_ids()) is not None)
        figures |= {"computed_tokens": computed, "distinct_tokens": distinct, "computed_over_distinct": computed / distinct}
    for node in [*nodes, root]:
        node.close()
    return figures


def distinct_tokens(sequences: Iterable[Sequence[int]]) -> int:
    """Tokens that must be computed for these sequences: nodes of their trie. The last token of each was sampled and needs no computing,
    unless another sequence goes on behind it."""
    trie: dict[int, Any] = {}
    count = 0
    for ids in sequences:
        node = trie
        for token_id in ids[:-1]:
            if token_id not in node:
                node[token_id] = {}
                count += 1
            node = node[token_id]
    return count


def cache_use(replies: Sequence[Reply]) -> Figures:
    """Prompt tokens, and how many of them came from the cache."""
    return {"cached_tokens": sum(r.num_cached for r in replies), "prompt_tokens": sum(r.num_prompt for r in replies)}


def json(target: Target, texts: Texts, scale: float) -> Figures:
    """16 records of six fields, all at once, each behind a passage of its own."""
    prompts = [records.prompt(texts.passage(int(64 * scale))) for _ in range(16)]
    start = time.perf_counter()
    nodes = [target.open() for _ in prompts]
    for node, prompt in zip(nodes, prompts):
        node.extend(prompt)
    replies = finish([(node, node.generate(records.MAX_TOKENS, json_schema=records.SCHEMA)) for node in nodes])
    total = time.perf_counter() - start
    num_output, num_steps = sum(r.num_output for r in replies), sum(r.num_steps for r in replies)
    figures = {
        "output_tok_s": num_output / total, "total_s": total, "records_s": len(replies) / total, "output_tokens": num_output,
        "valid_share": sum(records.problem(r.text) is None for r in replies) / len(replies), **cache_use(replies),
    }  # fmt: skip
    if num_steps:  # each request's own: a step that serves sixteen of them counts for each
        figures |= {"steps_per_output_token": num_steps / num_output, "most_steps": max(r.num_steps for r in replies)}
        figures |= {"forced_share": sum(r.num_forced for r in replies) / num_output}
    return figures


def select(target: Target, texts: Texts, scale: float) -> Figures:
    """32 choices after a computed prefix, against one forward of the longest of them on the same prefix."""
    choices = [f" {name}" for name in LABELS]
    forwards, scored = [], []
    for _ in range(7):  # a prefix of its own each time, or the longest choice would be cached
        node = target.open()
        node.extend(texts.passage(int(256 * scale)))
        once, alone, among = node.fork(3)
        once.generate(1).result(TIMEOUT)
        alone.extend(max(choices, key=len))
        forwards.append(alone.generate(1).result(TIMEOUT).total)
        scored.append(among.select(choices).result(TIMEOUT).total)
        node.close()
    forward, chosen = percentile(forwards[1:], 0.5), percentile(scored[1:], 0.5)
    return {"select_ms": 1000 * chosen, "forward_ms": 1000 * forward, "select_over_forward": chosen / forward}


LABELS = (
    "Austria", "Belgium", "Bulgaria", "Croatia", "Cyprus", "Denmark", "Estonia", "Finland", "France", "Germany", "Greece", "Hungary",
    "Iceland", "Ireland", "Italy", "Latvia", "Lithuania", "Luxembourg", "Malta", "Moldova", "Norway", "Poland", "Portugal", "Romania",
    "Serbia", "Slovakia", "Slovenia", "Spain", "Sweden", "Switzerland", "Turkey", "Ukraine",
)  # fmt: skip


_ALL = (
    Workload("latency", "prompt 128, output 128, one stream", latency, "tpot_ms", "lower", least=least.latency),
    Workload("prefill", "prompt 2,048, one token", prefill, "prefill_tok_s", "higher", least=least.prefill),
    Workload("throughput", "16 x (256 -> 128) at once", throughput, "output_tok_s", "higher", least=least.throughput),
    Workload(
        "prefix", "32 requests, 1,024 shared + 32 own -> 16, concurrency 8", prefix, "total_s", "lower",
        shares_prefixes=True, least=least.prefix,
    ),
    Workload("chat", "8 conversations of 4 turns", chat, "total_s", "lower", shares_prefixes=True, least=least.chat),
    Workload(
        "tree", "512-token root, 3 levels, 4 children per node, best 4 kept, 32 tokens each", tree, "total_s", "lower",
        shares_prefixes=True, least=least.tree,
    ),
    Workload(
        "json", "16 records of 6 fields that fit a JSON schema, at once", json, "output_tok_s", "higher",
        shares_prefixes=True, least=least.json,
    ),
    Workload("select", "32 choices in one request", select, "select_ms", "lower", shares_prefixes=True, least=least.select),
)  # fmt: skip
WORKLOADS = {workload.name: workload for workload in _ALL}
