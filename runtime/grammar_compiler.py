"""Test-compiling grammars that nobody vouches for, in a child process that can be killed.

Native code cannot be interrupted, so whoever admits requests asks a child: it compiles under a limit of CPU time (the kernel kills it, with
SIGPROF) and of memory. A child that dies or does not answer is replaced, and the grammar that did it is refused. The child ends with its
parent: its standard input closes.

What the child accepts compiles in the worker within the same time. Verdicts are kept, so a grammar is compiled here once.
"""

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

import msgspec

import anabranch
from anabranch.runtime.grammars import GrammarError, check_source, validate_grammar
from anabranch.runtime.messages import Grammar

CPU_LIMIT_S = 0.5
MEMORY_LIMIT_BYTES = 1 << 30
VERDICTS = 4096
_WALL_PER_CPU = 20  # how much longer it may take on a busy machine
_START_S = 30.0
_READY = b"ready\n"


class Verdict(msgspec.Struct, frozen=True):
    """`problem` None: accepted."""

    problem: str | None = None
    path: str = ""


class GrammarCompiler:
    """`check` may be called from any thread, one grammar at a time is compiled. `close` it at the end."""

    def __init__(self, *, cpu_limit_s: float = CPU_LIMIT_S, memory_limit_bytes: int = MEMORY_LIMIT_BYTES) -> None:
        self._cpu_limit_s, self._memory_limit_bytes = cpu_limit_s, memory_limit_bytes
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> None:
        """Raises GrammarError if the grammar is wrong, not supported, or takes too long to compile."""
        check_source(grammar)
        key = blake2b(msgspec.json.encode(grammar), digest_size=32).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is None:
                verdict = self._verdicts[key] = self._ask(grammar)
            self._verdicts.move_to_end(key)
            while len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict.problem is not None:
            raise GrammarError(verdict.problem, verdict.path)

    def close(self) -> None:
        """End the child; idempotent."""
        with self._lock:
            self._end_child()

    @property
    def child_pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def _ask(self, grammar: Grammar) -> Verdict:
        child = self._child or self._start_child()
        assert child.stdin is not None
        try:
            child.stdin.write(msgspec.json.encode(grammar) + b"\n")
            child.stdin.flush()
            answer = self._read_line(child, self._cpu_limit_s * _WALL_PER_CPU)
        except BrokenPipeError:
            answer = None
        if answer is not None:
            return msgspec.json.decode(answer, type=Verdict)
        status = self._end_child()
        if status == -signal.SIGPROF or status == -signal.SIGKILL:
            return Verdict(f"compiling the {grammar.kind} takes more than {self._cpu_limit_s:g} s; simplify it")
        return Verdict(f"compiling the {grammar.kind} takes too much memory or fails badly; simplify it")

    def _start_child(self) -> subprocess.Popen[bytes]:
        # Our own location goes first on the child's path: it must run this very code, however we were found.
        root = str(Path(str(anabranch.__file__)).parent.parent)
        code = (
            f"import sys; sys.path.insert(0, {root!r}); from anabranch.runtime.grammar_compiler import serve; "
            f"serve({self._cpu_limit_s!r}, {self._memory_limit_bytes!r})"
        )
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if self._read_line(self._child, _START_S) != _READY:
            status = self._end_child()
            raise RuntimeError(f"the grammar compiler did not start (exit status {status})")
        return self._child

    def _read_line(self, child: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
        """None if the child dies or does not answer in time."""
        assert child.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(child.stdout.fileno(), 65536) if readable else b""
            if not part:
                return None
            line += part
        return line

    def _end_child(self) -> int | None:
        """Kill it, if it has not ended yet, and return its exit status."""
        child, self._child = self._child, None
        if child is None:
            return None
        assert child.stdin is not None and child.stdout is not None
        try:
            status = child.wait(timeout=0.05)  # it may be on its way out: then its own status says why
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(BrokenPipeError):  # what it never read is lost with it
                pipe.close()
        return status


def serve(cpu_limit_s: float, memory_limit_bytes: int) -> None:
    """The child: a grammar a line, a verdict a line, until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for our parent
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write, read = sys.stdout.buffer, sys.stdin.buffer
    validate_grammar(Grammar("choices", '["a"]'))  # what is loaded on first use is no client's cost
    write.write(_READY)
    write.flush()
    for line in read:
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        verdict = judge(msgspec.json.decode(line, type=Grammar))
        signal.setitimer(signal.ITIMER_PROF, 0)
        write.write(msgspec.json.encode(verdict) + b"\n")
        write.flush()


def judge(grammar: Grammar) -> Verdict:
    try:
        validate_grammar(grammar)
    except GrammarError as fault:
        problem = fault.message.removesuffix(f" (at {fault.path})") if fault.path else fault.message
        return Verdict(problem, fault.path)
    except (MemoryError, RecursionError) as fault:
        return Verdict(f"the {grammar.kind} is too large: {type(fault).__name__}")
    return Verdict()
