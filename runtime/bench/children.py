"""Peer processes: each one ends when we do, however that happens, and stands still while it is not its turn."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

# Linux sends SIGKILL to what runs here when its parent is gone, even if it was stopped; the setting survives `execv`.
_TIED = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
END_TIMEOUT_S = 10.0


class Child:
    """A process that we started and will end, by its id. Start it from a thread that lives as long as it should: the main one.

    is_tied   it is killed if this process dies; costs it the start of a small interpreter, which is not wanted where starts are timed
    """

    def __init__(self, command: Sequence[str | Path], *, log: Path | None = None, is_tied: bool = True, **streams: Any) -> None:
        words = [str(word) for word in command]
        if is_tied:
            words = [sys.executable, "-S", "-E", "-c", _TIED, str(os.getpid()), *words]
        self._log: IO[bytes] | None = None if log is None else log.open("wb")
        if self._log is not None:
            streams = {"stdout": self._log, "stderr": self._log, **streams}
        nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self.process = subprocess.Popen(words, **{**nothing, **streams})

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def pause(self) -> None:
        """It gets no processor until `resume`: engines whose threads spin while they wait would take a core from whoever runs next."""
        self._send("SIGSTOP")

    def resume(self) -> None:
        self._send("SIGCONT")

    def _send(self, name: str) -> None:
        number = getattr(signal, name, None)
        if number is not None and self.is_alive:
            self.process.send_signal(number)

    def end(self) -> None:
        """Ask, wait, then kill; close its pipes, which no other thread may read any more. Idempotent."""
        self.resume()
        if self.is_alive:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_TIMEOUT_S)
        if self.is_alive:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr, self._log):
            if stream is not None:
                with suppress(OSError):  # what was still to be written goes nowhere
                    stream.close()

