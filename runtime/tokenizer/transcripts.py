"""Which token ids stood for which text, so that a chat that comes back as text is not tokenized again, nor differently.

A transcript is a rendered prompt and what was generated after it. When a new prompt begins with a known transcript, its
ids are used as they are and only the rest is tokenized: the ids that the model generated are then exactly those in its
cache. Only whole transcripts are reused, so that no prompt is cut where no generation ended: what a cold engine would
tokenize as one piece stays one piece.
"""

import hashlib
import secrets
from bisect import bisect_right, insort
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]

_ENTRY_BYTES = 400  # what an entry costs beside its ids
_NO_IDS: Ids = np.empty(0, np.int32)


class Transcripts:
    """Bounded in bytes; what was used least recently goes first. Thread-safe.

    Texts are *marked* texts (`templates.py`): a special token and the same letters typed by a user are different.
    They are kept as 256-bit digests under a key of this process, not as text.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._key = secrets.token_bytes(32)
        self._entries: OrderedDict[tuple[bytes, bytes], tuple[int, Ids]] = OrderedDict()  # -> (length of text, ids)
        self._lengths: defaultdict[bytes, list[int]] = defaultdict(list)  # per namespace, sorted, with repeats
        self._num_bytes = 0
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, namespace: bytes, text: str, ids: Sequence[int] | Ids) -> None:
        """`ids` are the tokens of `text`, a prompt and its generation, in this namespace. The newest ids win."""
        data = text.encode("utf-8", "surrogatepass")
        own = np.array(ids, np.int32)
        if not data or own.nbytes + _ENTRY_BYTES > self._max_bytes:
            return
        key = (namespace, self._hasher(data).digest())
        with self._lock:
            self._drop(key)
            self._entries[key] = (len(data), own)
            insort(self._lengths[namespace], len(data))
            self._num_bytes += own.nbytes + _ENTRY_BYTES
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def reuse(self, namespace: bytes, text: str) -> tuple[Ids, str]:
        """The ids of the longest known transcript that `text` begins with, and the rest; else no ids, and all of it.

        Cost: one pass over the text, and one look-up for each distinct length known in the namespace.
        """
        data = text.encode("utf-8", "surrogatepass")
        with self._lock:
            lengths = self._lengths.get(namespace, [])
            best: tuple[bytes, bytes] | None = None
            hasher, at = self._hasher(b""), 0
            for length in lengths[: bisect_right(lengths, len(data))]:
                if length == at:
                    continue
                hasher.update(data[at:length])
                at = length
                key = (namespace, hasher.digest())
                best = key if key in self._entries else best
            if best is None:
                return _NO_IDS, text
            self._entries.move_to_end(best)
            length, ids = self._entries[best]
        return ids, data[length:].decode("utf-8", "surrogatepass")

    def forget(self, namespace: bytes) -> None:
        """Drop what is known in a namespace."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == namespace]:
                self._drop(key)

    def _hasher(self, data: bytes) -> "hashlib.blake2b":
        return hashlib.blake2b(data, digest_size=32, key=self._key)

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        length, ids = entry
        lengths = self._lengths[key[0]]
        lengths.pop(bisect_right(lengths, length) - 1)
        if not lengths:
            del self._lengths[key[0]]
        self._num_bytes -= ids.nbytes + _ENTRY_BYTES
