"""A device that hangs: a step that does not end, which no exception tells of."""

from dataclasses import dataclass

# Seconds that a step may take. A request takes two at least, and may take 600 s by default: where steps are slower, no
# request is answered in time anyway. Programs are compiled before the first step.
STEP_SECONDS = 300.0
LOOK = 1.0  # seconds between two looks


class DeviceHangs(Exception):
    """A step of the device that has taken so long that it will not end."""


@dataclass
class Watchdog:
    """Tells from regular looks at the step under way whether it takes too long.

    >>> dog = Watchdog(seconds=2.5)
    >>> [dog.look(step=1, now=now) for now in (0.0, 1.0, 2.0, 3.0)]
    [False, False, False, True]

    A process that was stopped and goes on did not look in between, which is not the device's fault:

    >>> dog = Watchdog(seconds=2.5)
    >>> [dog.look(step=1, now=now) for now in (0.0, 1.0, 3600.0)]
    [False, False, False]
    """

    seconds: float
    _step: int | None = None
    _waited: float = 0.0  # seconds that we have seen the step take
    _looked: float = 0.0

    def look(self, *, step: int | None, now: float) -> bool:
        """Look at the number of the step under way, None if there is none; return whether it takes too long."""
        is_same = step is not None and step == self._step
        # One late look counts as one, since a busy machine delays looks and steps alike.
        self._waited = self._waited + min(now - self._looked, LOOK) if is_same else 0.0
        self._step, self._looked = step, now
        return self._waited > self.seconds
