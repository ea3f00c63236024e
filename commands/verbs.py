"""A group of verbs that are imported when they are asked for. Its own help reads a table alone, and answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click

from llamaspec.commands.options import write_help_text


class NobodyReads(Exception):
    """Whoever read stdout has ended."""


class Entry(NamedTuple):
    """A verb in the table."""

    section: str  # of the list of verbs
    file: str  # the module in `commands` that has the click command, as a function of the verb's name or of `name`
    summary: str  # the first line of its help
    name: str = ""


class Verbs(click.Group):
    """A group whose commands are those of a table."""

    def __init__(self, *arguments: Any, verbs: Mapping[str, Entry], **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the verbs in the order of the help."""
        return list(self.verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb; None for a name that is none."""
        if cmd_name not in self.verbs:
            return None
        entry = self.verbs[cmd_name]
        return getattr(import_module(f"llamaspec.commands.{entry.file}"), entry.name or cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that `args` begin with. Raises UsageError with the one that a misspelled name may mean."""
        if args[0] not in self.verbs:
            from difflib import get_close_matches

            if meant := get_close_matches(args[0], self.verbs, 1):
                ctx.fail(f"No such command {args[0]!r}. Did you mean {meant[0]!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb. Raises NobodyReads for a closed pipe, which click would answer with 1, whatever that means."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise NobodyReads from error

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the text with its examples."""
        write_help_text(self.help or "", formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs by section."""
        for section in dict.fromkeys(entry.section for entry in self.verbs.values()):
            with formatter.section(section):
                verbs = [(name, entry.summary) for name, entry in self.verbs.items() if entry.section == section]
                formatter.write_dl([(f"{name:{max(map(len, self.verbs))}}", summary) for name, summary in verbs])
