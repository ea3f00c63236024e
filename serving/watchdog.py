"""Detects a device that hangs, which means that a step never ends and raises no exception."""

from dataclasses import dataclass

# Seconds that a step may take. A request needs at least two steps and has 600 s by default, so slower steps could not
# answer it in time. The time does not include compilation, because programs are compiled before the first step.
STEP_SECONDS = 300.0
LOOK = 1.0  # seconds between two checks


class DeviceHangs(Exception):
    """Raised when a step of the device has taken so long that we assume it will never end."""


@dataclass
class Watchdog:
    """Decides at regular checks whether the current step takes too long.

    >>> dog = Watchdog(seconds=2.5)
    >>> [dog.look(step=1, now=now) for now in (0.0, 1.0, 2.0, 3.0)]
    [False, False, False, True]

    If a long time passes between two checks, this process was suspended, and not the device. So this time counts
    little:

    >>> dog = Watchdog(seconds=2.5)
    >>> [dog.look(step=1, now=now) for now in (0.0, 1.0, 3600.0)]
    [False, False, False]
    """

    seconds: float
    _step: int | None = None
    _waited: float = 0.0  # seconds of the current step that our checks have counted
    _looked: float = 0.0

    def look(self, *, step: int | None, now: float) -> bool:
        """Take the number of the current step (None: no step runs) and the time.

        Returns whether the step takes too long.
        """
        is_same = step is not None and step == self._step
        # A late check counts as one interval, because a busy machine delays checks and steps equally.
        self._waited = self._waited + min(now - self._looked, LOOK) if is_same else 0.0
        self._step, self._looked = step, now
        return self._waited > self.seconds
