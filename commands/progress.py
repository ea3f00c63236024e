"""Progress on stderr while a model loads, and while it is trained."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from llamaspec.training.loop import StepReport

REDRAWN = 3  # times a second
# Stages of unknown length, with the texts that we show for them. Their bar only pulses.
WITHOUT_SHARE = {"starting": "starting JAX", "compiling": "compiling (only the first time)"}


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], object]]:
    """Show a bar with the name of the stage on stderr, if stderr is a terminal.

    Yields a function that moves the bar. It takes the name of the stage, and the completed share of it, from 0 to 1.
    """
    if not sys.stderr.isatty():
        yield lambda stage, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    bar_column = BarColumn(bar_width=20 if console.width > 60 else 5)
    columns = (TextColumn("{task.description}"), bar_column, TaskProgressColumn(), TextColumn("{task.elapsed:.0f} s"))
    with Progress(*columns, console=console, transient=True, refresh_per_second=REDRAWN) as bar:
        task = bar.add_task(WITHOUT_SHARE["starting"], total=None)

        def report(stage: str, share: float) -> None:
            # `update` takes total=None to mean "unchanged", so we set the total directly.
            bar.tasks[0].total = None if stage in WITHOUT_SHARE else 1.0
            bar.update(task, description=WITHOUT_SHARE.get(stage, stage), completed=share)

        yield report


@contextmanager
def training_progress(steps: int) -> Iterator[Callable[[StepReport], object]]:
    """Show loss and tokens/s on stderr: a bar on a terminal, otherwise lines. Each evaluation is a line.

    Yields a function that takes the report of each step.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    terminal = sys.stderr.isatty()
    last_line = 0.0

    def line(progress: StepReport) -> str:
        skipped = "  skipped: its gradient is not finite" if progress.skipped else ""
        return f"step {progress.step}  loss {progress.loss:.4f}  {progress.rate:,.0f} tokens/s{skipped}"

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not terminal) as bar:
        task = bar.add_task("compiling", total=steps)

        def report(progress: StepReport):
            nonlocal last_line
            bar.update(task, description=line(progress), completed=progress.step)
            if progress.evaluation:
                bar.console.print(f"{line(progress)}  {progress.seconds:.0f} s  {progress.evaluation}", highlight=False)
            elif progress.skipped or (not terminal and progress.seconds > last_line + 30):
                last_line, text = progress.seconds, f"{line(progress)}  {progress.seconds:.0f} s"
                bar.console.print(text, highlight=False) if terminal else click.echo(text, err=True)

        yield report
