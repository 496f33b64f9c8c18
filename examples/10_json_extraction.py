"""JSON extraction: typed values out of text. The grammar forces the form; what it forces costs no step of the model."""

from dataclasses import dataclass
from typing import Literal

import anabranch as ab

NOTES = [
    "Order 17: Anna from Oslo wants 2 boxes of tea, please send by post.",
    "Order 18: Ben, who lives in Paris, takes 12 cups. He will collect them himself.",
    "Order 19: Carla in Rome asked for 5 spoons, by post.",
]


@dataclass
class Order:
    number: int
    city: Literal["Oslo", "Paris", "Rome"]
    by_post: bool


@ab.function
def extract(s, note):
    s += ab.system("You turn notes into JSON.")
    s += ab.user(f"Note: {note}\nGive number, city and by_post as JSON.")
    s += ab.assistant(ab.gen("order", type=Order, max_tokens=64, temperature=0))


states = extract.run_batch([[note] for note in NOTES])
for note, state in zip(NOTES, states):
    print(note, "\n   ", state["order"])
usage = ab.Usage.of(states)
print(f"{usage.completion_tokens} tokens, {usage.forced_tokens} of them forced by the grammar")
print(usage)

assert all(isinstance(state["order"], Order) and isinstance(state["order"].by_post, bool) for state in states)
