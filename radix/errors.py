"""What can be wrong with a call into the cache.

RadixError
├── CacheSizeError   the pool cannot be built with these numbers
├── TokenError       a token id is outside int32
├── BranchError      a closed, foreign or wrongly attached branch was used
├── PageError        a page was released more often than it was held
└── LockError        a node was unlocked more often than it was locked

A full cache is none of these: `reserve` returns None and `can_reserve` says how many pages are missing.
"""


class RadixError(Exception):
    """Base of everything this layer raises on purpose."""


class CacheSizeError(RadixError, ValueError):
    """`num_pages`, `page_size` or `lease_share` is out of range."""


class TokenError(RadixError, ValueError):
    """A token id does not fit in [0, 2**31)."""


class BranchError(RadixError):
    """The branch is closed, or not in the state that the call needs."""


class PageError(RadixError):
    """A reference count would go below zero: somebody released a page twice."""


class LockError(RadixError):
    """A lock count would go below zero: somebody unlocked a node twice."""
