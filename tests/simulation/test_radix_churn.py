"""Long random lives of many branches over a small pool, with steps in flight. A failure names its seed."""

from __future__ import annotations

import random

import pytest
from support.oracle import World

NAMESPACES = (b"", b"tenant-a")


def act(world: World, rng: random.Random) -> str:
    """One random thing that a scheduler or a worker may do; returns its name."""
    idle = [branch for branch in world.branches if not branch.attached]
    attached = [branch for branch in world.branches if branch.attached]
    choices = ["open"] * (len(world.branches) < 12) + ["pass_time", "settle"] + ["flush"] * (rng.random() < 0.05)
    if world.branches:
        choices += (
            ["append"] * 2 + ["echo"] * 2 + ["fork"] * (len(world.branches) < 12) + ["rollback", "release", "adopt"]
        )
    if idle:
        choices += ["attach"] * 4 + ["lease"]
    if attached:
        choices += ["plan"] * 8 + ["publish"] * 2 + ["trim", "detach"]
    if world.flight:
        choices += ["run"] * 8
    action = rng.choice(choices)
    any_branch = rng.choice(world.branches) if world.branches else None
    match action:
        case "open":
            world.append(world.open(rng.choice(NAMESPACES)), tokens(rng, 24))
        case "append":
            if len(any_branch) < 80:
                world.append(any_branch, tokens(rng, 6))
        case "echo":
            world.echo(any_branch, rng.randint(1, 5))
        case "fork":
            world.fork(any_branch, rng.randint(1, 3))
        case "rollback":
            world.rollback(any_branch, rng.randint(0, len(any_branch)), superseded=rng.random() < 0.5)
        case "release":
            world.release(any_branch, superseded=rng.random() < 0.5)
        case "adopt":
            others = [b for b in world.branches if b.namespace == any_branch.namespace and b is not any_branch]
            if others:
                world.adopt(any_branch, rng.choice(others))
        case "attach":
            world.attach(rng.choice(idle))
        case "lease":
            world.lease(rng.choice(idle), rng.choice([None, 1.0, 5.0]))
        case "plan":
            branch = rng.choice(attached)
            planned = world.planned[branch]
            upto = min(planned + rng.randint(1, 8), len(branch) + 1)
            if upto > planned:
                world.plan(branch, upto, settle=rng.random() < 0.7)
        case "publish":
            world.publish(rng.choice(attached))
        case "trim":
            world.trim(rng.choice(attached))
        case "detach":
            world.detach(rng.choice(attached))
        case "run":
            world.run(rng.randrange(40))
        case "settle":
            world.manager.settle()
        case "pass_time":
            world.pass_time(rng.choice([0.0, 0.5, 2.0]))
        case "flush":
            world.flush()
    return action


def tokens(rng: random.Random, longest: int) -> list[int]:
    return [rng.randrange(3) if rng.random() < 0.3 else 1 for _ in range(rng.randint(0, longest))]


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]


@pytest.mark.parametrize("policy", ["lru", "cost"])
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_leaked_or_overwritten_in_a_long_life(seed: int, page_size: int, policy: str) -> None:
    rng = random.Random(f"{seed}/{page_size}/{policy}")
    world = World(rng.choice([8, 16, 40]), page_size, policy, lease_share=rng.choice([0.25, 0.5]))
    trace: list[str] = []
    try:
        for _ in range(1500):
            trace.append(act(world, rng))
            world.check()
        world.finish()
    except AssertionError as error:
        last = ", ".join(trace[-12:])
        raise AssertionError(
            f"seed {seed}, page size {page_size}, policy {policy}, step {len(trace)} ({last})\n{error}"
        ) from error
