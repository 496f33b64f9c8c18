"""The fewest steps that can do each workload: `plan(scale, figures of a run) -> steps`. See `floor.py` for what a step costs.

Only text of the lengths that the workload names is counted: separators, and a token more or less at a cut, are left out, which makes the floor
lower, never higher. Where the floor of a rate or of one token is wanted, `headline_floor` divides.
"""

from collections.abc import Mapping

from anabranch.runtime.bench import floor
from anabranch.runtime.bench.floor import Step, decode

Figures = Mapping[str, float]


def latency(scale: float, _: Figures) -> list[Step]:
    """The decode steps alone: the figure is the time per output token after the first."""
    return [decode(1, _at_least(128 * scale) - 1, own=_at_least(128 * scale))]


def prefill(scale: float, _: Figures) -> list[Step]:
    return [floor.prefill(1, _at_least(2048 * scale))]


def throughput(scale: float, _: Figures) -> list[Step]:
    prompt, output = _at_least(256 * scale), _at_least(128 * scale)
    return [floor.prefill(16, prompt), decode(16, output - 1, own=prompt)]


def prefix(scale: float, _: Figures) -> list[Step]:
    """The shared text once; then four rounds of eight requests."""
    shared, own = _at_least(1024 * scale), _at_least(32 * scale)
    rounds = [floor.prefill(8, own, shared=shared), decode(8, 15, shared=shared, own=own)]
    return [floor.prefill(1, shared), *(4 * rounds)]


def chat(scale: float, _: Figures) -> list[Step]:
    """Of the turns before, all is cached but the last token of the answer."""
    said, answered = _at_least(64 * scale), 32
    plan: list[Step] = []
    for turn in range(4):
        before = turn * (said + answered)
        new = said + (1 if turn else 0)
        plan += [floor.prefill(8, new, own=max(before - 1, 0)), decode(8, answered - 1, own=before + said)]
    return plan


def tree(scale: float, _: Figures) -> list[Step]:
    """The root once; its prefix is read once a step for all rows. What children of one node share below the root is read by each."""
    root = _at_least(512 * scale)
    plan = [floor.prefill(1, root)]
    for depth in range(3):
        rows = 4 if depth == 0 else 16
        plan.append(decode(rows, 31, shared=root, own=32 * depth))
    return plan


def json(scale: float, figures: Figures) -> list[Step]:
    """As many steps as the longest record took, with the rows that the records had on average; forced tokens ride along."""
    prompt, tokens = _at_least(64 * scale), figures["output_tokens"]
    row_steps = figures.get("steps_per_output_token", 1.0) * tokens
    steps = max(int(figures.get("most_steps", tokens / 16)) - 1, 1)
    rows, new = row_steps / (steps + 1), tokens / (steps + 1)
    context = prompt + tokens / 32  # of a record half done
    return [floor.prefill(16, prompt), Step(new, rows, rows * context, new * context, steps)]


def select(scale: float, _: Figures) -> list[Step]:
    """One token for each of 32 choices behind a cached prefix: what the choices have in common is computed once, the rest is more than that."""
    return [floor.prefill(32, 1, shared=_at_least(256 * scale))]


def headline_floor(headline: str, plan: list[Step], total_s: float, figures: Figures) -> float:
    """The floor in the unit of a workload's headline, from the seconds of its plan and the figures of a run."""
    if headline == "tpot_ms":
        return 1000 * total_s / sum(step.times for step in plan)
    if headline.endswith("_ms"):
        return 1000 * total_s
    if headline == "prefill_tok_s":
        return sum(step.new_tokens * step.times for step in plan) / total_s
    if headline == "output_tok_s":
        return figures["output_tokens"] / total_s
    assert headline == "total_s", f"no floor is defined for {headline}"
    return total_s


def _at_least(tokens: float) -> int:
    return max(int(tokens), 1)
