"""Ctrl-C and its relatives, answered at once in every phase of a command.

Python runs a signal's handler between two steps of the main thread. While that thread is inside XLA's compiler, which
can take ten seconds, no handler runs. A second thread therefore waits for signals: where the main thread has not ended
the process soon after one, the second thread removes half-written files and ends it.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 0.4  # seconds that the main thread has to end the process by itself
ASYNCIO = threading.Event()  # set while asyncio has the signals
AT_THE_END: list[Callable[[], object]] = []  # what gives back to the terminal what was taken from it
SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"  # what a progress bar that was cut short leaves: its line, and no cursor


class Interrupts:
    """The signals that this process has received, and the thread that acts on them."""

    def __init__(self):
        self.status = 0  # the exit status of the first signal: 128 + its number; 0 before
        self._ended = threading.Lock()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt for SIGINT, and SystemExit for another signal; within an import end the process.

        A library in C++ that is being imported may abort where an exception comes from a handler. Further signals are
        ignored, so that nothing disturbs the removal of half-written files.
        """
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        self.status = self.status or 128 + number
        if is_importing(frame):
            self.end(self.status)
        # Callbacks and imports of XLA's print an exception that is raised within them, and go on.
        sys.excepthook = sys.unraisablehook = lambda *_: None
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(self.status)

    def watch(self, pipe: int) -> None:
        """Wait for the numbers of signals on `pipe`, and end the process after one that `handle` is for."""
        while number := os.read(pipe, 1):
            time.sleep(PATIENCE)
            # A command that acts on a signal in its own way is left alone, also at its next prompt.
            if number[0] in SIGNALS and not ASYNCIO.is_set() and not isinstance(signal.getsignal(number[0]), OwnWay):
                self.end(128 + number[0])
        os.close(pipe)

    def skip_teardown(self) -> None:
        """End the process where SIGINT asked for that and all else is done: taking JAX apart would take a second."""
        if self.status == 128 + signal.SIGINT:
            sys.stdout.flush()
            os._exit(self.status)

    def end_for_a_lost_page(self) -> NoReturn:
        """End the process with an error for a file that became shorter while it was read."""
        from llamaspec.model.checkpoints.checkpoint import refused
        from llamaspec.model.checkpoints.mapped import maps_cut_short

        file = next(iter(maps_cut_short().values()), "a file")
        os.write(2, f"error: {refused(file, 'was cut short while it was read')}\n".encode(errors="backslashreplace"))
        self.end(1)

    def end(self, status: int) -> NoReturn:
        """End the process now, with nothing half-written left and the terminal as it was."""
        with self._ended:
            remove_what_is_unfinished()
            for give_back in AT_THE_END:
                give_back()
            if sys.stderr and sys.stderr.isatty():
                os.write(sys.stderr.fileno(), f"{SHOW_CURSOR}\n".encode())
            os._exit(status)


class OwnWay:
    """A handler by which a command acts on a signal, whose number it is told, and goes on."""

    def __init__(self, act: Callable[[int], object]):
        self._act = act

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._act(number)


def end_done(number: int, frame: FrameType | None) -> NoReturn:
    """End a process that has done everything and only takes itself apart."""
    sys.stdout.flush()
    os._exit(128 + number)


def is_importing(frame: FrameType | None) -> bool:
    """Tell whether `frame` runs within an import statement."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def remove_what_is_unfinished() -> None:
    """Remove half-written files, and end the processes that work for this one."""
    _known("llamaspec.model.checkpoints.staging", "remove_unfinished")()
    for process in _known("multiprocessing", "active_children")():
        process.terminate()  # not `kill`: a process of `verify` has a candidate to end, which may hang
    _known("llamaspec.verify.candidates.process", "kill_all")()


def _known(module: str, name: str) -> Callable[[], Any]:
    """Find a function of a module; one that does nothing where this is not imported, or not to its end."""
    return getattr(sys.modules.get(module), name, list)


@contextmanager
def answered_at_once() -> Iterator[Interrupts]:
    """End this process within a second of SIGINT, SIGTERM or SIGHUP, whatever the main thread is doing.

    A signal that was ignored when this process began, as after `nohup`, stays ignored.
    """
    interrupts = Interrupts()
    pipe, wake = os.pipe()
    os.set_blocking(wake, False)
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, interrupts.handle) for number in handled}
    woken_before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threading.Thread(target=interrupts.watch, args=[pipe], daemon=True).start()
    if signal.SIGINT in before:  # registered first, so called last: Python drops handlers next, and would be killed
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    atexit.register(interrupts.skip_teardown)
    try:
        from llamaspec.model.system import at_bus_error  # this takes a moment, in which a signal may come

        with at_bus_error(interrupts.end_for_a_lost_page):
            yield interrupts
    finally:
        # After a signal the thread stays: Python's own end may wait for a compilation that nobody needs any more.
        if not interrupts.status:
            atexit.unregister(interrupts.skip_teardown)
            if signal.SIGINT in before:  # registered last, so called first: taking JAX apart comes after it
                atexit.register(partial(signal.signal, signal.SIGINT, end_done))
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(woken_before)
            os.close(wake)


@contextmanager
def still_watched() -> Iterator[None]:
    """Tell the thread that waits for signals of them again after a block that runs asyncio, whose end tells nobody."""
    watched = signal.set_wakeup_fd(-1)  # the only way to ask
    try:
        signal.set_wakeup_fd(watched, warn_on_full_buffer=False)
        ASYNCIO.set()
        yield
    finally:
        ASYNCIO.clear()
        signal.set_wakeup_fd(watched, warn_on_full_buffer=False)


@contextmanager
def unechoed() -> Iterator[None]:
    """Keep what is typed meanwhile from being shown in the middle of an output; whoever reads it next may show it."""
    import termios

    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = list(before)
    quiet[3] &= ~termios.ECHO

    def set_modes(modes: list[Any]) -> None:
        with suppress(termios.error):  # where the terminal is gone, nobody misses it
            termios.tcsetattr(terminal, termios.TCSANOW, modes)

    def give_back() -> None:
        if not _in_background(terminal):  # or a process that is told to end would be stopped for this
            set_modes(before)

    def take(*_: object) -> None:
        if not _in_background(terminal):
            set_modes(quiet)

    AT_THE_END.append(give_back)
    before_stop = signal.signal(signal.SIGCONT, take)  # shells set their own modes once Ctrl-Z has stopped us
    try:
        take()
        yield
        set_modes(before)  # in the background this waits for `fg`, as whoever reads next must
    finally:
        signal.signal(signal.SIGCONT, before_stop)
        give_back()
        AT_THE_END.remove(give_back)


def _in_background(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:  # it is not the terminal whose keys send signals to this process
        return False


@contextmanager
def handled_by(act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in the main thread at each SIGINT, in place of ending the process."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, OwnWay(lambda _: act()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def first_handled_by(act: Callable[[int], object], numbers: Iterable[int]) -> Iterator[None]:
    """Call `act` in the main thread at the first signal among `numbers`, with its number.

    A second one ends the process as usual.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    asked = False

    def restore() -> None:
        for number in handled:
            signal.signal(number, before[number])

    def end(number: int) -> None:
        restore()
        signal.raise_signal(number)

    def act_once(first: int) -> None:
        nonlocal asked
        if asked:  # again before the next lines were done: `timeout`, for example, repeats what its child has, too
            return
        asked = True
        for number in handled:  # still in a way of our own, or the thread that watches would end the process
            signal.signal(number, OwnWay(end))
        act(first)

    for number in handled:
        signal.signal(number, OwnWay(act_once))
    try:
        yield
    finally:
        restore()
