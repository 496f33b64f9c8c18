"""A stream of requests of mixed lengths: open loop, at times that do not depend on the answers, or closed, as fast as answers come.

Open loop avoids coordinated omission (Tene 2013): every time counts from when a request was *due*, whether the client was late or not, and
nothing waits for an answer before it sends the next.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from anabranch.runtime.bench.arrivals import BLOCK_TOKENS, Arrival, offered_rate
from anabranch.runtime.bench.figures import percentile
from anabranch.runtime.bench.targets import Node, Reply, Target
from anabranch.runtime.bench.texts import Texts
from anabranch.runtime.bench.workloads import TIMEOUT, Figures

PERCENTILES = ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))


@dataclass(frozen=True, slots=True)
class Answered:
    """A request with its answer. `due` and `sent` on the clock of `time.perf_counter`; in a closed loop they are the same."""

    arrival: Arrival
    due: float
    sent: float
    reply: Reply

    @property
    def ttft(self) -> float:
        return self.reply.asked + self.reply.ttft - self.due

    @property
    def end(self) -> float:
        return self.reply.asked + self.reply.total


class Prompts:
    """Texts for arrivals. Blocks of a trace become passages, the same for the same id; what is left over is new."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._blocks: dict[int, str] = {}

    def text(self, arrival: Arrival) -> str:
        num_blocks = min(len(arrival.blocks), arrival.num_prompt // BLOCK_TOKENS)
        parts = [self._block(block) for block in arrival.blocks[:num_blocks]]
        if left := arrival.num_prompt - num_blocks * BLOCK_TOKENS:
            parts.append(self._texts.passage(left))
        return "".join(parts)

    def _block(self, block: int) -> str:
        if block not in self._blocks:
            self._blocks[block] = self._texts.passage(BLOCK_TOKENS)
        return self._blocks[block]


def open_loop(
    target: Target, texts: Texts, arrivals: Sequence[Arrival], *, sleep: Callable[[float], None] = time.sleep
) -> list[Answered]:
    """Send each request when it is due and wait for all. Prompts are made before the clock starts."""
    maker = Prompts(texts)
    prompts = [maker.text(arrival) for arrival in arrivals]
    start = time.perf_counter()
    sent: list[tuple[float, float, Future[Reply]]] = []
    for arrival, prompt in zip(arrivals, prompts):
        due = start + arrival.at
        if (left := due - time.perf_counter()) > 0:
            sleep(left)
        now = time.perf_counter()
        sent.append((due, now, _ask(target, prompt, arrival.num_output)))
    return [Answered(a, due, now, future.result(TIMEOUT)) for a, (due, now, future) in zip(arrivals, sent)]


def closed_loop(target: Target, texts: Texts, arrivals: Sequence[Arrival], concurrency: int) -> list[Answered]:
    """The same requests, `concurrency` of them at a time, their arrival times ignored."""
    maker = Prompts(texts)
    prompts = [maker.text(arrival) for arrival in arrivals]
    free = threading.Semaphore(concurrency)
    sent: list[tuple[float, Future[Reply]]] = []
    for arrival, prompt in zip(arrivals, prompts):
        assert free.acquire(timeout=TIMEOUT), f"no answer within {TIMEOUT} s"
        future = _ask(target, prompt, arrival.num_output)
        sent.append((time.perf_counter(), future))
        future.add_done_callback(lambda _: free.release())
    answers = [future.result(TIMEOUT) for _, future in sent]
    return [Answered(a, r.asked, r.asked, r) for a, r in zip(arrivals, answers)]


def _ask(target: Target, prompt: str, max_tokens: int) -> "Future[Reply]":
    node: Node = target.open()
    node.extend(prompt)
    future = node.generate(max_tokens)
    future.add_done_callback(lambda _: node.close())
    return future


def figures_of(answered: Sequence[Answered], *, is_open: bool = True) -> Figures:
    """Latencies from when requests were due, rates, and how long the queue was.

    offered_per_s, achieved_per_s  requests due, and answered, per second, each between its first and its last (an open loop's offer)
    lag                            how late the client sent: large lags make the client the thing measured (open loop)
    queue                          from arrival to the first step, where the engine tells
    in_flight_mean, _max           requests that were due and not answered yet (mean by Little's law)
    """
    replies = [a.reply for a in answered]
    gaps = [b - a for r in replies for a, b in zip(r.arrivals, r.arrivals[1:])]
    samples = {
        "ttft": [a.ttft for a in answered], "itl": gaps, "tpot": [r.tpot for r in replies if r.num_output > 1],
    }  # fmt: skip
    if is_open:
        samples["lag"] = [a.sent - a.due for a in answered]
    if any(r.queue_s for r in replies):
        samples["queue"] = [r.queue_s for r in replies]
    figures = {f"{name}_{p}_ms": 1000 * percentile(values, share) for name, values in samples.items() for share, p in PERCENTILES}
    first, last = min(a.due for a in answered), max(a.end for a in answered)
    ends = sorted(a.end for a in answered)
    if is_open:
        figures["offered_per_s"] = offered_rate([a.arrival for a in answered])
    return {
        **figures,
        "achieved_per_s": (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 and ends[-1] > ends[0] else 0.0,
        "output_tok_s": sum(r.num_output for r in replies) / (last - first),
        "in_flight_mean": sum(a.end - a.due for a in answered) / (last - first),
        "in_flight_max": most_at_once([(a.due, a.end) for a in answered]),
        "cached_tokens": sum(r.num_cached for r in replies),
        "prompt_tokens": sum(r.num_prompt for r in replies),
        "total_s": last - first,
    }


def most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    """The most intervals that overlap anywhere."""
    events = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most
