"""`doctor`: this machine and what would run on it."""

from __future__ import annotations

import click

from commands.loading import prepare_jax
from commands.options import Verb, json_option
from commands.output import write_json


@click.command(cls=Verb)
@json_option
def doctor(as_json: bool):
    """What is installed here, what would run, and what is missing."""
    prepare_jax()
    from model.insight.doctor import examine

    report = examine()
    if as_json:
        write_json(report)
        return
    for section, entries in report.items():
        click.echo(section)
        for name, value in entries.items():
            click.echo(f"  {name:16}{value}")
