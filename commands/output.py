"""Results on stdout, as bytes that nothing changes, and the end of a command that failed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from model.generation import Generation


def write(text: str):
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def write_json(value: object):
    import json

    write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def stream(generation: Generation, *, answer: bool = False):
    """Print tokens as they come, then a newline. An `answer` begins with a word: templates put a space before it."""
    begun = not answer
    try:
        for token in generation:
            text = token.text if begun else token.text.lstrip()
            begun = begun or text != ""
            write(text)
    finally:
        write("\n")


def fail(message: str, status: int) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(status)
