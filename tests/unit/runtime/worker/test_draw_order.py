"""Columns of a sampling batch go to the rows of logits that they are meant for, in whatever order the draws come."""

import numpy as np

from anabranch.runtime.messages import SamplingParams, SlotStart
from anabranch.runtime.worker.sampling import Draws, Edits, _batch
from anabranch.runtime.worker.slots import Slots


def test_draws_out_of_order_keep_their_own_seed_and_temperature() -> None:
    """Siblings that share a host's logits are listed by slot, while their hosts lie in any order."""
    slots = Slots(4)
    for slot, temperature in enumerate((0.25, 0.5, 0.75, 1.0)):
        slots.start(SlotStart(slot, SamplingParams(temperature=temperature, seed=slot + 10), path=slot, prompt_len=3), None)
    draws = Draws(np.array([0, 1, 2], np.int32), np.array([2, 0, 1], np.int32), np.array([3, 4, 5], np.int32))
    batch = _batch(slots, draws, Edits(3, 16), 3, 0)
    assert batch.temperature.tolist() == [0.5, 0.75, 0.25]
    assert batch.seeds.tolist() == [11, 12, 10] and batch.positions.tolist() == [4, 5, 3]
