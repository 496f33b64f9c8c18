"""Open loop: nothing waits for answers, and times count from when a request was due."""

import threading

import pytest
from support.bench import ByteVocabulary, FakeTarget

from anabranch.runtime.bench import serve
from anabranch.runtime.bench.arrivals import BLOCK_TOKENS, Arrival
from anabranch.runtime.bench.targets import Reply
from anabranch.runtime.bench.texts import Texts


def texts() -> Texts:
    return Texts(ByteVocabulary(), "test")  # type: ignore[arg-type]


def test_every_request_is_sent_before_the_first_answer_comes() -> None:
    target = FakeTarget(is_held=True)
    arrivals = [Arrival(0.0, 20 + i, 4) for i in range(12)]
    done: list[list[serve.Answered]] = []
    worker = threading.Thread(target=lambda: done.append(serve.open_loop(target, texts(), arrivals)))
    worker.start()
    while len(target.prompts) < 12:
        worker.join(0.001)
        assert worker.is_alive(), "it ended although nothing was answered"
    target.release()
    worker.join(10)
    assert len(done[0]) == 12 and target.open_nodes == 0
    assert [len(p) for p in target.prompts] == [20 + i for i in range(12)]


def test_requests_wait_for_their_time_and_a_late_client_counts_against_the_latency() -> None:
    waited: list[float] = []
    arrivals = [Arrival(50.0, 8, 2), Arrival(75.0, 8, 2)]
    answered = serve.open_loop(FakeTarget(), texts(), arrivals, sleep=waited.append)
    assert [round(w) for w in waited] == [50, 75]
    assert answered[1].due - answered[0].due == pytest.approx(25.0)
    late = serve.Answered(Arrival(0, 8, 2), due=10.0, sent=13.0, reply=Reply("ab", 8, 2, 0, 0.5, (0.25, 0.5), asked=13.0))
    assert late.ttft == pytest.approx(3.25) and late.end == pytest.approx(13.5)


def answered(at: float, total: float, *, late: float = 0.0) -> serve.Answered:
    reply = Reply("abc", 10, 3, 0, total, (total / 2, 0.75 * total, total), asked=at + late, queue_s=0.25)
    return serve.Answered(Arrival(at, 10, 3), at, at + late, reply)


def test_figures_are_those_of_a_stream_done_by_hand() -> None:
    figures = serve.figures_of([answered(0, 2), answered(1, 4), answered(2, 1, late=0.5)])
    assert figures["offered_per_s"] == pytest.approx(1.0) and figures["achieved_per_s"] == pytest.approx(2 / 3)
    assert figures["ttft_p50_ms"] == pytest.approx(1000.0) and figures["ttft_p99_ms"] == pytest.approx(2000.0)
    assert figures["lag_p99_ms"] == pytest.approx(500.0) and figures["queue_p50_ms"] == pytest.approx(250.0)
    assert figures["tpot_p90_ms"] == pytest.approx(1000.0) and figures["itl_p50_ms"] == pytest.approx(500.0)
    assert figures["in_flight_max"] == 2 and figures["in_flight_mean"] == pytest.approx((2 + 4 + 1.5) / 5)
    assert figures["output_tok_s"] == pytest.approx(9 / 5)


def test_a_closed_loop_has_no_more_in_flight_than_it_may() -> None:
    target = FakeTarget(is_held=True)
    worker = threading.Thread(target=lambda: serve.closed_loop(target, texts(), [Arrival(0.0, 10, 2)] * 6, 2))
    worker.start()
    while worker.is_alive():
        worker.join(0.002)
        assert len(target._held) <= 2
        target.release()
    assert len(target.prompts) == 6


def test_equal_blocks_of_a_trace_become_equal_text_at_the_front() -> None:
    maker = serve.Prompts(texts())
    long = 2 * BLOCK_TOKENS + 40
    a, b, c = (maker.text(Arrival(0, long, 1, blocks)) for blocks in ((1, 2, 3), (1, 2, 4), (5, 2, 3)))
    assert len(a.encode()) == len(b.encode()) == len(c.encode()) == long
    cuts = (slice(0, BLOCK_TOKENS), slice(BLOCK_TOKENS, 2 * BLOCK_TOKENS), slice(2 * BLOCK_TOKENS, None))
    parts = [[text.encode()[cut] for cut in cuts] for text in (a, b, c)]
    assert parts[0][:2] == parts[1][:2] and parts[0][2] != parts[1][2]
    assert parts[0][0] != parts[2][0] and parts[0][1] == parts[2][1]


def test_the_most_that_overlap_touch_no_ends() -> None:
    assert serve.most_at_once([(0, 1), (1, 2), (1.5, 3), (1.75, 1.8)]) == 3
