"""Signals, progress bar and line breaks of `verify`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from types import FrameType
from typing import TYPE_CHECKING

import click

from llamaspec.commands.output import wrapped

if TYPE_CHECKING:
    from llamaspec.verify.campaign import Stage


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yield a function that ends the command if a signal has arrived.

    A signal handler raises an exception, but the exception may be lost: Python's garbage collector ignores it in a
    callback, and the exception of a counterexample may replace it. So the function calls the handler again.
    """
    numbers: list[int] = []
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}

    def note(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        handlers[number](number, frame)

    def check_signals() -> None:
        if numbers:
            handlers[numbers[0]](numbers[0], None)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield check_signals
        check_signals()
    finally:
        if not numbers:  # after a signal, its handler has already replaced the handlers
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def verify_progress(
    examples: int, check_signals: Callable[[], None], *, seed: int | None = None
) -> Iterator[tuple[Stage, Callable]]:
    """Show progress bars on stderr, one after the other.

    Yields a function that begins a stage with its own bar, and a context manager that hides the bar while we print.

    Shows no bar if stderr is not a terminal or rich is missing. Every step calls `check_signals`. The seed is printed
    when the first stage begins, so that an error in the options prints only one line.
    """
    unsaid = [seed] if seed is not None else []

    def say_seed() -> None:
        while unsaid:
            click.echo(f"seed {unsaid.pop()}", err=True)

    if not sys.stderr.isatty() or find_spec("rich") is None:

        def begin_unseen(stage: str, total: int | None = None) -> Callable[[int], object]:
            say_seed()
            return lambda done: check_signals()

        yield begin_unseen, nullcontext
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=examples)

        @contextmanager
        def aside():
            bar.stop()
            yield
            bar.start()

        def begin(stage: str, total: int | None = None) -> Callable[[int], object]:
            if unsaid:
                with aside():
                    say_seed()
            bar.reset(task, description=stage, total=examples if total is None else total)

            def step(done: int) -> None:
                check_signals()
                bar.update(task, completed=done)

            return step

        yield begin, aside


def for_terminal(lines: Sequence[str], columns: int) -> str:
    """Break lines between words, and indent the lines that continue. A command stays on one line, so that it can be
    copied.

    >>> print(for_terminal(["  value: at [0]: expected 2, got 1", "  llamaspec verify --replay a.json"], 24))
      value: at [0]:
          expected 2, got 1
      llamaspec verify --replay a.json
    """

    def broken(line: str) -> str:
        text = line.lstrip()
        return line if text.startswith("llamaspec ") else wrapped(line, columns, " " * (len(line) - len(text) + 4))

    return "\n".join(map(broken, lines))
