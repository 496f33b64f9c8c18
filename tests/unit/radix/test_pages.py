import numpy as np
import pytest

from anabranch.radix.errors import CacheSizeError, PageError
from anabranch.radix.pages import PagePool


def test_alloc_gives_distinct_pages_and_none_when_there_are_too_few() -> None:
    pool = PagePool(5, 4)
    first = pool.alloc(3)
    assert first is not None and len(set(first.tolist())) == 3 and pool.num_free == 2
    assert pool.alloc(3) is None and pool.num_free == 2
    second = pool.alloc(2)
    assert second is not None and not set(first.tolist()) & set(second.tolist())
    assert pool.alloc_one() is None


def test_a_page_is_free_again_when_its_last_holder_releases_it() -> None:
    pool = PagePool(3, 1)
    pages = pool.alloc(3)
    assert pages is not None
    pool.retain(pages[:2])
    assert pool.release(pages) == 1 and pool.num_free == 1
    assert pool.release(pages[:2]) == 2 and pool.num_free == 3
    assert sorted(pool.free_pages().tolist()) == [0, 1, 2]


def test_the_last_freed_page_is_the_first_reused() -> None:
    pool = PagePool(8, 1)
    pages = pool.alloc(8)
    assert pages is not None
    pool.release(pages[[5]])
    pool.release(pages[[2]])
    assert pool.alloc_one() == pages[2]


def test_releasing_twice_raises_and_changes_nothing() -> None:
    pool = PagePool(3, 1)
    pages = pool.alloc(2)
    assert pages is not None
    pool.release_one(int(pages[0]))
    with pytest.raises(PageError, match=f"free pages \\[{pages[0]}\\]"):
        pool.release(pages)
    assert pool.refs(int(pages[1])) == 1 and pool.num_free == 2
    with pytest.raises(PageError):
        pool.release_one(int(pages[0]))
    assert pool.refs(int(pages[0])) == 0, "a count must never go below zero"


def test_only_a_held_page_can_be_shared() -> None:
    pool = PagePool(3, 1)
    with pytest.raises(PageError):
        pool.retain(np.array([1], np.int32))
    with pytest.raises(PageError):
        pool.retain_one(1)


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (-1, 16), (4, 0), (2**31, 1), (2**28, 16)])
def test_impossible_sizes_are_refused_with_the_numbers(num_pages: int, page_size: int) -> None:
    with pytest.raises(CacheSizeError, match=r"got -?\d+"):
        PagePool(num_pages, page_size)
