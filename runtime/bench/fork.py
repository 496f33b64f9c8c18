"""What a fork costs as a program sees it, and what a tree of forks computes. Model-free in size: any engine will do."""

import time
from statistics import median

from anabranch.runtime.bench.figures import table as figures_table
from anabranch.runtime.bench.texts import Texts
from anabranch.runtime.engine import Engine
from anabranch.runtime.messages import Fork, GenerateParams, Text, ints
from anabranch.runtime.tokenizer.vocabulary import Vocabulary
from anabranch.runtime.transport import encode

TIMEOUT = 600.0
WIDTH, DEPTH = 8, 4


def run(engine: Engine, vocabulary: Vocabulary, *, small: bool = False) -> dict[str, float]:
    """fork_us: one fork of one child, median; text_bytes_sent: by a fork of eight; computed_over_distinct: of a whole tree."""
    root = engine.open(seed=1)
    root.append([Text(Texts(vocabulary, 5).passage(256 if small else 2048))])
    root.prefill().result(TIMEOUT)
    times, children = [], []
    for _ in range(50 if small else 500):
        began = time.perf_counter()
        children += root.fork(1)
        times.append(time.perf_counter() - began)
    computed, distinct = tree(engine, root, 2 if small else DEPTH)
    message = Fork(root.label, tuple(range(1_000_000, 1_000_000 + WIDTH)))
    return {
        "fork_us": 1e6 * median(times), "fork_message_bytes": len(encode(message)), "text_bytes_sent": text_bytes(message),
        "tokens_computed": computed, "distinct_tokens": distinct, "computed_over_distinct": computed / distinct,
    }  # fmt: skip


def tree(engine: Engine, root, depth: int) -> tuple[int, int]:  # type: ignore[no-untyped-def]  # a BranchHandle
    """Grow `WIDTH` children a level, going on from the first of them; (tokens computed, distinct tokens needed)."""
    before = engine.stats().result(TIMEOUT)["events"].get("planned_tokens", 0)
    base = len(root.token_ids().result(TIMEOUT))
    seen: set[bytes] = set()
    node, kept = root, []
    for level in range(depth):
        children = node.fork(WIDTH)
        for i, child in enumerate(children):
            child.append([Text(f"\nLevel {level}, child {i}:")])
        made = [c.generate(GenerateParams(max_tokens=8, ignore_eos=True, temperature=0.9)) for c in children]
        for child, future in zip(children, made):
            future.result(TIMEOUT)
            ids = child.token_ids().result(TIMEOUT)[:-1]  # the last token was sampled, not computed
            seen |= {ints(ids[: i + 1]) for i in range(base, len(ids))}
        if level:
            seen.add(ints(node.token_ids().result(TIMEOUT)))  # its last token is computed for its children
        node = children[0]
        kept += children
    after = engine.stats().result(TIMEOUT)["events"].get("planned_tokens", 0)
    return int(after - before), len(seen)


def text_bytes(message: Fork) -> int:
    """Bytes of text in a message's fields."""
    fields = (getattr(message, name) for name in message.__struct_fields__)
    return sum(len(value.encode()) for value in fields if isinstance(value, str))


def table(result: dict[str, float]) -> str:
    return figures_table([(name, f"{value:,.4g}") for name, value in result.items()], ("fork", "measured"))
