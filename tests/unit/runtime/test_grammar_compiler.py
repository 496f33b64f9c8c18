import json
import os
import signal
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest

from anabranch.runtime.grammar_compiler import GrammarCompiler
from anabranch.runtime.grammars import GrammarError
from anabranch.runtime.messages import Grammar


def bomb(size: int = 40) -> Grammar:
    """An intersection of automata: exponential in `size`."""
    return Grammar(
        "json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{i + 5}}}b"} for i in range(size)]})
    )


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(cpu_limit_s=0.3)
    yield made
    made.close()


def refused(compiler: GrammarCompiler, grammar: Grammar) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        compiler.check(grammar)
    return caught.value


def test_good_grammars_pass_and_bad_ones_are_refused_with_path(compiler: GrammarCompiler) -> None:
    compiler.check(Grammar("regex", "a+"))
    compiler.check(Grammar("choices", '["a", "b"]'))
    fault = refused(compiler, Grammar("json_schema", '{"items": {"uniqueItems": true}}'))
    assert fault.path == "#/items" and "uniqueItems" in fault.message and fault.message.count("(at ") == 1
    assert "unclosed group" in refused(compiler, Grammar("regex", "(")).message


def test_a_compile_bomb_is_stopped_and_the_work_really_ends(compiler: GrammarCompiler) -> None:
    compiler.check(Grammar("regex", "a"))
    pid = compiler.child_pid
    assert pid is not None
    assert "takes more than 0.3 s" in refused(compiler, bomb()).message
    assert not psutil.pid_exists(pid)
    compiler.check(Grammar("regex", "b"))  # a new child goes on
    assert compiler.child_pid not in (None, pid)


def test_a_verdict_is_given_once(compiler: GrammarCompiler) -> None:
    refused(compiler, bomb())
    assert compiler.child_pid is None
    assert "takes more than" in refused(compiler, bomb()).message
    assert compiler.child_pid is None  # nobody was asked


def test_several_threads_may_ask_at_once(compiler: GrammarCompiler) -> None:
    problems: list[str] = []

    def ask(i: int) -> None:
        try:
            compiler.check(Grammar("regex", f"a{{{i}}}" if i % 2 else "("))
        except GrammarError as fault:
            problems.append(fault.message)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(problems) == 6


def test_a_child_that_is_killed_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.check(Grammar("regex", "a"))
    assert compiler.child_pid is not None
    os.kill(compiler.child_pid, signal.SIGKILL)
    psutil.Process(compiler.child_pid).wait(10)
    refused(compiler, Grammar("regex", "b"))
    compiler.check(Grammar("regex", "c"))


def test_huge_and_hostile_sources_never_reach_the_child(compiler: GrammarCompiler) -> None:
    assert "bytes" in refused(compiler, Grammar("regex", "a" * 300_000)).message
    assert "surrogate" in refused(compiler, Grammar("regex", "\ud800")).message
    assert compiler.child_pid is None


def test_nested_alternatives_are_compiled_or_refused_in_time(compiler: GrammarCompiler) -> None:
    def nested(depth: int) -> dict:
        return (
            {"type": "integer"}
            if depth == 0
            else {
                "oneOf": [
                    nested(depth - 1),
                    {"type": "object", "properties": {"a": nested(depth - 1)}, "required": ["a"]},
                ]
            }
        )

    for depth in (4, 8, 10):
        fault = refused(compiler, Grammar("json_schema", json.dumps(nested(depth))))
        assert "oneOf" in fault.message or "bytes" in fault.message


def test_closing_ends_the_child_and_may_be_repeated() -> None:
    compiler = GrammarCompiler()
    compiler.check(Grammar("regex", "a"))
    pid = compiler.child_pid
    assert pid is not None and psutil.pid_exists(pid)
    compiler.close()
    compiler.close()
    assert not psutil.pid_exists(pid)


def test_the_child_ends_when_its_parent_lets_go_of_it() -> None:
    compiler = GrammarCompiler()
    compiler.check(Grammar("regex", "a"))
    child = compiler._child
    assert child is not None and child.stdin is not None and child.stdout is not None
    child.stdin.close()
    assert child.wait(10) == 0
    child.stdout.close()
    compiler._child = None


def test_memory_is_bounded(compiler: GrammarCompiler) -> None:
    limits: Callable[[int], tuple[int, int]] = psutil.Process(_started(compiler)).rlimit
    assert limits(psutil.RLIMIT_AS) == (1 << 30, 1 << 30)


def _started(compiler: GrammarCompiler) -> int:
    compiler.check(Grammar("regex", "a"))
    assert compiler.child_pid is not None
    return compiler.child_pid
