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
    s += ab.system("You turn notes about orders into JSON.")
    s += ab.user("Note: Order 16: Eva in Paris wants 4 plates. Send them by post.")
    s += ab.assistant('{"number": 16, "city": "Paris", "by_post": true}')
    s += ab.user("Note: Order 15: Tom from Rome takes 7 forks. He comes and gets them.")
    s += ab.assistant('{"number": 15, "city": "Rome", "by_post": false}')
    s += ab.user(f"Note: {note}") + ab.assistant(ab.gen("order", type=Order, max_tokens=64, temperature=0))


states = extract.run_batch([[note] for note in NOTES])
for note, state in zip(NOTES, states):
    print(note, "\n   ", state["order"])
usage = ab.Usage.of(states)
print(f"{usage.completion_tokens} tokens, {usage.forced_tokens} of them forced by the grammar")
print(usage)

assert all(isinstance(state["order"], Order) and isinstance(state["order"].by_post, bool) for state in states)
