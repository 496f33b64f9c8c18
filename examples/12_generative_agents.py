"""Generative agents: a small town, where each agent has a memory of its own and all share the description of their
world.

An async program: agents act side by side within a day, and nobody waits for anybody else's thread.
"""

import asyncio

import anabranch as ab

WORLD = (
    "This is the diary of a small town by the river. There are a mill, a market, a school and an old stone bridge. "
    "Everybody knows everybody. Each entry is one short sentence about what somebody did, and with whom.\n"
)
AGENTS = {"Ada": "the miller", "Ben": "the teacher", "Carla": "the baker"}
DAYS = 3


@ab.function
async def town(s):
    s += WORLD
    minds = s.fork(len(AGENTS))
    for mind, (name, role) in zip(minds, AGENTS.items()):
        mind += f"{name} is {role}.\n"

    async def act(mind, name, day):
        mind += f"Day {day}: {name}"
        return name + await mind.gen("deed", max_tokens=16, stop=["\n", "."], temperature=0.9)

    news = []
    for day in range(1, DAYS + 1):
        deeds = await asyncio.gather(*(act(mind, name, day) for mind, name in zip(minds, AGENTS)))
        for i, mind in enumerate(minds):  # everybody hears what the others did
            mind += ".\n" + "".join(f"Heard: {deed}.\n" for j, deed in enumerate(deeds) if j != i)
        news += deeds
    s["news"] = news


state = asyncio.run(town.arun(seed=9))
print("\n".join(state["news"]))
print(state.usage())

assert len(state["news"]) == len(AGENTS) * DAYS
assert state.usage().hit_rate > 0.6  # the world is shared, and each memory grows in place
