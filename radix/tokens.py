"""The tokens of live branches: logs that share what they have in common.

A log is a position in a tree of segments. Forking copies one reference; appending writes in place when nobody has
written past this log's end yet, and opens a segment of its own otherwise. What another log can see is never
overwritten.

```
segment A  [0 .............. 40)          log 1: (A, 40)
               └─ segment B  [25 ... 60)  log 2: (B, 60), forked from A at 25
```
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np

from anabranch.radix.errors import TokenError

MAX_DEPTH = 64  # a longer chain of segments is copied into one, so that reading stays cheap


class Segment:
    """Positions [start, fill) of one or more logs; what comes before `start` is the parent's."""

    __slots__ = ("buffer", "depth", "fill", "parent", "start", "users")

    def __init__(self, parent: Segment | None, start: int, capacity: int) -> None:
        self.parent = parent
        self.start = start
        self.fill = start
        self.buffer = np.empty(capacity, np.int32)
        self.users = 0  # logs that end here, and segments that hang here
        self.depth = 0
        if parent is not None:
            parent.users += 1
            self.depth = parent.depth + 1

    def room_for(self, n: int) -> None:
        used = self.fill - self.start
        if used + n > len(self.buffer):
            grown = np.empty(max(used + n, 2 * len(self.buffer)), np.int32)
            grown[:used] = self.buffer[:used]
            self.buffer = grown


class TokenLog:
    """The token ids of one branch. Fork is O(1); append is amortised O(new); a read touches what it returns."""

    __slots__ = ("_segment", "length")

    def __init__(self) -> None:
        self._segment = Segment(None, 0, 0)
        self._segment.users = 1
        self.length = 0

    def fork(self) -> TokenLog:
        """A second log with the same tokens; either may go on without the other noticing."""
        child = TokenLog.__new__(TokenLog)
        child._segment = self._segment
        child.length = self.length
        self._segment.users += 1
        return child

    def append(self, token_ids: Sequence[int] | np.ndarray) -> None:
        """Add tokens at the end.

        Raises   TokenError if one is outside [0, 2**31); then nothing has changed
        """
        n = len(token_ids)
        if n == 1:  # what decoding does all the time
            new: int | np.ndarray = _as_token(token_ids[0])
        elif n:
            new = as_tokens(token_ids)
        else:
            return
        segment = self._segment
        if segment.fill != self.length:
            segment = self._writable_segment(n)
        at = self.length - segment.start
        if at + n > len(segment.buffer):
            segment.room_for(n)
        segment.buffer[at : at + n] = new
        self.length += n
        segment.fill = self.length

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        assert 0 <= length <= self.length, f"cannot cut a log of {self.length} tokens to {length}"
        self.length = length

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), int32. A view where they lie in one segment: valid until the log changes."""
        segment: Segment | None = self._segment
        pieces: list[np.ndarray] = []
        while stop > start:
            assert segment is not None
            low = max(segment.start, start)
            if low < stop:
                pieces.append(segment.buffer[low - segment.start : stop - segment.start])
                stop = low
            segment = segment.parent
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)

    def at(self, position: int) -> int:
        """The token at one position."""
        segment = self._segment
        while segment.start > position:
            assert segment.parent is not None
            segment = segment.parent
        return int(segment.buffer[position - segment.start])

    def close(self) -> None:
        """Drop this log's share of the segments; the log is empty afterwards."""
        _drop(self._segment)
        self._segment = Segment(None, 0, 0)
        self._segment.users = 1
        self.length = 0

    def _writable_segment(self, n: int) -> Segment:
        segment = self._segment
        if segment.fill == self.length:
            return segment
        if segment.users == 1:  # nobody else sees what was truncated
            segment.fill = max(self.length, segment.start)
            if segment.fill == self.length:
                return segment
        self._segment = self._open_segment(n)
        self._segment.users = 1
        _drop(segment)
        return self._segment

    def _open_segment(self, n: int) -> Segment:
        parent: Segment | None = self._segment
        while parent is not None and parent.start >= self.length:
            parent = parent.parent
        capacity = max(16, n)
        if parent is None or parent.depth < MAX_DEPTH:
            return Segment(parent, self.length, capacity)
        whole = Segment(None, 0, self.length + capacity)
        whole.buffer[: self.length] = self.read(0, self.length)
        whole.fill = self.length
        return whole


def _drop(segment: Segment | None) -> None:
    while segment is not None:
        segment.users -= 1
        if segment.users:
            return
        segment = segment.parent


def _as_token(token_id: int) -> int:
    try:
        token = index(token_id)
    except TypeError as error:
        raise TokenError(f"token ids must be integers in [0, 2**31), got {token_id!r}") from error
    if not 0 <= token < 2**31:
        raise TokenError(f"token ids must be in [0, 2**31), got {token}")
    return token


def as_tokens(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as int32, checked rather than wrapped; no copy if they are int32 already."""
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.int32:
        tokens = token_ids
        if tokens.ndim != 1:
            raise TokenError(f"token ids must be one row of integers, got shape {tokens.shape}")
        if tokens.size and tokens.min() < 0:
            raise TokenError(f"token ids must be at least 0, got {int(tokens.min())}")
        return tokens
    try:
        given = np.asarray(token_ids)
        if given.dtype.kind not in "iu":
            raise TypeError(f"got {given.dtype}")
        wide = given.astype(np.int64, casting="safe") if given.dtype != np.uint64 else given
    except (OverflowError, ValueError, TypeError) as error:
        raise TokenError(f"token ids must be integers in [0, 2**31): {error}") from error
    if wide.ndim != 1:
        raise TokenError(f"token ids must be one row of integers, got shape {wide.shape}")
    if wide.size and not (wide.min() >= 0 and wide.max() < 2**31):
        raise TokenError(f"token ids must be in [0, 2**31), got {int(wide.min())} to {int(wide.max())}")
    return wide.astype(np.int32)
