"""The time from the start of a command to the first token, by phase. Importing this module does not import JAX."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal, get_args

from llamaspec.model.system import process_age

Phase = Literal["import", "device", "read", "compile", "upload", "first token"]


class StartClock:
    """The seconds that the main thread spends in each phase. They add up to the total time.

    - import: Python, and the modules that the command imports
    - device: waiting for JAX to open the device
    - read: opening the files, checking the weights, reading them, and quantizing them on a CPU
    - compile: waiting for programs that are compiled, or read from the compile cache
    - upload: waiting for weights to reach the device, and to be quantized there
    - first token: from the request to the first token

    Other threads work in parallel with the main thread. `parallel` has their seconds, which are not in the sum.
    """

    def __init__(self, *, began: float | None = None):
        """Start with the phase `import` at the time `began` of `perf_counter`, by default now."""
        self._now: Phase | None = "import"
        self._since = perf_counter() if began is None else began
        self._seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        self._beside: dict[Phase, float] = {}

    @classmethod
    def of_process(cls) -> "StartClock":
        """Make a clock that started when this process started."""
        return cls(began=perf_counter() - process_age())

    def begin(self, phase: Phase) -> None:
        """End the current phase, if there is one, and begin `phase`. A phase may begin several times."""
        self.end()
        self._now = phase

    def end(self, at: float | None = None) -> None:
        """End the current phase at the time `at` of `perf_counter`, by default now.

        If no phase has begun, this only stores the time.
        """
        at = perf_counter() if at is None else at
        if self._now is not None:
            self._seconds[self._now] += at - self._since
        self._now, self._since = None, at

    def with_first_token(self, seconds: float) -> "StartClock":
        """Set the phase "first token" to `seconds`, if the request came some time after the model was ready."""
        self.end()
        self._seconds["first token"] = seconds
        return self

    @contextmanager
    def parallel_work(self, phase: Phase) -> Iterator[None]:
        """Count the time of the body, which runs in another thread, as parallel work for `phase`."""
        began = perf_counter()
        try:
            yield
        finally:
            self._beside[phase] = self._beside.get(phase, 0.0) + perf_counter() - began

    @property
    def seconds(self) -> dict[Phase, float]:
        """The seconds of each phase in the order of `Phase`, without the current phase."""
        return dict(self._seconds)

    @property
    def parallel(self) -> dict[Phase, float]:
        """The seconds that other threads worked for each phase."""
        return dict(self._beside)

    def as_json(self) -> dict[str, Any]:
        """Return the seconds of the phases, their sum, and the parallel seconds.

        Names have underscores instead of spaces.
        """
        phases = {phase.replace(" ", "_"): seconds for phase, seconds in self._seconds.items()}
        parallel = {phase.replace(" ", "_"): seconds for phase, seconds in self._beside.items()}
        return {**phases, "total": sum(self._seconds.values()), "parallel": parallel}

    def __str__(self) -> str:
        """
        >>> clock = StartClock(began=0.0)
        >>> clock.end(at=0.5)
        >>> print(clock)
        first token after 0.50 s: import 0.50, device 0.00, read 0.00, compile 0.00, upload 0.00, first token 0.00
        """
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._seconds.items())
        line = f"first token after {sum(self._seconds.values()):.2f} s: {phases}"
        parallel = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._beside.items())
        return f"{line} (in parallel: {parallel})" if parallel else line
