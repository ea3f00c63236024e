"""Progress on stderr while a model loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REDRAWN = 3  # times a second
# Stages of unknown length, with the texts that we show for them. Their bar only pulses.
WITHOUT_SHARE = {"starting": "starting JAX", "compiling": "compiling (only the first time)"}


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], object]]:
    """Show a bar with the name of the stage on stderr, if stderr is a terminal."""
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
