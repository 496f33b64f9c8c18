"""Starts the three processes, waits until they are ready, and ends them: all together, only its own, by pid."""

import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from anabranch.runtime.config import EngineConfig, child_environment
from anabranch.runtime.errors import EngineStartError
from anabranch.runtime.last_words import LastWords
from anabranch.runtime.messages import Error
from anabranch.runtime.stages import READY, STAGES
from anabranch.runtime.trace import say
from anabranch.runtime.transport import endpoint, private_directory, remove_directory

log = logging.getLogger("anabranch.supervisor")
GRACE_S = 2.0  # between asking a child to end and ending it
POLL_S = 0.1
SILENT_S = 15.0  # without a sign of life from a process: it was stopped, or its memory is being swapped


# Our own location goes first on the child's path: it must run this very code, however we were found, and nothing from the
# directory that the program happens to run in.
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; "
    "from anabranch.runtime.stages import main; main(sys.argv[2], Path(sys.argv[3]))"
)


def _root() -> Path:
    import anabranch

    return Path(str(anabranch.__file__)).parent.parent


class Supervisor:
    """One engine's processes. `start` blocks until they serve; afterwards a thread watches them.

    When one of them dies, the others are ended too, so that every client sees at once that the engine is lost; `error` says which.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._words: dict[str, LastWords] = {}
        self._started: Future[str] = Future()
        self._closing = threading.Event()
        self.error: Error | None = None
        self.busy_s: dict[str, float] = {}  # how long each has been in the step under way, by its own last word
        self.died = threading.Event()
        self._thread = threading.Thread(target=self._main, name="anabranch-supervisor", daemon=True)

    def start(self) -> str:
        """The address of the engine. Raises EngineStartError with the last words of the child that failed."""
        self._thread.start()
        try:
            return self._started.result()
        except BaseException:  # an interrupt, too
            self.stop(GRACE_S + 1.0)
            raise

    def stop(self, timeout_s: float) -> None:
        """End the processes, wait for them. Idempotent."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def pids(self) -> dict[str, int]:
        return {stage: child.pid for stage, child in self._children.items()}

    # ------------------------------------------------------------ the thread: it lives as long as the engine

    def _main(self) -> None:
        directory = None
        try:
            directory = private_directory()
            for stage in STAGES:
                self._spawn(stage, directory)
            self._await_ready()
            self._pass_on()
            self._started.set_result(endpoint(directory, "clients"))
            self._watch()
        except EngineStartError as fault:
            self._started.set_exception(fault)
        except Exception as fault:
            if self._started.done():
                log.exception("the supervisor failed")
            else:
                self._started.set_exception(EngineStartError(f"the engine's processes could not be started: {fault}"))
        finally:
            self.died.set()
            self._end_children()
            if directory is not None:
                remove_directory(directory)

    def _spawn(self, stage: str, directory: Path) -> None:
        self._words[stage] = LastWords()
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(_root()), stage, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words[stage].fileno(),
            env=child_environment(self._config.worker.num_threads),
            start_new_session=True,  # an interrupt of the terminal is not for them
        )
        self._children[stage] = child
        assert child.stdin is not None, "stdin is a pipe"
        with suppress(BrokenPipeError):  # it is dead already: its last words will say why
            child.stdin.write(self._config.to_json() + b"\n")
            child.stdin.flush()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        waiting = set(self._children)
        with selectors.DefaultSelector() as selector:
            for stage, child in self._children.items():
                assert child.stdout is not None, "stdout is a pipe"
                selector.register(child.stdout, selectors.EVENT_READ, stage)
            while waiting:
                for key, _ in selector.select(POLL_S):
                    line = key.fileobj.readline().decode(errors="replace").strip()  # type: ignore[union-attr]
                    if line == READY:
                        waiting.discard(key.data)
                        selector.unregister(key.fileobj)
                    elif not line:
                        selector.unregister(key.fileobj)
                if self._config.debug.level:  # otherwise one line says why, if it does not start
                    self._pass_on()
                if (dead := self._first_dead()) is not None:
                    raise EngineStartError(f"the {dead} process did not start: {self._words[dead].last_line()}")
                if self._closing.is_set():
                    raise EngineStartError("the engine was closed while it started")
                if time.monotonic() > deadline:
                    late = ", ".join(sorted(waiting))
                    raise EngineStartError(f"not ready after {self._config.start_timeout_s:g} s: {late}")

    def _watch(self) -> None:
        heard = {stage: time.monotonic() for stage in self._children}
        with selectors.DefaultSelector() as selector:
            for stage, child in self._children.items():
                assert child.stdout is not None, "stdout is a pipe"
                os.set_blocking(child.stdout.fileno(), False)
                selector.register(child.stdout, selectors.EVENT_READ, stage)
            while not self._closing.is_set():
                for key, _ in selector.select(POLL_S):
                    words = os.read(key.fd, 65536)
                    if not words:
                        selector.unregister(key.fileobj)  # it is dead, or about to be
                        continue
                    heard[key.data] = time.monotonic()
                    self.busy_s[key.data] = _last_number(words)
                self._pass_on()
                if (trouble := self._trouble(heard)) is not None:
                    self.error = Error(type="internal_error", message=trouble, code="engine_lost")
                    log.error(trouble)
                    self.died.set()
                    return

    def _trouble(self, heard: dict[str, float]) -> str | None:
        """Why the engine cannot go on, if it cannot. A long step is work; beyond `stall_timeout_s` it is a hang."""
        if (dead := self._first_dead()) is not None:
            return f"the {dead} process died (exit code {self._children[dead].returncode}): {self._words[dead].last_line()}"
        now = time.monotonic()
        for stage, at in heard.items():
            if now - at > SILENT_S:
                return f"the {stage} process has given no sign of life for {now - at:.0f} s"
            if self.busy_s.get(stage, 0.0) > self._config.stall_timeout_s:
                return f"the {stage} process has been in one step for {self.busy_s[stage]:.0f} s"
        return None

    def _first_dead(self) -> str | None:
        return next((stage for stage, child in self._children.items() if child.poll() is not None), None)

    def _pass_on(self) -> None:
        """Warnings, and what `anabranch_DEBUG` asks for."""
        for words in self._words.values():
            words.pass_on()

    def _end_children(self) -> None:
        for child in self._children.values():
            if child.stdin is not None:
                with suppress(OSError):
                    child.stdin.close()  # the end of its standard input ends it
        deadline = time.monotonic() + GRACE_S
        for stage, child in self._children.items():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
            if self._config.debug.level:
                self._words[stage].pass_on()
                say(f"the {stage} process ended, pid {child.pid}, exit code {child.returncode}")
            self._words[stage].close()


def _last_number(words: bytes) -> float:
    """Of the last line that is one; 0 if there is none."""
    for line in reversed(words.split(b"\n")):
        with suppress(ValueError):
            return float(line)
    return 0.0
