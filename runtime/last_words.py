"""What a child process writes to its standard error: passed on, and remembered for the message that says why it died."""

import fcntl
import os
import sys
import tempfile

MAX_BYTES = 1 << 20  # of the file; what was passed on is dropped beyond it
REMEMBERED_BYTES = 4000


class LastWords:
    """The standard error of one child: a file, not a pipe, so that a child that complains a lot never waits for a reader."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        # Only then does a child that writes on after a cut write at the new end.
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | os.O_APPEND)
        self._at = 0  # what lies before has been taken
        self._recent = b""

    def fileno(self) -> int:
        """Give it to the child as its standard error."""
        return self._file.fileno()

    def pass_on(self) -> None:
        """Write what is new to our own standard error. Whole lines, unless the child writes none."""
        words = self._take()
        if words and sys.stderr is not None:
            sys.stderr.write(words.decode(errors="replace"))
            sys.stderr.flush()

    def last_line(self) -> str:
        self._take()
        lines = [line.strip() for line in self._recent.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        self._file.close()

    def _take(self) -> bytes:
        words = b""
        while chunk := os.pread(self.fileno(), MAX_BYTES, self._at):  # not `read`: the child shares our place in the file
            words += chunk
            self._at += len(chunk)
            if self._at > MAX_BYTES:
                os.ftruncate(self.fileno(), 0)
                self._at = 0
        self._recent = (self._recent + words)[-REMEMBERED_BYTES:]
        return words
