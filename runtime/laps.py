"""Where the time of a start went: a stopwatch that is handed down from part to part."""

import time

Lap = tuple[str, float]  # what was done, and milliseconds


class Laps:
    """Each `lap` ends where the next one begins, so together they are all of the time since the stopwatch was made."""

    def __init__(self) -> None:
        self.laps: list[Lap] = []
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """What was done since the last lap."""
        now = time.perf_counter()
        self.laps.append((name, 1000 * (now - self._last)))
        self._last = now
