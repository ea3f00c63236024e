"""`lab`: exercises in debugging kernels and writing layers."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from pathlib import Path

import click

from llamaspec.commands.options import Verb, write_help_text
from llamaspec.commands.output import say, write, write_rows

NUMBER = click.argument("number", type=int)


class ExerciseCommands(click.Group):
    """A group of commands with the help format of the verbs."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help text, with its examples."""
        write_help_text(self.help or "", formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write full summaries; click would cut them to one line."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, subcommand.get_short_help_str(limit=100)) for name, subcommand in sorted(self.commands.items())]
            )


@click.group(cls=ExerciseCommands)
def lab():
    """Find the bug in each of forty broken kernels, then write a Llama yourself.

    Every exercise is a folder with a kernel in NumPy, its test, and a user's bug report. `check` tests the kernel
    against the contract that real kernels must meet.

    \b
    llamaspec lab start 1
    llamaspec lab check 1
    """


@lab.command("list", cls=Verb)
@click.option("--into", metavar="DIR", default=".", show_default=True, help="Look for solved exercises in DIR.")
def list_exercises(into: str):
    """List the exercises by number, one per line. A star marks each solved exercise."""
    from llamaspec.learn.lab.check import is_solved
    from llamaspec.learn.lab.folder import ALL, name_of

    solved = {number for number in ALL if is_solved(Path(into) / name_of(number))}
    for chapter, exercises in itertools.groupby(ALL.values(), key=lambda exercise: exercise.chapter):
        say(chapter)
        for exercise in exercises:
            write_rows(f"{exercise.number:2}{'*' if exercise.number in solved else ' '} {exercise.title}")
    if solved:
        say(f"{len(solved)} of {len(ALL)} solved")


@lab.command(cls=Verb)
@NUMBER
@click.option("--into", metavar="DIR", default=".", show_default=True, help="Create the folder lab-NN in DIR.")
def start(number: int, into: str):
    """Create the folder of an exercise."""
    from llamaspec.learn.lab.exercise import Broken
    from llamaspec.learn.lab.folder import name_of
    from llamaspec.learn.lab.folder import write as write_folder

    exercise = _exercise(number)
    folder = Path(into) / name_of(number)
    if os.path.lexists(folder):
        raise click.UsageError(f"{folder} already exists and may hold your work: remove it to begin again")
    write_folder(exercise, folder)
    there = "" if into == "." else f" --into {shlex.quote(into)}"
    task = "Fix the bug" if isinstance(exercise, Broken) else "Fill in the missing code"
    say(f"{exercise.title}\n{task} in {folder}/kernel.py, then run: llamaspec lab check {number}{there}")
    write(f"{folder}\n")


@lab.command(cls=Verb)
@NUMBER
@click.option("--into", metavar="DIR", default=".", show_default=True, help="Check the folder lab-NN in DIR.")
def check(number: int, into: str):
    """Check an exercise. Exits with 0 if it is solved, otherwise with 1."""
    from llamaspec.commands.verifying import interruptible, verify_progress
    from llamaspec.learn.lab.check import EXAMPLES
    from llamaspec.learn.lab.check import check as judge
    from llamaspec.learn.lab.folder import name_of

    exercise = _exercise(number)
    try:
        with interruptible() as check_signals, verify_progress(EXAMPLES, check_signals) as (progress, _):
            outcome = judge(exercise, Path(into) / name_of(number), progress=progress)
    except (FileNotFoundError, ImportError) as error:
        raise click.UsageError(str(error)) from None
    write("\n".join(line for line in outcome.lines if line) + "\n")
    if not outcome.solved:
        say(f"not solved yet; for a hint, run: llamaspec lab hint {number}")
        sys.exit(1)


@lab.command(cls=Verb)
@NUMBER
def hint(number: int):
    """Print a hint for an exercise."""
    write_rows(_exercise(number).hint)


@lab.command(cls=Verb)
@NUMBER
def solution(number: int):
    """Print the bug of an exercise, and real projects that had a similar bug."""
    from llamaspec.learn.lab.check import solution as solve

    write("\n".join(solve(_exercise(number))) + "\n")


def _exercise(number: int):
    from llamaspec.learn.lab.folder import exercise

    try:
        return exercise(number)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
