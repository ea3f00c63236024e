"""Ctrl-C and similar signals end a command at once, in every phase.

Python runs signal handlers only between two bytecodes of the main thread. XLA's compiler may keep that thread busy for
ten seconds, during which no handler runs. So a second thread, the watcher, also waits for signals. If the main thread
has not ended the process shortly after a signal, the watcher removes half-written files and ends the process.
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
PATIENCE = 0.4  # seconds for the main thread to end the process itself
ASYNCIO = threading.Event()  # set while asyncio handles the signals
AT_THE_END: list[Callable[[], object]] = []  # functions that restore the modes of the terminal
SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"  # clears the line of an interrupted progress bar, and shows the cursor


class Interrupts:
    """The signals that this process has received, and the thread that acts on them."""

    def __init__(self):
        self.status = 0  # 128 + the number of the first signal; 0 before it
        self._ended = threading.Lock()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt for SIGINT, and SystemExit for other signals. During an import, end the process.

        During an import we raise nothing, because a C++ library may abort if a handler raises while the library is
        imported. We ignore further signals, so that they do not interrupt the removal of half-written files.
        """
        for signal_number in SIGNALS:
            signal.signal(signal_number, signal.SIG_IGN)
        self.status = self.status or 128 + number
        if is_importing(frame):
            self.end(self.status)
        # XLA's callbacks and imports would print the exception and continue.
        sys.excepthook = sys.unraisablehook = lambda *_: None
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(self.status)

    def watch(self, pipe: int) -> None:
        """Read signal numbers from `pipe`, in the watcher thread.

        If the process still runs shortly after a signal, end it, unless a command handles this signal itself.
        """
        while number := os.read(pipe, 1):
            time.sleep(PATIENCE)
            # Some commands handle a signal themselves. We do not interfere, even at their next prompt.
            if (
                number[0] in SIGNALS
                and not ASYNCIO.is_set()
                and not isinstance(signal.getsignal(number[0]), CommandHandler)
            ):
                self.end(128 + number[0])
        os.close(pipe)

    def skip_teardown(self) -> None:
        """If this process received SIGINT, end it now and skip JAX's shutdown, which takes a second."""
        if self.status == 128 + signal.SIGINT:
            sys.stdout.flush()
            os._exit(self.status)

    def end_for_a_lost_page(self) -> NoReturn:
        """End the process with an error, because a mapped file was truncated while we read it."""
        from llamaspec.model.checkpoints.checkpoint import refused
        from llamaspec.model.checkpoints.mapped import maps_cut_short

        file = next(iter(maps_cut_short().values()), "a file")
        os.write(2, f"error: {refused(file, 'was cut short while it was read')}\n".encode(errors="backslashreplace"))
        self.end(1)

    def end(self, status: int) -> NoReturn:
        """End the process now: remove half-written files and restore the terminal."""
        with self._ended:
            remove_what_is_unfinished()
            for give_back in AT_THE_END:
                give_back()
            if sys.stderr and sys.stderr.isatty():
                os.write(sys.stderr.fileno(), f"{SHOW_CURSOR}\n".encode())
            os._exit(status)


class CommandHandler:
    """A signal handler that calls `act` with the signal number, for a command that continues after the signal."""

    def __init__(self, act: Callable[[int], object]):
        self._act = act

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._act(number)


def end_done(number: int, frame: FrameType | None) -> NoReturn:
    """End a process that has finished its work and is shutting down."""
    sys.stdout.flush()
    os._exit(128 + number)


def is_importing(frame: FrameType | None) -> bool:
    """Tell whether `frame` runs inside an import statement."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def remove_what_is_unfinished() -> None:
    """Remove half-written files, and end the worker processes."""
    _imported_function("llamaspec.model.checkpoints.staging", "remove_unfinished")()
    for process in _imported_function("multiprocessing", "active_children")():
        process.terminate()  # not `kill`: a worker of `verify` must end its candidate, which may hang
    _imported_function("llamaspec.verify.candidates.process", "kill_all")()


def _imported_function(module: str, name: str) -> Callable[[], Any]:
    """Return the function `name` of `module`, or a function that does nothing if the module is not fully imported."""
    return getattr(sys.modules.get(module), name, list)


@contextmanager
def answered_at_once() -> Iterator[Interrupts]:
    """End this process within a second of SIGINT, SIGTERM or SIGHUP, even if the main thread is busy.

    If a signal was ignored when this process started, for example because of `nohup`, it stays ignored.
    """
    interrupts = Interrupts()
    pipe, wake = os.pipe()
    os.set_blocking(wake, False)
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, interrupts.handle) for number in handled}
    woken_before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threading.Thread(target=interrupts.watch, args=[pipe], daemon=True).start()
    # atexit calls this function last, because we register it first. After that, Python removes its handlers, and
    # another SIGINT would kill the process.
    if signal.SIGINT in before:
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    atexit.register(interrupts.skip_teardown)
    try:
        from llamaspec.model.system import at_bus_error  # this takes a moment, and a signal may arrive meanwhile

        with at_bus_error(interrupts.end_for_a_lost_page):
            yield interrupts
    finally:
        # After a signal, the watcher keeps running, because Python's own exit may wait for a compilation that is no
        # longer needed.
        if not interrupts.status:
            atexit.unregister(interrupts.skip_teardown)
            if signal.SIGINT in before:  # atexit calls `end_done` first, and JAX shuts down later
                atexit.register(partial(signal.signal, signal.SIGINT, end_done))
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(woken_before)
            os.close(wake)


@contextmanager
def still_watched() -> Iterator[None]:
    """Let asyncio handle the signals inside this context. Afterwards the watcher thread handles them again."""
    watched = signal.set_wakeup_fd(-1)  # returns the old descriptor; Python has no function that only reads it
    try:
        signal.set_wakeup_fd(watched, warn_on_full_buffer=False)
        ASYNCIO.set()
        yield
    finally:
        ASYNCIO.clear()
        signal.set_wakeup_fd(watched, warn_on_full_buffer=False)


@contextmanager
def unechoed() -> Iterator[None]:
    """Turn off the terminal's echo inside this context.

    Keys that the user types during an answer then do not appear inside the answer. The next prompt may show them.
    """
    import termios

    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = list(before)
    quiet[3] &= ~termios.ECHO

    def set_modes(modes: list[Any]) -> None:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(terminal, termios.TCSANOW, modes)

    def give_back() -> None:
        # Changing modes in the background would stop this process, which may be ending.
        if not _in_background(terminal):
            set_modes(before)

    def take(*_: object) -> None:
        if not _in_background(terminal):
            set_modes(quiet)

    AT_THE_END.append(give_back)
    before_stop = signal.signal(signal.SIGCONT, take)  # shells set their own modes after Ctrl-Z
    try:
        take()
        yield
        set_modes(before)  # in the background, this call waits for `fg`; the next prompt would, too
    finally:
        signal.signal(signal.SIGCONT, before_stop)
        give_back()
        AT_THE_END.remove(give_back)


def _in_background(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:  # not the controlling terminal of this process
        return False


@contextmanager
def handled_by(act: Callable[[], object]) -> Iterator[None]:
    """Let each SIGINT inside this context call `act` in the main thread, instead of ending the process."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, CommandHandler(lambda _: act()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def first_handled_by(act: Callable[[int], object], numbers: Iterable[int]) -> Iterator[None]:
    """Inside this context, let the first signal in `numbers` call `act` instead of ending the process.

    `act` runs in the main thread, and gets the number of the signal. A second signal ends the process as usual.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    acted = False

    def restore() -> None:
        for number in handled:
            signal.signal(number, before[number])

    def end(number: int) -> None:
        restore()
        signal.raise_signal(number)

    def act_once(first: int) -> None:
        nonlocal acted
        if acted:  # the signal came twice before the next lines ran: `timeout`, for example, sends it twice
            return
        acted = True
        for number in handled:  # without a handler of ours, the watcher thread would end the process
            signal.signal(number, CommandHandler(end))
        act(first)

    for number in handled:
        signal.signal(number, CommandHandler(act_once))
    try:
        yield
    finally:
        restore()
