"""Time that a part of the suite may take."""

from time import monotonic


class Clock:
    """Clock that starts when it is made."""

    def __init__(self, seconds: float):
        self._end = monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - monotonic()

    @property
    def over(self) -> bool:
        return self.left <= 0
