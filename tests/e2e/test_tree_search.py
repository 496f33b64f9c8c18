"""A tree search on the real model computes each distinct token once."""

from pathlib import Path

from anabranch.lang.backend import BackendBranch, Sampling, Text
from anabranch.runtime.engine import Engine

LEVELS, WIDTH, KEEP = 3, 4, 3
WAIT = 240


def distinct_prefixes(sequences: list[list[int]]) -> int:
    """Nodes of the trie of these token sequences: what has to be computed if nothing is computed twice."""
    return len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})


def test_tokens_computed_are_the_distinct_ones(model_path: Path) -> None:
    needed: list[list[int]] = []  # tokens whose KV or logits some operation needed
    with Engine(str(model_path)) as engine:
        root = engine.open(seed=3)
        root.append([Text("A baker fills 6 trays with 4 rolls each. She sells 9 rolls and drops 3. How many are left? " * 4)])
        before = engine.stats().result(WAIT)["events"].get("planned_tokens", 0)
        frontier: list[BackendBranch] = [root]
        everything: list[BackendBranch] = [root]
        for level in range(LEVELS):
            children = [child for node in frontier for child in node.fork(WIDTH)]
            everything += children
            for i, child in enumerate(children):
                child.append([Text(f"\nStep {level + 1}, idea {i % WIDTH + 1}:")])
            made = [c.generate(Sampling(max_tokens=16, temperature=0.9, ignore_eos=True, num_top_logprobs=0)) for c in children]
            answers = [future.result(WAIT) for future in made]
            for child, answer in zip(children, answers):
                ids = child.token_ids().result(WAIT)
                num_computed = answer.usage["prompt_tokens"] + max(answer.usage["completion_tokens"] - 1, 0)
                needed.append(ids[:num_computed])
            scored = sorted(range(len(children)), key=lambda i: sum(x or 0.0 for x in answers[i].logprobs.logprobs))  # type: ignore[union-attr]
            frontier = [children[i] for i in scored[-KEEP:]]
        after = engine.stats(check=True).result(WAIT)
        assert after["check"] == "ok"
    computed, distinct = after["events"]["planned_tokens"] - before, distinct_prefixes(needed)
    assert distinct > 400
    assert computed <= 1.01 * distinct, f"{computed} tokens computed, {distinct} distinct ones needed"
