"""Which token each KV slot of the pool stands for.

The tree keeps no tokens of its own: an edge's tokens lie here, at the same page and slot as their KV. So the store
never fragments, splitting an edge copies nothing, evicting a page forgets its tokens with it, and what is compared on
a match is what the page really holds.
"""

from __future__ import annotations

import numpy as np


class TokenStore:
    """One int32 per KV slot: 4 bytes a token, allocated once, touched as pages are used."""

    __slots__ = ("_flat", "_rows", "_scalars", "page_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._flat = np.empty(num_pages * page_size, np.int32)
        self._rows = self._flat.reshape(num_pages, page_size)
        self._scalars: memoryview[int] = self._flat.data

    def at(self, page_id: int, slot: int) -> int:
        """The token in one slot."""
        return self._scalars[page_id * self.page_size + slot]

    def write(self, pages: np.ndarray, position: int, tokens: np.ndarray) -> None:
        """Put `tokens` at path positions from `position` on; `pages[0]` is the page of `position`."""
        size, flat, done, n = self.page_size, self._flat, 0, len(tokens)
        for index in range(len(pages)):
            slot = (position + done) % size
            if slot == 0 and n - done >= 2 * size:  # the whole pages at once
                whole = (n - done) // size
                self._rows[pages[index : index + whole]] = tokens[done : done + whole * size].reshape(whole, size)
                done += whole * size
                if done < n:
                    self.write(pages[index + whole :], position + done, tokens[done:])
                return
            take = min(size - slot, n - done)
            at = int(pages[index]) * size + slot
            flat[at : at + take] = tokens[done : done + take]
            done += take
            if done == n:
                return

    def read(self, pages: np.ndarray, position: int, n: int) -> np.ndarray:
        """The `n` tokens from path position `position` on; `pages[0]` is the page of `position`."""
        size = self.page_size
        slot = position % size
        last = (slot + n - 1) // size
        if last == 0:
            at = int(pages[0]) * size + slot
            return self._flat[at : at + n]
        return self._rows.take(pages[: last + 1], axis=0).reshape(-1)[slot : slot + n]

    def common_in_page(self, page_id: int, slot: int, tokens: np.ndarray) -> int:
        """`common` where everything lies in one page."""
        n, at = len(tokens), page_id * self.page_size + slot
        if n == 1:
            return 1 if self._scalars[at] == tokens[0] else 0
        differs = self._flat[at : at + n] != tokens
        first = int(differs.argmax())
        return first if differs[first] else n

    def common(self, pages: np.ndarray, position: int, tokens: np.ndarray) -> int:
        """How many of `tokens` agree with what is stored from `position` on, up to the first that does not."""
        n = len(tokens)
        differs = self.read(pages, position, n) != tokens
        first = int(differs.argmax())
        return first if differs[first] else n
