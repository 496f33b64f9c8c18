"""Processes, signals and sockets: death, half-death, orphans, strangers; and a guest who does not hold up its host."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from support.tiny_models import make_tiny_llama

from anabranch.runtime.client import BranchHandle
from anabranch.runtime.config import DebugConfig, EngineConfig, FaultConfig
from anabranch.runtime.engine import Engine
from anabranch.runtime.errors import EngineLost, EngineStartError, RequestError
from anabranch.runtime.messages import GenerateParams, Hello
from anabranch.runtime.transport import encode

WAIT = 60.0
LONG = GenerateParams(max_tokens=900, temperature=0.0, ignore_eos=True)
SHORT = GenerateParams(max_tokens=4, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"backend": "reference", "num_pages": 512, "num_threads": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", seed=5))


@pytest.fixture
def engine(tiny: str) -> Iterator[Engine]:
    with Engine(tiny, mode="processes", **OPTIONS) as engine:
        yield engine


def until(condition: Callable[[], Any], what: str, limit: float = 15.0) -> Any:
    deadline = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(0.02)
    return value


def say(engine: Engine, text: str = "A river that left its bed") -> BranchHandle:
    branch = engine.open(seed=1)
    branch.append([text])
    return branch


def begin(engine: Engine, params: GenerateParams = SHORT) -> Any:
    """A generation under way, which holds its branch: one that nobody holds is released."""
    branch = say(engine)
    future: Any = branch.generate(params)
    future.branch = branch
    return future


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def script(tiny: str, body: str, mode: str) -> str:
    head = f"""
        import os, sys, threading, time
        from anabranch.runtime.engine import Engine
        def start():
            return Engine({tiny!r}, mode={mode!r}, backend="reference", num_pages=512, num_threads=1)
        """
    return textwrap.dedent(head) + textwrap.dedent(body)


def run_script(source: str, *, limit: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=limit, env=environment())


def environment() -> dict[str, str]:
    source = Path(__file__).parents[2] / "src"
    return {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}


# ---------------------------------------------------------------- what is there


def test_three_processes_answer_and_end_with_the_engine(tiny: str) -> None:
    engine = Engine(tiny, mode="processes", **OPTIONS)
    pids = engine.pids()
    assert set(pids) == {"worker", "scheduler", "tokenizer"} and not any(map(is_gone, pids.values()))
    assert begin(engine, SHORT).result(WAIT).finish_reason == "length"
    directory = Path(engine.address.removeprefix("ipc://")).parent
    engine.close()
    engine.close()
    assert all(map(is_gone, pids.values())) and not directory.exists()
    with pytest.raises(EngineLost):
        engine.open()


def test_both_modes_give_the_same_answers(tiny: str, engine: Engine) -> None:
    params = GenerateParams(max_tokens=20, temperature=0.8, ignore_eos=True, num_top_logprobs=2)
    with Engine(tiny, mode="inprocess", **OPTIONS) as embedded:
        ours, theirs = (begin(e, params).result(WAIT) for e in (embedded, engine))
    assert (ours.text, ours.token_ids, ours.logprobs) == (theirs.text, theirs.token_ids, theirs.logprobs)


def test_nothing_listens_but_sockets_in_a_private_directory(engine: Engine) -> None:
    for pid in (os.getpid(), *engine.pids().values()):
        inet = [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert not inet, f"process {pid} listens at {inet}"
    directory = Path(engine.address.removeprefix("ipc://")).parent
    assert directory.stat().st_mode & 0o777 == 0o700


def test_hostile_bytes_on_every_socket_disturb_nobody(engine: Engine, tmp_path: Path) -> None:
    directory = Path(engine.address.removeprefix("ipc://")).parent
    canary = tmp_path / "canary"
    pickled = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    paths = sorted(directory.glob("*.sock"))
    assert len(paths) == 3
    running = begin(engine, LONG)
    context: zmq.Context[Any] = zmq.Context()
    strangers = []
    for path in paths:
        for kind in (zmq.DEALER, zmq.PAIR):
            stranger = context.socket(kind)
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(f"ipc://{path}")
            strangers.append(stranger)
            for frames in ([encode(Hello())], [pickled], [b""], [os.urandom(100)], [b"a", b"b"], [b"x" * (65 << 20)]):
                try:
                    stranger.send_multipart(frames, zmq.NOBLOCK)
                except zmq.Again:
                    break
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(str(path))
            plain.sendall(os.urandom(2000))
    assert running.result(WAIT).finish_reason == "length"
    assert begin(engine, SHORT).result(WAIT) is not None
    assert not canary.exists() and not any(map(is_gone, engine.pids().values()))
    for stranger in strangers:
        stranger.close()
    context.destroy(linger=0)


def test_four_engines_come_up_at_once_and_answer_each_with_its_own_model(tmp_path: Path) -> None:
    models = [str(make_tiny_llama(tmp_path / f"m{i}", seed=i)) for i in range(4)]
    engines: list[Engine] = [None] * 4  # type: ignore[list-item]

    def start(i: int) -> None:
        engines[i] = Engine(models[i], mode=("processes", "inprocess")[i % 2], **OPTIONS)  # type: ignore[arg-type]

    threads = [threading.Thread(target=start, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [begin(engine, GenerateParams(max_tokens=12, temperature=0.0, ignore_eos=True)) for engine in engines]
    assert len({answer.result(WAIT).token_ids for answer in answers}) == 4
    for engine in engines:
        engine.close()


# ---------------------------------------------------------------- death


@pytest.mark.parametrize("stage", ["worker", "scheduler", "tokenizer"])
def test_when_a_process_is_killed_everything_open_fails_with_the_cause_and_the_others_end(engine: Engine, stage: str) -> None:
    pids = engine.pids()
    open_ones = [begin(engine, LONG) for _ in range(3)]
    queued = say(engine)
    waiting = [queued.generate(LONG), queued.token_ids()]
    os.kill(pids[stage], signal.SIGKILL)
    for future in (*open_ones, *waiting):
        with pytest.raises(EngineLost, match=f"{stage} process died"):
            future.result(5.0)
    until(lambda: all(map(is_gone, pids.values())), "the other processes end", 5.0)
    with pytest.raises(EngineLost, match=stage):
        engine.open()
    assert engine.is_closed


@pytest.mark.slow
def test_a_process_that_is_stopped_is_found_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.runtime.supervisor.SILENT_S", 3.0)
    future = begin(engine, LONG)
    os.kill(engine.pids()["scheduler"], signal.SIGSTOP)
    with pytest.raises(EngineLost, match="no sign of life"):
        future.result(20.0)
    until(lambda: all(map(is_gone, engine.pids().values())), "a stopped process is ended, too")


@pytest.mark.slow
def test_a_step_that_takes_long_is_work_and_one_without_end_is_a_hang(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.runtime.supervisor.SILENT_S", 3.0)
    slow = EngineConfig(model=tiny, mode="processes", stall_timeout_s=60.0,
                        debug=DebugConfig(faults=FaultConfig(slow_step_s=4.0)))  # fmt: skip
    with Engine.from_config(slow) as engine:
        assert begin(engine, GenerateParams(max_tokens=1)).result(WAIT) is not None
    hung = EngineConfig(model=tiny, mode="processes", stall_timeout_s=2.0,
                        debug=DebugConfig(faults=FaultConfig(slow_step_s=3600.0)))  # fmt: skip
    with Engine.from_config(hung) as engine, pytest.raises(EngineLost, match="in one step for"):
        begin(engine, SHORT).result(WAIT)


@pytest.mark.parametrize("mode", ["inprocess", "processes"])
def test_a_late_message_is_waited_for_and_a_lost_one_costs_its_own_request(tiny: str, mode: str) -> None:
    late = EngineConfig(model=tiny, mode=mode, debug=DebugConfig(faults=FaultConfig(delay=("Submit",), delay_s=0.5)))  # type: ignore[arg-type]
    with Engine.from_config(late) as engine:
        began = time.monotonic()
        begin(engine).result(WAIT)
        assert time.monotonic() - began >= 0.5
    lost = EngineConfig(model=tiny, mode=mode, debug=DebugConfig(faults=FaultConfig(drop=("Submit",), drop_count=1)))  # type: ignore[arg-type]
    with Engine.from_config(lost) as engine:
        first, second = say(engine), say(engine)
        missing = first.generate(SHORT)
        assert second.generate(SHORT).result(WAIT).token_ids
        assert not missing.done()
        first.close()
        with pytest.raises(RequestError):
            missing.result(WAIT)
        assert begin(engine).result(WAIT).token_ids


@pytest.mark.parametrize("mode", ["inprocess", "processes"])
def test_an_exception_in_a_step_ends_every_wait(tiny: str, mode: str) -> None:
    config = EngineConfig(model=tiny, mode=mode, debug=DebugConfig(faults=FaultConfig(raise_at_step=5)))  # type: ignore[arg-type]
    with Engine.from_config(config) as engine:
        futures = [begin(engine, LONG) for _ in range(3)]
        for future in futures:
            with pytest.raises(EngineLost, match="step 5 raises"):
                future.result(WAIT)
        with pytest.raises(EngineLost):
            engine.open()


def test_a_killed_parent_leaves_no_orphans_and_no_sockets(tiny: str) -> None:
    body = """
        engine = start()
        branch = engine.open(); branch.append(["x"])
        futures = [branch.generate() for _ in range(4)]
        print(*engine.pids().values(), engine.address, flush=True)
        time.sleep(60)
        """
    parent = subprocess.Popen([sys.executable, "-c", script(tiny, body, "processes")], stdout=subprocess.PIPE, env=environment())
    assert parent.stdout is not None
    *pids, address = parent.stdout.readline().decode().split()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: all(is_gone(int(pid)) for pid in pids), "children end", 5.0)
    until(lambda: not Path(address.removeprefix("ipc://")).exists(), "the socket is cleared away", 5.0)


@pytest.mark.slow
def test_a_parent_killed_while_the_model_loads_leaves_no_orphans(tiny: str) -> None:
    body = "print('go', flush=True); start()"
    for delay in (0.05, 0.4, 0.8):
        parent = subprocess.Popen([sys.executable, "-c", script(tiny, body, "processes")], stdout=subprocess.PIPE, env=environment())
        assert parent.stdout is not None
        parent.stdout.readline()
        me = psutil.Process(parent.pid)
        until(lambda: me.children(), "the first child is there")  # called at once
        time.sleep(delay)
        children = me.children(recursive=True)
        parent.kill()
        parent.wait()
        parent.stdout.close()
        until(lambda: all(is_gone(child.pid) for child in children), "children end", 5.0)


@pytest.mark.slow
def test_a_client_that_is_killed_gives_everything_back(tiny: str) -> None:
    with Engine(tiny, mode="inprocess", listen=True, **OPTIONS) as engine:
        body = f"""
            engine = Engine.connect({engine.address!r})
            branch = engine.open(); branch.append(["x"])
            held = [branch, *branch.fork(5)]
            from anabranch.runtime.messages import GenerateParams
            futures = [b.generate(GenerateParams(max_tokens=900, ignore_eos=True)) for b in held]
            held[0].token_ids().result()
            print("open", flush=True)
            time.sleep(60)
            """
        client = subprocess.Popen([sys.executable, "-c", script(tiny, body, "inprocess")], stdout=subprocess.PIPE, env=environment())
        assert client.stdout is not None
        client.stdout.readline()
        assert engine.stats().result(WAIT)["branches"] == 6
        client.kill()
        client.wait()
        client.stdout.close()
        stats = until(lambda: (s := engine.stats(check=True).result(WAIT))["branches"] == 0 and s, "branches are released")
        assert stats["requests"] == stats["slots_in_use"] == 0 and stats["check"] == "ok"
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


# ---------------------------------------------------------------- starting


@pytest.mark.parametrize("mode", ["inprocess", "processes"])
def test_a_failed_start_raises_with_the_cause_and_leaves_nothing(tmp_path: Path, tiny: str, mode: Any) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(EngineStartError, match="no model"):
        Engine(str(tmp_path / "missing"), mode=mode)
    broken = make_tiny_llama(tmp_path / "broken", seed=1)
    (broken / "config.json").write_text("{")
    with pytest.raises(EngineStartError, match=r"config\.json"):
        Engine(str(broken), mode=mode)
    with pytest.raises(EngineStartError, match="GiB|bytes|memory"):
        Engine(tiny, mode=mode, num_pages=1 << 27)
    until(lambda: {child.pid for child in psutil.Process().children()} <= before, "no child is left")


def test_a_start_that_takes_too_long_is_ended(tiny: str) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(EngineStartError, match="not ready after"):
        Engine(tiny, mode="processes", start_timeout=0.05)
    until(lambda: {child.pid for child in psutil.Process().children()} <= before, "no child is left")


def test_connecting_to_nobody_is_an_error_at_once(tmp_path: Path) -> None:
    for address in ("", "tcp://127.0.0.1:1", f"ipc://{tmp_path}/nobody.sock"):
        with pytest.raises(Exception, match="no engine listens"):
            Engine.connect(address)
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))  # bound by nobody who answers: its owner is gone when the file is left behind
    with pytest.raises(EngineLost):
        Engine.connect(f"ipc://{dead}")


# ---------------------------------------------------------------- a guest in somebody's process

ENDINGS = {
    "normally": ("", 0),
    "by an exception": ("raise ValueError('mine')", 1),
    "by sys.exit": ("sys.exit(7)", 7),
    "with an engine in a cycle": ("class C: pass\nc = C(); c.me = c; c.engine = engine; del engine", 0),
    "from a thread": (
        "t = threading.Thread(target=lambda: print(start().generate('y', max_tokens=2).finish_reason)); t.start(); t.join()", 0,
    ),
    "while it generates": ("b = engine.open(); b.append(['x']); f = b.generate()", 0),
    "with a waiting thread": (
        "b = engine.open(); b.append(['x'])\n"
        "threading.Thread(target=lambda: b.generate().result(), daemon=True).start(); time.sleep(0.05)", 0,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inprocess", "processes"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_that_never_closes_its_engine_ends_at_once_with_its_own_status(tiny: str, mode: str, ending: str) -> None:
    lines, status = ENDINGS[ending]
    body = "engine = start()\nprint(engine.generate('x', max_tokens=2).finish_reason, flush=True)\n" + lines
    marked = script(tiny, "", mode) + body + "\n"
    process = subprocess.Popen(
        [sys.executable, "-c", marked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().strip() in ("length", "stop")
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 5.0 + (20.0 if ending == "from a thread" else 0.0), "the host was held up"
    assert process.returncode == status, err
    if ending != "with a waiting thread":  # which is told that the engine was closed, and may say so
        assert ("Traceback" in err) == (ending == "by an exception"), err
    until(lambda: all(is_gone(child.pid) for child in children), "children end", 5.0)


@pytest.mark.slow
def test_a_forked_child_is_told_and_its_parent_is_not_harmed(tiny: str) -> None:
    body = """
        engine = start()
        pid = os.fork()
        if pid == 0:
            try:
                engine.generate("x")
            except Exception as fault:
                print(type(fault).__name__, flush=True)
            del engine
            sys.exit(3)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), engine.generate("x", max_tokens=2).finish_reason)
        """
    for mode in ("inprocess", "processes"):
        done = run_script(script(tiny, body, mode))
        assert done.stdout.split() == ["EngineLost", "3", "length"], done.stderr


@pytest.mark.slow
def test_signal_handlers_and_event_loops_of_the_host_are_left_alone(tiny: str) -> None:
    body = """
        import asyncio, signal
        before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
        async def main():
            async with start() as engine:
                texts = await asyncio.gather(*(engine.agenerate("x", max_tokens=3, temperature=0.0) for _ in range(3)))
                pieces = [piece async for piece in engine.astream("x", max_tokens=3, temperature=0.0)]
                assert "".join(pieces) == texts[0].text == texts[2].text
                task = asyncio.create_task(engine.agenerate("x", max_tokens=900, ignore_eos=True))
                await asyncio.sleep(0.05)
                task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    print("cancelled")
                for _ in range(200):
                    stats = await asyncio.wrap_future(engine.stats())
                    if not stats["branches"]:
                        break
                    await asyncio.sleep(0.02)
                print(stats["branches"], stats["requests"])
        asyncio.run(main())
        assert before == {s: signal.getsignal(s) for s in before}
        """
    for mode in ("inprocess", "processes"):
        done = run_script(script(tiny, body, mode))
        assert done.stdout.split() == ["cancelled", "0", "0"], done.stderr


@pytest.mark.slow
def test_an_interrupt_while_waiting_cancels_the_operation_and_the_engine_goes_on(tiny: str) -> None:
    body = """
        import signal
        engine = start()
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            engine.generate("x", max_tokens=900, ignore_eos=True)
        except KeyboardInterrupt:
            print("interrupted")
        for _ in range(200):
            stats = engine.stats().result()
            if not stats["requests"]:
                break
            time.sleep(0.02)
        print(stats["requests"], engine.generate("x", max_tokens=2).finish_reason)
        """
    for mode in ("inprocess", "processes"):
        done = run_script(script(tiny, body, mode))
        assert done.stdout.split() == ["interrupted", "0", "length"], done.stderr


def test_what_a_callback_does_is_its_own_affair(tiny: str) -> None:
    for mode in ("inprocess", "processes"):
        with Engine(tiny, mode=mode, **OPTIONS) as engine:  # type: ignore[arg-type]
            bad, slow = say(engine), say(engine)
            blocked = threading.Event()
            failing = bad.generate(LONG, lambda text: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                failing.result(WAIT)
            waits = slow.generate(SHORT, lambda text: blocked.wait(WAIT) and None)
            stats = engine.stats()
            blocked.set()
            assert waits.result(WAIT) and stats.result(WAIT)
            with pytest.raises(RequestError):
                bad.generate(GenerateParams(max_tokens=-1))
