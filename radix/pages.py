"""The pool of physical pages: who is free, and how many hold each of the others."""

from __future__ import annotations

import numpy as np

from anabranch.radix.errors import CacheSizeError, PageError


class PagePool:
    """A fixed number of pages with reference counts; 0 means free.

    This is the only module that may free a page. Freed pages are reused last in, first out, so that a small working set
    stays in a small part of the device's memory. A page may be *written* only by its one writer (see `invariants.py`);
    the pool counts holders and knows nothing of contents.
    """

    __slots__ = ("_counts", "_free", "_scalar_counts", "_scalar_free", "num_free", "num_pages", "page_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        if page_size < 1:
            raise CacheSizeError(f"page_size must be at least 1 token, got {page_size}")
        if not 1 <= num_pages < 2**31 // page_size:
            raise CacheSizeError(f"num_pages must be in [1, {2**31 // page_size}), got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_free = num_pages
        self._counts = np.zeros(num_pages, np.int32)
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack; its top is at index num_free - 1
        self._scalar_counts: memoryview[int] = self._counts.data  # reads one element three times as fast as numpy does
        self._scalar_free: memoryview[int] = self._free.data

    def refs(self, page_id: int) -> int:
        """How many hold the page."""
        return self._scalar_counts[page_id]

    def counts(self) -> np.ndarray:
        """[num_pages] int32, a copy."""
        return self._counts.copy()

    def free_pages(self) -> np.ndarray:
        """[num_free] int32, a copy, in no useful order."""
        return self._free[: self.num_free].copy()

    def alloc(self, n: int) -> np.ndarray | None:
        """`n` distinct free pages, each with count 1, or None if there are not that many. The caller owns the array."""
        if n > self.num_free:
            return None
        top = self.num_free
        self.num_free = top - n
        pages = self._free[top - n : top][::-1].copy()
        self._counts[pages] = 1
        return pages

    def alloc_one(self) -> int | None:
        """One free page with count 1, or None."""
        if not self.num_free:
            return None
        self.num_free -= 1
        page_id = self._scalar_free[self.num_free]
        self._scalar_counts[page_id] = 1
        return page_id

    def retain(self, pages: np.ndarray) -> None:
        """One more holder for each of these distinct pages, which must be held already."""
        counts = self._counts[pages]
        if counts.size and counts.min() < 1:
            raise PageError(f"retained free pages {pages[counts < 1].tolist()}: only a held page can be shared")
        self._counts[pages] = counts + 1

    def retain_one(self, page_id: int) -> None:
        """`retain` for a single page."""
        if self._scalar_counts[page_id] < 1:
            raise PageError(f"retained free page {page_id}: only a held page can be shared")
        self._scalar_counts[page_id] += 1

    def release(self, pages: np.ndarray) -> int:
        """One holder less for each of these distinct pages; returns how many became free.

        Raises   PageError if one of them is free already; then nothing has changed
        """
        counts = self._counts[pages]
        if counts.size and counts.min() < 1:
            raise PageError(f"released free pages {pages[counts < 1].tolist()}: each holder releases once")
        counts -= 1
        self._counts[pages] = counts
        freed = pages[counts == 0]
        self._free[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)
        return len(freed)

    def release_one(self, page_id: int) -> int:
        """`release` for a single page: 1 if it became free, else 0."""
        count = self._scalar_counts[page_id] - 1
        if count < 0:
            raise PageError(f"released free page {page_id}: each holder releases once")
        self._scalar_counts[page_id] = count
        if count:
            return 0
        self._scalar_free[self.num_free] = page_id
        self.num_free += 1
        return 1
