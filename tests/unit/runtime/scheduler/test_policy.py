from anabranch.radix.manager import KVManager
from anabranch.runtime.messages import SamplingParams
from anabranch.runtime.scheduler.branches import BranchRecord
from anabranch.runtime.scheduler.policy import Policy, Program, WaitingLine, choose_victim
from anabranch.runtime.scheduler.requests import Request


class Bench:
    """A line over a small cache, and requests to put into it."""

    def __init__(self, **policy: int) -> None:
        self.manager = KVManager(64, 4)
        self.line = WaitingLine(Policy(**policy))  # type: ignore[arg-type]
        self.programs: dict[int, Program] = {}
        self.num = 0

    def request(self, tokens: list[int], *, program: int = 0, priority: int = 0, family: int | None = None) -> Request:
        self.num += 1
        owner = self.programs.setdefault(program, Program(program))
        kv = self.manager.open(b"n")
        self.manager.append(kv, tokens)
        record = BranchRecord(self.num, owner, b"n", 0, priority, self.num if family is None else family, kv)
        return Request(
            request_id=self.num, branch=record, seq=self.num, arrival=0.0, params=SamplingParams(), start_len=0,
            prompt_len=len(tokens), limit=len(tokens) + 4,
        )  # fmt: skip

    def add(self, tokens: list[int], **fields: int) -> Request:
        request = self.request(tokens, **fields)  # type: ignore[arg-type]
        self.line.add(request)
        return request

    def cache(self, tokens: list[int]) -> None:
        kv = self.manager.open(b"n")
        self.manager.append(kv, [*tokens, 0])
        self.manager.attach(kv)
        assert self.manager.reserve(kv, len(tokens)) is not None
        self.manager.commit(kv, len(tokens))
        self.manager.release(kv)

    def order(self) -> list[int]:
        return [request.request_id for request in self.line.ordered(self.manager)]


def test_longest_cached_prefix_first_then_arrival() -> None:
    bench = Bench()
    bench.cache([1, 2, 3, 4, 5, 6])
    for tokens in ([9, 9], [1, 2, 3, 9], [1, 2, 3, 4, 5, 9], [8, 8]):
        bench.add(tokens)
    assert bench.order() == [3, 2, 1, 4]


def test_the_order_follows_the_cache() -> None:
    bench = Bench()
    bench.add([1, 2, 3, 9])
    bench.add([5, 6, 7, 9])
    assert bench.order() == [1, 2]
    bench.cache([5, 6, 7])
    assert bench.order() == [2, 1]


def test_priority_comes_before_everything() -> None:
    bench = Bench()
    bench.cache([1, 2, 3, 4])
    bench.add([1, 2, 3, 4, 5])
    bench.add([9], priority=1)
    assert bench.order() == [2, 1]


def test_a_program_that_was_given_less_comes_first() -> None:
    bench = Bench(fair_quantum=10)
    bench.add([1], program=1)
    bench.add([2], program=2)
    bench.line.charge(bench.programs[1], 25)
    assert bench.order() == [2, 1]
    bench.line.charge(bench.programs[2], 40)
    assert bench.order() == [1, 2]


def test_a_program_that_was_idle_has_saved_nothing_up() -> None:
    bench = Bench(fair_quantum=10)
    bench.add([1], program=1)
    for _ in range(10):
        bench.line.charge(bench.programs[1], 50)
    bench.add([2], program=2)
    assert bench.programs[2].served >= 450


def test_siblings_stand_together() -> None:
    bench = Bench()
    for tokens, family in (([1], 7), ([2], 8), ([3], 7), ([4], 8)):
        bench.add(tokens, family=family)
    assert bench.order() == [1, 3, 2, 4]


def test_only_the_oldest_of_a_long_line_are_compared() -> None:
    bench = Bench(window=3)
    bench.cache([5, 5, 5])
    for i in range(5):
        bench.add([i])
    hot = bench.add([5, 5, 5, 5])
    assert bench.order() == [1, 2, 3]
    for request in list(bench.line)[:3]:
        bench.line.remove(request)
    assert bench.order()[0] == hot.request_id


def test_nothing_is_looked_up_again_while_line_and_tree_stay_the_same() -> None:
    bench = Bench()
    for i in range(50):
        bench.add([i])
    first = bench.line.ordered(bench.manager)
    assert bench.line.ordered(bench.manager) is first
    bench.cache([1, 2, 3])
    assert bench.line.ordered(bench.manager) is not first


def test_the_oldest_is_found_whatever_left_before() -> None:
    bench = Bench()
    requests = [bench.add([i]) for i in range(300)]
    for request in requests[:200]:
        bench.line.remove(request)
    assert bench.line.oldest() is requests[200]
    bench.line.add(requests[3])  # it was preempted and comes back
    assert bench.line.oldest() is requests[3]
    for request in bench.line:
        bench.line.remove(request)
    assert bench.line.oldest() is None and not len(bench.line)


def test_the_victim_is_the_youngest_of_the_lowest_priority() -> None:
    bench = Bench()
    old, young, important = bench.request([1]), bench.request([2]), bench.request([3], priority=2)
    assert choose_victim([old, young, important], important, 3) is young
    assert choose_victim([old, young], young, 3) is young, "also if it is the one that asks"


def test_the_most_senior_is_never_the_victim_and_alone_nobody_is() -> None:
    bench = Bench()
    old, young = bench.request([1]), bench.request([2])
    assert choose_victim([old, young], young, 3) is not old
    assert choose_victim([old], old, 3) is None


def test_a_request_preempted_often_enough_is_spared_while_there_is_a_choice() -> None:
    bench = Bench()
    requests = [bench.request([i]) for i in range(3)]
    requests[2].num_preemptions = 3
    assert choose_victim(requests, requests[0], 3) is requests[1]
    requests[1].num_preemptions = 3
    assert choose_victim(requests, requests[0], 3) is requests[2]
