"""Signals, progress bars and line wrapping for `verify`. An interrupted run gives no verdict."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from textwrap import wrap
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llamaspec.verify.campaign import Stage

UNBROKEN: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


@contextmanager
def heeded() -> Iterator[Callable[[], None]]:
    """Provide a check that ends the command if a signal arrived.

    Signal handlers raise exceptions, but an exception is lost inside a callback of the garbage collector, or if a
    counterexample replaces it. The check calls the handler again.
    """
    numbers: list[int] = []
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}

    def note(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        handlers[number](number, frame)

    def heed() -> None:
        if numbers:
            handlers[numbers[0]](numbers[0], None)

    for number in handlers:
        signal.signal(number, note)
    try:
        yield heed
        heed()
    finally:
        if not numbers:  # otherwise keep the decision of the handler that already ran
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def verify_progress(
    examples: int, heed: Callable[[], None], *, seed: int | None = None
) -> Iterator[tuple[Stage, Callable]]:
    """Show progress bars on stderr, one after the other; the second value hides them while something is printed.

    We show no bar if stderr is not a terminal or rich is missing. Every step calls `heed`. The first stage prints the
    seed; invalid options are refused earlier, in one line.
    """
    unsaid = [seed] if seed is not None else []

    def say_seed() -> None:
        while unsaid:
            click.echo(f"seed {unsaid.pop()}", err=True)

    if not sys.stderr.isatty() or find_spec("rich") is None:

        def begin_unseen(stage: str, total: int | None = None) -> Callable[[int], object]:
            say_seed()
            return lambda done: heed()

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
                heed()
                bar.update(task, completed=done)

            return step

        yield begin, aside


def for_terminal(lines: Sequence[str], columns: int) -> list[str]:
    """Wrap lines between words and indent the continuation. A command stays on one line, so that it can be copied.

    >>> for_terminal(["  value: at [0]: expected 2, got 1", "  llamaspec verify --replay a.json"], 24)
    ['  value: at [0]:', '      expected 2, got 1', '  llamaspec verify --replay a.json']
    """
    broken = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        whole = line.lstrip().startswith("llamaspec ")
        broken += [line] if whole else wrap(line, columns, subsequent_indent=indent, **UNBROKEN) or [line]
    return broken
