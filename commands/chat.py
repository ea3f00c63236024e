"""`chat`: a conversation at the terminal or line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from commands.loading import cache_folder, checked_request, load, print_seed
from commands.options import (
    Verb,
    combined,
    max_new_tokens,
    model_option,
    running_options,
    sampling_options,
    tokenizer_option,
)
from commands.output import stream


@click.command(cls=Verb)
@click.option("--system", help="What the model is told before the conversation.")
@combined(model_option, tokenizer_option, max_new_tokens(512), sampling_options, running_options)
def chat(system: str | None, **options: Any):
    """Talk with a model. /reset forgets, /exit leaves; Ctrl-C stops an answer.

    Reads lines from standard input when that is not a terminal, and answers each.
    """
    from model.chat.chat import Chat
    from model.chat.template import find_template
    from model.checkpoints.open import place_of

    request = checked_request(options)
    llama = load(options, greedy=request["sampling"].greedy)
    places = [place for place in (options["tokenizer"], place_of(options["model"])) if place]
    conversation = Chat(llama, find_template(llama.tokenizer, *places), system=system)
    print_seed(options, request["seed"])
    if sys.stdin.isatty():
        click.echo("/reset forgets, /exit leaves, Ctrl-C stops an answer", err=True)
    ask = _terminal_lines() if sys.stdin.isatty() else (line.rstrip("\r\n") for line in sys.stdin)
    for line in ask:
        match line.strip():
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                conversation.reset()
                click.echo("forgotten", err=True)
                continue
        try:
            with _interruption() as interrupted:
                stream(conversation.reply(line, interrupted=interrupted, **request), answer=True)
        except ValueError as error:
            if not sys.stdin.isatty():
                raise
            click.echo(f"error: {error}", err=True)


def _terminal_lines() -> Iterator[str]:
    """Lines as a person types them, with editing and a history; ends at Ctrl-D."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.output import create_output

    folder = cache_folder()
    history = FileHistory(str(folder / "chat_history")) if folder else InMemoryHistory()
    session = PromptSession("> ", history=history, output=create_output(stdout=sys.stderr))
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Within it Ctrl-C raises nothing; the function that it gives says whether it was pressed."""
    import signal

    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
