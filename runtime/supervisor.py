"""Starts the three processes, waits until they are ready, and ends them: all together, only its own, by pid."""

import logging
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from anabranch.runtime.config import EngineConfig, child_environment
from anabranch.runtime.errors import EngineStartError
from anabranch.runtime.messages import Error
from anabranch.runtime.stages import READY, STAGES
from anabranch.runtime.transport import endpoint, private_directory, remove_directory

log = logging.getLogger("anabranch.supervisor")
GRACE_S = 2.0  # between asking a child to end and ending it
POLL_S = 0.1


class Supervisor:
    """One engine's processes. `start` blocks until they serve; afterwards a thread watches them.

    When one of them dies, the others are ended too, so that every client sees at once that the engine is lost; `error` says which.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._stderr: dict[str, IO[bytes]] = {}
        self._started: Future[str] = Future()
        self._closing = threading.Event()
        self.error: Error | None = None
        self.died = threading.Event()
        self._thread = threading.Thread(target=self._main, name="anabranch-supervisor", daemon=True)

    def start(self) -> str:
        """The address of the engine. Raises EngineStartError with the last words of the child that failed."""
        self._thread.start()
        return self._started.result()

    def stop(self, timeout_s: float) -> None:
        """End the processes, wait for them. Idempotent."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def pids(self) -> dict[str, int]:
        return {stage: child.pid for stage, child in self._children.items()}

    # ------------------------------------------------------------ the thread: it lives as long as the engine

    def _main(self) -> None:
        directory = private_directory()
        try:
            for stage in STAGES:
                self._spawn(stage, directory)
            self._await_ready()
            self._started.set_result(endpoint(directory, "clients"))
            self._watch()
        except EngineStartError as fault:
            self._started.set_exception(fault)
        finally:
            self.died.set()
            self._end_children()
            remove_directory(directory)

    def _spawn(self, stage: str, directory: Path) -> None:
        # A file, not a pipe: a child that complains a lot must not block on a reader.
        self._stderr[stage] = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the child has ended
        child = subprocess.Popen(
            [sys.executable, "-m", "anabranch.runtime.stages", stage, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr[stage],
            env=child_environment(self._config.worker.num_threads),
            start_new_session=True,  # an interrupt of the terminal is not for them
        )
        self._children[stage] = child
        assert child.stdin is not None, "stdin is a pipe"
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
                if (dead := self._first_dead()) is not None:
                    raise EngineStartError(f"the {dead} process did not start: {self._last_words(dead)}")
                if self._closing.is_set():
                    raise EngineStartError("the engine was closed while it started")
                if time.monotonic() > deadline:
                    late = ", ".join(sorted(waiting))
                    raise EngineStartError(f"not ready after {self._config.start_timeout_s:g} s: {late}")

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            if (dead := self._first_dead()) is not None:
                code = self._children[dead].returncode
                message = f"the {dead} process died (exit code {code}): {self._last_words(dead)}"
                self.error = Error(type="internal_error", message=message, code="engine_lost")
                log.error(message)
                self.died.set()
                return

    def _first_dead(self) -> str | None:
        return next((stage for stage, child in self._children.items() if child.poll() is not None), None)

    def _last_words(self, stage: str) -> str:
        """The last line that the child wrote to its standard error."""
        file = self._stderr[stage]
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4000))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def _end_children(self) -> None:
        for child in self._children.values():
            if child.stdin is not None:
                child.stdin.close()  # the end of its standard input ends it
        deadline = time.monotonic() + GRACE_S
        for child in self._children.values():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        for file in self._stderr.values():
            file.close()
