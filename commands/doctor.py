"""`doctor`: this machine and what would run on it."""

from __future__ import annotations

import click

from commands.loading import prepare_jax
from commands.options import Verb, json_option
from commands.output import write_json, write_rows


@click.command(cls=Verb)
@json_option
def doctor(as_json: bool):
    """Say what this machine is, what runs on it, and what is missing.

    It ends in a verdict.
    """
    prepare_jax()
    from model.insight.doctor import examine

    report = examine()
    if as_json:
        write_json(report)
        return
    for section, entries in report.items():
        write_rows(section, *(f"  {name:14}  {value}" for name, value in entries.items()))
