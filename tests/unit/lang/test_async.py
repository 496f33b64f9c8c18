"""Async programs: awaiting, gathering, cancelling and timeouts that reach the runtime, and no thread for any of it."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from anabranch.lang import api as ab
from anabranch.lang.testing import Gate, Prompt, Reply, ScriptedBackend


def gated(gate: Gate, text: str = "x") -> ScriptedBackend:
    return ScriptedBackend(lambda prompt: Reply(gate, text))


def waiting(backend: ScriptedBackend) -> int:
    return int(backend.stats().result(10)["waiting_ops"])


def test_cancelling_the_task_that_awaits_a_gen_ends_the_gen_in_the_runtime() -> None:
    backend = gated(Gate())

    async def main() -> None:
        s = ab.state(backend=backend)

        async def read() -> Any:
            return await s.gen("x")

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ab.Cancelled):
            s["x"]

    asyncio.run(main())
    assert waiting(backend) == 0


def test_cancelling_a_wait_for_a_variable_leaves_its_generation_alone() -> None:
    gate = Gate()

    async def main() -> None:
        s = ab.state(backend=gated(gate))
        s += ab.gen("x")

        async def read() -> Any:
            return await s.value("x")

        first, second = asyncio.create_task(read()), asyncio.create_task(read())
        await asyncio.sleep(0)
        first.cancel()
        gate.open()
        assert await second == "x"

    asyncio.run(main())


def test_a_timeout_around_an_await_reaches_the_runtime() -> None:
    backend = gated(Gate())

    async def main() -> None:
        s = ab.state(backend=backend)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await s.gen("x")

    asyncio.run(main())
    assert waiting(backend) == 0


def test_cancelling_a_program_releases_all_its_branches() -> None:
    backend = gated(Gate())

    @ab.function
    async def program(s: Any) -> None:
        s += "Go"
        await asyncio.gather(*(b.gen("x") for b in s.fork(20)))

    async def main() -> None:
        task = asyncio.create_task(program.arun(backend=backend))
        while waiting(backend) < 20:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()
    assert waiting(backend) == 0 and backend.open_branches() == 0


def test_a_program_with_a_timeout_raises_and_releases_its_branches() -> None:
    backend = gated(Gate())

    @ab.function
    async def program(s: Any) -> None:
        await s.gen("x")

    with pytest.raises(TimeoutError, match=r"program did not finish within 0\.05 s|ran past its timeout"):
        asyncio.run(program.arun(backend=backend, timeout=0.05))
    gc.collect()
    assert backend.open_branches() == 0


def test_a_thousand_branches_are_gathered_without_a_thread_more() -> None:
    gate = Gate()
    backend = gated(gate)

    @ab.function
    async def program(s: Any) -> Any:
        s += "Root"
        before = threading.active_count()
        group = s.fork(1000)

        async def one(b: Any) -> Any:
            return await b.gen("x")

        tasks = [asyncio.create_task(one(b)) for b in group]
        while waiting(backend) < 1000:
            await asyncio.sleep(0)
        during = threading.active_count()
        gate.open()
        values = await asyncio.gather(*tasks)
        await group.ajoin()
        return values, before, during

    state = asyncio.run(program.arun(backend=backend))
    values, before, during = state.ret_value
    assert values == ["x"] * 1000 and during <= before + 1 and state["x"] == values


def test_a_read_that_would_block_the_loop_is_refused_and_says_how(backend: ScriptedBackend) -> None:
    gate = Gate()

    @ab.function
    async def program(s: Any) -> Any:
        s += ab.gen("x")
        for read in (
            lambda: s["x"],
            lambda: s.text(),
            lambda: s.sync(),
            lambda: s.logprob("x"),
            lambda: s.get_meta_info("x"),
        ):
            with pytest.raises(ab.WouldBlock, match=r"await s\.value\(name\)"):
                read()
        gate.open()
        await s
        return s["x"]

    assert program.run(backend=gated(gate)).ret_value == "x"


def test_errors_of_gathered_branches_come_as_a_group_and_the_rest_is_kept() -> None:
    backend = ScriptedBackend(lambda p: ValueError("no") if p.path == (1,) else "yes")

    @ab.function
    async def program(s: Any) -> Any:
        group = s.fork(3)
        group += ab.gen("x")
        with pytest.raises(ab.BranchErrors) as caught:
            await group.ajoin()
        return caught.value.branches, s["x"]

    assert program.run(backend=backend).ret_value == ((1,), ["yes", None, "yes"])


def test_async_work_mapped_over_branches_fails_only_where_it_fails(backend: ScriptedBackend) -> None:
    @ab.function
    async def program(s: Any) -> Any:
        async def work(b: Any) -> Any:
            if b.index == 1:
                raise KeyError("one")
            return await b.gen("x", max_tokens=2)

        group = s.fork(3)
        values = await group.map(work)
        with pytest.raises(ab.BranchErrors, match="branch 1"):
            await group.ajoin()
        return values

    values = program.run().ret_value
    assert values[1] is None and values[0] and values[2]


def test_streams_can_be_read_while_they_arrive() -> None:
    gate = Gate()
    backend = ScriptedBackend(lambda p: Reply("one ", gate, "two"))

    async def main() -> list[str]:
        s = ab.state(backend=backend)
        seen = []
        async for piece in s.stream(ab.gen("x")):
            seen.append(piece)
            gate.open()
        assert s["x"] == "one two"
        return seen

    assert asyncio.run(main()) == ["one ", "two"]


def test_streaming_with_metadata_ends_with_the_whole_of_it(backend: ScriptedBackend) -> None:
    @ab.function
    def program(s: Any) -> None:
        s += "Hi" + ab.gen("x", max_tokens=4)

    async def main() -> Any:
        state = program.run(stream=True)
        return [pair async for pair in state.text_async_iter("x", return_meta_data=True)], state

    pairs, state = asyncio.run(main())
    assert "".join(text for text, _ in pairs) == state["x"] and pairs[-1][1]["finish_reason"]["type"] in (
        "stop",
        "length",
    )


def test_an_async_function_called_on_a_state_runs_inline_and_otherwise_as_a_program(backend: ScriptedBackend) -> None:
    @ab.function
    async def inner(s: Any, what: str) -> str:
        s += what
        await s.gen("x", max_tokens=2)
        return what.upper()

    @ab.function
    async def outer(s: Any) -> Any:
        said = await inner(s, "inline ")
        other = await inner("apart ")
        return said, other.text()

    state = outer.run(seed=1)
    assert (
        state.ret_value[0] == "INLINE "
        and state.text().startswith("inline ")
        and state.ret_value[1].startswith("apart ")
    )


def test_a_sync_program_can_be_awaited_while_the_loop_goes_on() -> None:
    gate = Gate()
    backend = gated(gate)

    @ab.function
    def program(s: Any) -> None:
        s += ab.gen("x")
        s["x"]

    async def main() -> Any:
        task = asyncio.create_task(program.arun(backend=backend))
        while waiting(backend) == 0:
            await asyncio.sleep(0)
        gate.open()
        return (await task)["x"]

    assert asyncio.run(main()) == "x"


def test_a_batch_of_async_programs_runs_in_one_thread_with_bounded_concurrency() -> None:
    running: list[int] = []
    most: list[int] = []

    @ab.function
    async def program(s: Any, i: int) -> None:
        running.append(i)
        most.append(len(running))
        s += f"{i}:"
        await s.gen("x")
        running.remove(i)

    backend = ScriptedBackend(lambda p: p.text)
    before = threading.active_count()
    states = program.run_batch([{"i": i} for i in range(40)], num_threads=4, backend=backend)
    assert [s["x"] for s in states] == [f"{i}:" for i in range(40)] and max(most) <= 4
    assert threading.active_count() <= before + 1


def test_closing_a_lazy_batch_of_async_programs_cancels_the_rest() -> None:
    backend = ScriptedBackend(lambda p: "x" if p.text == "0" else Reply(Gate()))

    @ab.function
    async def program(s: Any, i: int) -> None:
        s += str(i)
        await s.gen("x")

    results = program.run_batch([[i] for i in range(30)], num_threads=3, generator_style=True, backend=backend)
    assert next(results)["x"] == "x"
    results.close()
    gc.collect()
    assert backend.open_branches() == 0 and waiting(backend) == 0


def test_the_branch_of_a_dropped_state_lives_until_its_awaited_value_is_there() -> None:
    gate = Gate()

    async def main() -> Any:
        backend = gated(gate)
        value = ab.state(backend=backend).gen("x")  # nobody holds the state itself
        gc.collect()
        backend.settle()
        gate.open()
        result = await value
        backend.settle()
        gc.collect()
        assert backend.open_branches() == 0
        return result

    assert asyncio.run(main()) == "x"


def test_a_dropped_state_whose_value_nobody_awaits_ends_its_generation() -> None:
    def script(p: Prompt) -> Any:
        return Reply(Gate())

    backend = ScriptedBackend(script)
    s = ab.state(backend=backend)
    s += "x" + ab.gen("y")
    assert waiting(backend) == 1
    del s
    gc.collect()
    assert backend.open_branches() == 0 and waiting(backend) == 0
