from __future__ import annotations

from anabranch.runtime.bench import radix


def test_chat_like_traces_waste_less_than_four_percent_of_their_slots() -> None:
    assert radix.chat_fragmentation(num_chats=30) < 0.04


def test_the_table_says_which_promise_was_missed() -> None:
    good = dict.fromkeys(radix.PROMISES, 0.01)
    assert "MISSED" not in radix.table(good)
    assert radix.table({**good, "fork_us": 11.0}).count("MISSED") == 1
    assert radix.table({**good, "evict_us_per_page_at_1m": 1.0}).count("MISSED") == 1
