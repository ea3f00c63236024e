"""A click group of verbs, each imported when it runs. The group's help only reads a table, so it answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click

from llamaspec.commands.options import write_help_text


class ReaderGone(Exception):
    """The process that read our stdout has exited."""


class Entry(NamedTuple):
    """A verb in the table."""

    section: str  # the heading in the help
    file: str  # the module in `commands` with the verb's function
    summary: str  # the first line of its help
    name: str = ""  # the name of the function, if it differs from the verb


class Verbs(click.Group):
    """A click group that finds its commands in a table of `Entry`s."""

    def __init__(self, *arguments: Any, verbs: Mapping[str, Entry], **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the verbs in the order of the help."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a verb and return its command. Returns None for an unknown name."""
        if cmd_name not in self.verbs:
            return None
        entry = self.verbs[cmd_name]
        return getattr(import_module(f"llamaspec.commands.{entry.file}"), entry.name or cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb at the start of `args`. For a misspelled verb, raises UsageError with the closest one."""
        if args[0] not in self.verbs:
            from difflib import get_close_matches

            if meant := get_close_matches(args[0], self.verbs, 1):
                ctx.fail(f"No such command {args[0]!r}. Did you mean {meant[0]!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb.

        Raises ReaderGone if stdout is a closed pipe. click would exit with 1 instead, but `verify` exits with 1 for a
        violated contract.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderGone from error

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help text, with its examples."""
        write_help_text(self.help or "", formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs, grouped by section."""
        for section in dict.fromkeys(entry.section for entry in self.verbs.values()):
            with formatter.section(section):
                verbs = [(name, entry.summary) for name, entry in self.verbs.items() if entry.section == section]
                formatter.write_dl([(f"{name:{max(map(len, self.verbs))}}", summary) for name, summary in verbs])
