"""Handles Ctrl-C from the first moment, before the command line is imported.

This module imports nothing from llamaspec. Its function imports `signal` only when it is called.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing `typing` takes time, and Ctrl-C would print a traceback during that time
if TYPE_CHECKING:
    from typing import NoReturn


def leave_at_interrupt() -> None:
    """End the process at Ctrl-C, until `commands.interrupt` replaces this handler. An ignored SIGINT stays ignored."""
    try:
        import signal

        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, leave)
    except KeyboardInterrupt:  # while `signal` was imported
        leave()


def leave(*_: object) -> NoReturn:
    """End the process now with the exit status of Ctrl-C, and begin a new line on a terminal."""
    try:
        if os.isatty(2):
            os.write(2, b"\n")
    finally:
        os._exit(130)
