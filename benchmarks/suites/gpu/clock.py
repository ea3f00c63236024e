"""Measures the remaining time of a part of the suite."""

from time import monotonic


class Deadline:
    """A clock that starts when it is created, and is over after `seconds`."""

    def __init__(self, seconds: float):
        self._end = monotonic() + seconds

    @property
    def remaining(self) -> float:
        return self._end - monotonic()

    @property
    def over(self) -> bool:
        return self.remaining <= 0
