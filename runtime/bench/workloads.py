"""The workloads of our users, as functions from a target to figures. Each run uses fresh text; only what a workload shares can hit the cache."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from anabranch.runtime.bench.figures import percentile
from anabranch.runtime.bench.targets import Node, Reply, Target
from anabranch.runtime.bench.texts import Texts

TIMEOUT = 600.0  # seconds that one answer may take before the benchmark gives up
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Workload:
    """`headline` is the figure that ratios are made of; `better` says which direction."""

    name: str
    about: str
    run: Callable[[Target, Texts, float], Figures]
    headline: str
    better: str  # "lower" | "higher"


UNITS = {
    "tpot_ms": "ms", "ttft_ms": "ms", "total_s": "s", "output_tok_s": "tok/s", "prefill_tok_s": "tok/s",
    "itl_p50_ms": "ms", "itl_p99_ms": "ms", "select_ms": "ms", "forward_ms": "ms", "fork_us": "us",
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
        "output_tokens": reply.num_output,
    }  # fmt: skip


def prefill(target: Target, texts: Texts, scale: float) -> Figures:
    (reply,) = finish([ask(target, texts.passage(int(2048 * scale)), 1)])
    return {
        "prefill_tok_s": (reply.num_prompt - reply.num_cached) / reply.total,
        "ttft_ms": 1000 * reply.total,
        "prompt_tokens": reply.num_prompt,
    }


def throughput(target: Target, texts: Texts, scale: float) -> Figures:
    prompts = [texts.passage(int(256 * scale)) for _ in range(16)]
    start = time.perf_counter()
    replies = finish([ask(target, prompt, int(128 * scale)) for prompt in prompts])
    total = time.perf_counter() - start
    gaps = gaps_ms(replies)
    return {
        "output_tok_s": sum(r.num_output for r in replies) / total,
        "total_s": total,
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
    }


def prefix(target: Target, texts: Texts, scale: float) -> Figures:
    shared = texts.passage(int(1024 * scale))
    prompts = [shared + "\n" + texts.passage(int(32 * scale)) for _ in range(32)]
    start = time.perf_counter()
    replies = in_waves(target, prompts, 16, 8)
    total = time.perf_counter() - start
    return {
        "total_s": total,
        "cached_tokens": sum(r.num_cached for r in replies),
        "prompt_tokens": sum(r.num_prompt for r in replies),
    }


def chat(target: Target, texts: Texts, scale: float) -> Figures:
    """Eight conversations of four turns, all at once; each turn adds about 64 tokens and gets 32 back."""
    talks = [target.open() for _ in range(8)]
    start, replies = time.perf_counter(), []
    for _ in range(4):
        for talk in talks:
            talk.extend("\nUser: " + texts.passage(int(64 * scale)) + "\nAssistant:")
        turn = [talk.generate(32) for talk in talks]
        replies += [future.result(TIMEOUT) for future in turn]
    total = time.perf_counter() - start
    for talk in talks:
        talk.close()
    return {
        "total_s": total,
        "cached_tokens": sum(r.num_cached for r in replies),
        "prompt_tokens": sum(r.num_prompt for r in replies),
    }


def tree(target: Target, texts: Texts, scale: float) -> Figures:
    """512-token root, three levels, four children per node, the best four kept (by length of the answer: any rule does), 32 tokens each."""
    root = target.open()
    root.extend(texts.passage(int(512 * scale)))
    start, level, replies = time.perf_counter(), [root], []
    for depth in range(3):
        children = [child for node in level for child in node.fork(4)]
        for i, child in enumerate(children):
            child.extend(f"\nStep {depth + 1}, idea {i % 4 + 1}:")
        answers = [child.generate(32, temperature=0.8) for child in children]
        replies = [answer.result(TIMEOUT) for answer in answers]
        ranked = sorted(range(len(children)), key=lambda i: (-len(set(replies[i].text)), i))
        level = [children[i] for i in ranked[:4]]
        for i in ranked[4:]:
            children[i].close()
    total = time.perf_counter() - start
    return {"total_s": total, "cached_tokens": sum(r.num_cached for r in replies)}


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


WORKLOADS = {
    w.name: w
    for w in (
        Workload("latency", "prompt 128, output 128, one stream", latency, "tpot_ms", "lower"),
        Workload("prefill", "prompt 2,048, one token", prefill, "prefill_tok_s", "higher"),
        Workload("throughput", "16 x (256 -> 128) at once", throughput, "output_tok_s", "higher"),
        Workload("prefix", "32 requests, 1,024 shared + 32 own -> 16, concurrency 8", prefix, "total_s", "lower"),
        Workload("chat", "8 conversations of 4 turns", chat, "total_s", "lower"),
        Workload(
            "tree",
            "512-token root, 3 levels, 4 children per node, best 4 kept, 32 tokens each",
            tree,
            "total_s",
            "lower",
        ),
        Workload("select", "32 choices in one request", select, "select_ms", "lower"),
    )
}
