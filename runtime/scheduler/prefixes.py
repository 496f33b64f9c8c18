"""Which prefixes are being computed at this moment, so that nobody computes them a second time.

A request that is filling its KV stands in the index under the first position that it has not published yet: (namespace,
position, token there). A waiting request whose cached prefix ends at just that position, with that token next, and whose
tokens agree up to there, shares what comes: it waits, and after each published chunk it looks again.
"""

from __future__ import annotations

import numpy as np

from anabranch.runtime.scheduler.requests import Request


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading elements are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    at = int(differs.argmax()) if n else 0
    return at if n and differs[at] else n


class Frontier:
    """Requests that fill their KV, by what they publish next."""

    def __init__(self) -> None:
        self._at: dict[tuple[bytes, int, int], list[Request]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._at.values()))

    def move(self, request: Request, published: int) -> None:
        """The request has published its KV up to here; at its `fill_len` it leaves the index."""
        self.remove(request)
        if published >= request.fill_len:
            return
        branch = request.branch.known()
        key = (branch.namespace, published, int(branch.tokens(published, published + 1)[0]))
        self._at.setdefault(key, []).append(request)
        request.frontier = key

    def remove(self, request: Request) -> None:
        if request.frontier is None:
            return
        at_key = self._at[request.frontier]
        at_key.remove(request)
        if not at_key:
            del self._at[request.frontier]
        request.frontier = None

    def blocker(self, request: Request, cached: int) -> tuple[Request, int] | None:
        """A running request that will publish more of this one's prefix than the `cached` tokens there are: (it, how far)."""
        branch = request.branch.known()
        if cached >= len(branch):
            return None
        key = (branch.namespace, cached, int(branch.tokens(cached, cached + 1)[0]))
        for other in self._at.get(key, ()):
            shared = self._common(request, other)
            if shared > cached:
                return other, shared
        return None

    def _common(self, request: Request, other: Request) -> int:
        known = request.lcps.get(other.request_id)
        if known is None:
            theirs = other.branch.known().tokens(0, other.fill_len)
            known = request.lcps[other.request_id] = common_prefix_len(request.branch.known().tokens(), theirs)
        return known
