"""`lab`: exercises with broken kernels, and layers to write."""

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


class Group(click.Group):
    """A group with the same help format as the verbs."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the text with its examples."""
        write_help_text(self.help or "", formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the full summaries: click would cut them to one line."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, one.get_short_help_str(limit=100)) for name, one in sorted(self.commands.items())]
            )


@click.group(cls=Group)
def lab():
    """Find the wrong line of forty broken kernels, then write a Llama yourself.

    Every exercise is a folder with a kernel in NumPy, its test, and the report of a user. The same contracts judge it
    that judge real kernels.

    \b
    llamaspec lab start 1
    llamaspec lab check 1
    """


@lab.command("list", cls=Verb)
def list_exercises():
    """List the exercises, one per line, with its number first."""
    from llamaspec.learn.lab.folder import ALL

    for chapter, exercises in itertools.groupby(ALL.values(), key=lambda one: one.chapter):
        say(chapter)
        for one in exercises:
            write_rows(f"{one.number:2}  {one.title}")


@lab.command(cls=Verb)
@NUMBER
@click.option("--into", metavar="DIR", default=".", show_default=True, help="Make the folder lab-NN in this folder.")
def start(number: int, into: str):
    """Make the folder of an exercise."""
    from llamaspec.learn.lab.exercise import Broken
    from llamaspec.learn.lab.folder import name_of
    from llamaspec.learn.lab.folder import write as write_folder

    one = _exercise(number)
    folder = Path(into) / name_of(number)
    if os.path.lexists(folder):
        raise click.UsageError(f"{folder} exists and may contain work: remove it to begin again")
    write_folder(one, folder)
    there = "" if into == "." else f" --into {shlex.quote(into)}"
    task = "Repair" if isinstance(one, Broken) else "Fill in"
    say(f"{one.title}\n{task} {folder}/kernel.py, then: llamaspec lab check {number}{there}")
    write(f"{folder}\n")


@lab.command(cls=Verb)
@NUMBER
@click.option("--into", metavar="DIR", default=".", show_default=True, help="Look for the folder lab-NN here.")
def check(number: int, into: str):
    """Judge an exercise. Exits with 0 if it is solved, else with 1."""
    from llamaspec.commands.verifying import heeded, verify_progress
    from llamaspec.learn.lab.check import EXAMPLES
    from llamaspec.learn.lab.check import check as judge
    from llamaspec.learn.lab.folder import name_of

    one = _exercise(number)
    try:
        with heeded() as heed, verify_progress(EXAMPLES, heed) as (progress, _):
            outcome = judge(one, Path(into) / name_of(number), progress=progress)
    except (FileNotFoundError, ImportError) as error:
        raise click.UsageError(str(error)) from None
    write("\n".join(line for line in outcome.lines if line) + "\n")
    if not outcome.solved:
        say(f"not yet: llamaspec lab hint {number}")
        sys.exit(1)


@lab.command(cls=Verb)
@NUMBER
def hint(number: int):
    """Print a hint."""
    write_rows(_exercise(number).hint)


@lab.command(cls=Verb)
@NUMBER
def solution(number: int):
    """Print what was wrong, and where such a mistake was made before."""
    from llamaspec.learn.lab.check import solution as solve

    write("\n".join(solve(_exercise(number))) + "\n")


def _exercise(number: int):
    from llamaspec.learn.lab.folder import exercise

    try:
        return exercise(number)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
