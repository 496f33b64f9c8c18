"""What the cache's bookkeeping costs, against what it promises: the table behind `anabranch bench radix`.

No model and no device take part: this is the scheduler's share of a request, in one thread.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np

from anabranch.radix.branch import Branch
from anabranch.radix.manager import KVManager

PAGE_SIZE = 16
NAMESPACE = b"bench"

PROMISES: dict[str, tuple[str, float | None]] = {  # key: (what it is, at most)
    "match_100k_ms": ("match a 100k-token prompt from the root", 0.2),
    "extend_200_us_at_1k": ("come back with 200 more tokens to a branch of 1k", None),
    "extend_200_us_at_100k": ("the same to a branch of 100k", None),
    "fork_us": ("fork a branch of 100k tokens", 10.0),
    "evict_us_per_page_at_10k": ("evict a page, tree of 10k nodes", None),
    "evict_us_per_page_at_1m": ("evict a page, tree of 1M nodes", None),
    "bytes_per_node_at_1m": ("memory of a node, beyond 4 B a token", 300.0),
    "order_10k_ms": ("order 10k waiting requests by cached prefix", 5.0),
    "decode_us": ("one decode step of a branch: append, reserve, commit", None),
    "fragmentation_chat": ("allocated slots that hold nothing needed, chat trace", 0.04),
}
RATIOS = {  # the first over the second, at most
    ("extend_200_us_at_100k", "extend_200_us_at_1k"): 1.5,
    ("evict_us_per_page_at_1m", "evict_us_per_page_at_10k"): 2.0,
}


def run(*, small: bool = False) -> dict[str, float]:
    """Measure everything; about half a minute, and 400 MB.

    small   a twentieth of the large tree and fewer repeats, under the same keys: seconds, for tests of the harness
    """
    repeats, large = (5, 50_000) if small else (25, 1_000_000)
    evict_small, _ = _evict_and_size(10_000)
    evict_large, node_bytes = _evict_and_size(large)
    return {
        "match_100k_ms": 1e3 * _match(100_000, repeats),
        "extend_200_us_at_1k": 1e6 * _extend(1_000, repeats),
        "extend_200_us_at_100k": 1e6 * _extend(100_000, repeats),
        "fork_us": 1e6 * _fork(100_000, 40 * repeats),
        "evict_us_per_page_at_10k": 1e6 * evict_small,
        "evict_us_per_page_at_1m": 1e6 * evict_large,
        "bytes_per_node_at_1m": node_bytes,
        "order_10k_ms": 1e3 * _order(10_000, repeats),
        "decode_us": 1e6 * _decode(2_000, 40 * repeats),
        "fragmentation_chat": chat_fragmentation(num_chats=60 if small else 200),
    }


def table(result: dict[str, float]) -> str:
    """The figures beside the promises, for people."""
    lines = [f"{'':56} {'measured':>12} {'promised':>10}"]
    for key, (what, limit) in PROMISES.items():
        promised = "" if limit is None else f"{limit:g}"
        unit = next((f", {unit}" for unit in ("ms", "us") if unit in key.split("_")), "")
        lines.append(f"{what + unit:56} {result[key]:12.3f} {promised:>10}  {_verdict(result[key], limit)}")
    for (upper, lower), limit in RATIOS.items():
        ratio = result[upper] / result[lower]
        lines.append(f"{upper + ' / ' + lower:56} {ratio:12.3f} {limit:>10g}  {_verdict(ratio, limit)}")
    return "\n".join(lines)


def _verdict(value: float, limit: float | None) -> str:
    return "" if limit is None else "ok" if value <= limit else "MISSED"


def chat_fragmentation(*, num_chats: int, turns: int = 6, seed: int = 0) -> float:
    """Worst fragmentation over a chat-like trace: a shared system prompt, chats that come back, one that is regenerated.

    A turn is a user message of 20 to 200 tokens and an answer of 40 to 400, whose last token has no KV until the chat
    goes on. Every tenth answer is thrown away and generated again.
    """
    rng = np.random.default_rng(seed)
    m = KVManager(num_chats * 300, PAGE_SIZE)
    system = _tokens(rng, 700)
    chats = []
    for _ in range(num_chats):
        chats.append(m.open(NAMESPACE))
        m.append(chats[-1], system)
    worst = 0.0
    for turn in range(turns):
        for chat in rng.permutation(num_chats):
            branch = chats[chat]
            m.append(branch, _tokens(rng, int(rng.integers(20, 200))))
            length = len(branch)
            _answer(m, branch, rng)
            if rng.random() < 0.1:
                m.rollback(branch, length)
                _answer(m, branch, rng)
        if turn:  # before, the pool is nearly empty and a page's gap is all there is
            worst = max(worst, m.fragmentation())
    return worst


def _answer(m: KVManager, branch: Branch, rng: np.random.Generator) -> None:
    m.attach(branch)
    for token in _tokens(rng, int(rng.integers(40, 400))).tolist():
        assert m.reserve(branch, len(branch)) is not None, "the pool of the trace is too small"
        m.commit(branch, len(branch))
        m.append(branch, [token])
    m.detach(branch)
    m.settle()


def _tokens(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 50_000, n, dtype=np.int32)


def _timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _cached(m: KVManager, tokens: np.ndarray) -> Branch:
    """An idle branch with these tokens, all of them computed."""
    branch = m.open(NAMESPACE)
    m.append(branch, tokens)
    _compute(m, branch)
    return branch


def _compute(m: KVManager, branch: Branch) -> None:
    m.attach(branch)
    assert m.reserve(branch, len(branch)) is not None, "the pool of the benchmark is too small"
    m.commit(branch, len(branch))
    m.detach(branch)
    m.settle()


def _match(length: int, repeats: int) -> float:
    rng = np.random.default_rng(0)
    m = KVManager(2 * length // PAGE_SIZE, PAGE_SIZE)
    prompt = _tokens(rng, length)
    _cached(m, prompt)
    times = []
    for _ in range(repeats):
        branch = m.open(NAMESPACE)
        m.append(branch, prompt)
        times.append(_timed(partial(m.lookup, branch)))
        assert m.lookup(branch) == length - 1
    return median(times)


def _extend(length: int, repeats: int) -> float:
    """Append, attach with the page table, reserve, commit, detach into the tree."""
    rng = np.random.default_rng(0)
    times = []
    for _ in range(repeats):
        m = KVManager((length + 4_000) // PAGE_SIZE, PAGE_SIZE)
        branch = _cached(m, _tokens(rng, length))
        new = [_tokens(rng, 200) for _ in range(5)]
        times.append(min(_timed(partial(_come_back, m, branch, tokens)) for tokens in new))
    return median(times)


def _come_back(m: KVManager, branch: Branch, tokens: np.ndarray) -> None:
    m.append(branch, tokens)
    _compute(m, branch)


def _fork(length: int, repeats: int) -> float:
    m = KVManager(2 * length // PAGE_SIZE, PAGE_SIZE)
    branch = _cached(m, _tokens(np.random.default_rng(0), length))
    m.attach(branch)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        children = m.fork(branch, 1)
        times.append(time.perf_counter() - begin)
        m.release(children[0])
    return median(times)


def _decode(length: int, repeats: int) -> float:
    m = KVManager((length + repeats) // PAGE_SIZE + 8, PAGE_SIZE)
    branch = _cached(m, _tokens(np.random.default_rng(0), length))
    m.attach(branch)

    def step() -> None:
        m.reserve(branch, len(branch))
        m.commit(branch, len(branch))
        m.append(branch, [7])

    return median(_timed(step) for _ in range(repeats))


def _order(num_waiting: int, repeats: int) -> float:
    rng = np.random.default_rng(0)
    m = KVManager(4_000, PAGE_SIZE)
    prompt = _tokens(rng, 4_000)
    _cached(m, prompt)
    waiting = []
    for cut in rng.integers(0, len(prompt), num_waiting):
        branch = m.open(NAMESPACE)
        m.append(branch, np.concatenate([prompt[:cut], _tokens(rng, 50)]))
        waiting.append(branch)
        m.lookup(branch)
    return median(_timed(lambda: sorted(waiting, key=m.lookup, reverse=True)) for _ in range(repeats))


def _evict_and_size(num_nodes: int) -> tuple[float, float]:
    """Seconds for a page, and bytes for a node beyond its tokens, of a tree of one-page edges in random order of use."""
    rng = np.random.default_rng(0)
    order = rng.permutation(num_nodes)
    gc.collect()
    before = _resident_bytes()
    m = KVManager(num_nodes, PAGE_SIZE)
    first = _grow_tree(m, num_nodes, rng)
    for node in order.tolist():
        m.tree.order.touch(first + node)
    node_bytes = (_resident_bytes() - before) / num_nodes - 4 * PAGE_SIZE
    batches = min(5_000, num_nodes // 8)  # of four pages: short enough to lie between two preemptions
    return median(_timed(lambda: m.tree.evict(4)) for _ in range(batches)) / 4, node_bytes


def _grow_tree(m: KVManager, num_nodes: int, rng: np.random.Generator) -> int:
    """A tree of `num_nodes` full pages with eight children a node; returns the first node's id."""
    tree = m.tree
    root = tree.open_root(NAMESPACE)
    first = root + 1
    for i in range(num_nodes):
        pages = m.pool.alloc(1)
        assert pages is not None
        tokens = _tokens(rng, PAGE_SIZE)
        tokens[0] = i  # siblings must differ
        parent = first + (i - 1) // 8 if i else root
        tree.store.write(pages, tree.nodes.end[parent], tokens)
        node = tree.add_child(parent, tree.nodes.end[parent] + PAGE_SIZE, pages, first_token=i, shares_first=False)
        assert node == first + i, "ids of fresh nodes are consecutive"
    return first


def _resident_bytes() -> int:
    """Memory of this process; where there is no /proc, the most it ever had, which is good for one growing tree."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except FileNotFoundError:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
