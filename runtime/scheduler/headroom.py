"""How long outputs really get: what admission sets aside for the growth of the requests that run."""

import numpy as np
from numpy.typing import NDArray

_EDGES = np.array([0, *sorted({round(2 ** (k / 2)) for k in range(41)})], np.int64)  # two to an octave, up to 2**20
_DECAY = 0.99  # of an old observation's weight, for each new one: the last hundred or so count
_PRIOR = 2.0  # observations' worth of belief that an output takes all it may


class Headroom:
    """Expected further tokens of an output that has `generated` tokens and may have `limit`, learnt from finished ones.

    A histogram of lengths, decayed with each observation, answers E[min(L, limit) - generated | L > generated]. Requests that
    were cut off by their own limit say only that the length was at least that, and are counted as one step longer.
    """

    def __init__(self) -> None:
        self._weights = np.zeros(len(_EDGES), np.float64)
        self._remaining: NDArray[np.float64] | None = None
        self.num_observed = 0

    def observe(self, length: int, *, was_cut: bool) -> None:
        """An output ended at `length` tokens; `was_cut` if its max_tokens or the context ended it."""
        bucket = int(np.searchsorted(_EDGES, length, side="right")) - 1
        if was_cut:
            bucket = min(bucket + 1, len(_EDGES) - 1)
        self._weights *= _DECAY
        self._weights[bucket] += 1.0
        self._remaining = None
        self.num_observed += 1

    def expect(self, generated: NDArray[np.integer], limit: NDArray[np.integer]) -> NDArray[np.int64]:
        """Expected further tokens of each output; between 0 and limit - generated."""
        most = np.maximum(limit - generated, 0)
        bucket = np.clip(np.searchsorted(_EDGES, generated, side="right") - 1, 0, len(_EDGES) - 1)
        longer = self._tail_weight()[bucket]
        learnt = self._table()[bucket]
        # The belief fades with the weight of evidence *about outputs at least this long*.
        expected = (longer * np.minimum(learnt, most) + _PRIOR * most) / (longer + _PRIOR)
        return np.minimum(np.ceil(expected), most).astype(np.int64)

    def _tail_weight(self) -> NDArray[np.float64]:
        """Weight of outputs that ended in this bucket or a later one."""
        return np.cumsum(self._weights[::-1])[::-1]

    def _table(self) -> NDArray[np.float64]:
        """For an output in bucket i: mean further tokens of those that got at least as far."""
        if self._remaining is None:
            tail = self._tail_weight()
            mass = np.cumsum((self._weights * _EDGES)[::-1])[::-1]
            mean = np.divide(mass, tail, out=np.zeros_like(mass), where=tail > 0)
            self._remaining = np.maximum(mean - _EDGES, 0.0)
        return self._remaining
