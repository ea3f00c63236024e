"""Results on stdout, messages on stderr, and the exit of a failed command."""

from __future__ import annotations

import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from llamaspec.model.generation import Generation

# Packages that only an extra of ours installs, and the extra.
EXTRAS = {
    "optax": "train",
    **dict.fromkeys(("aiohttp", "msgspec", "prometheus_client"), "serve"),
    "flint": "prove",
    "onnx": "onnx",
}


def write(text: str):
    """Write a string to stdout at once, always in UTF-8."""
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def save_text(path: str, text: str) -> None:
    """Write a file completely or not at all. Raises ValueError if the file cannot be written."""
    from llamaspec.model.checkpoints.staging import new_file

    try:
        is_device = os.path.exists(path) and not os.path.isfile(path)  # /dev/stdout
        with nullcontext(Path(path)) if is_device else new_file(path, replace=True) as staged:
            staged.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def write_json(value: object):
    """Write a value to stdout as one JSON object."""
    import json

    write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


WIDE = (
    "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6\U0001f300-\U0003fffd"
)
PIECE = re.compile(rf"\n|[^\S\n]*(?:[{WIDE}]|[^\s{WIDE}]+)|[^\S\n]+")  # a line may break before each piece


class Wrapper:
    """Prints text as it arrives, token by token, and breaks lines between words.

    We keep the last word until it is complete, because only then do we know whether it fits on the line. Lines may
    break anywhere in Chinese and Japanese text.

    >>> lines = []
    >>> wrapper = Wrapper(lines.append, width=lambda: 12)
    >>> for part in ("Once up", "on a time,", " there was"): wrapper.feed(part)
    >>> wrapper.finish()
    >>> "".join(lines)
    'Once upon a\\ntime, there\\nwas'
    """

    def __init__(self, out: Callable[[str], object], *, width: Callable[[], int]):
        self._out = out
        self._width = width
        self._column = 0
        self._last = ""

    def feed(self, text: str) -> None:
        """Print the complete words of `text`, and keep the last word for the next call."""
        pieces = PIECE.findall(self._last + text)
        self._last = pieces.pop() if pieces and not re.search(rf"[\n{WIDE}]\Z", pieces[-1]) else ""
        for piece in pieces:
            self._print(piece)

    def finish(self) -> None:
        """Print the word that `feed` kept. Call this at the end of the text."""
        self._print(self._last)
        self._last = ""

    def _print(self, piece: str) -> None:
        word = piece.strip()
        if word and self._column and self._column + cells(piece) > self._width():
            self._out(f"\n{word}")
            self._column = cells(word)
        elif piece:
            self._out(piece)
            self._column = 0 if piece == "\n" else self._column + cells(piece)


def cells(text: str) -> int:
    """Count the columns that a terminal needs for `text`.

    >>> cells("fox"), cells("狐"), cells("e\\u0301")
    (3, 2, 1)
    """
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def stream(
    generation: Generation, *, prompt: str = "", answer: bool = False, wrap: bool = False, thoughts: bool = False
):
    """Print `prompt` and tokens as they come, then a newline.

    With `answer`, we drop the space that chat templates put before an answer. With `wrap`, lines break between words at
    the edge of a terminal, but output to a pipe or file stays unchanged. With `thoughts`, the model's reasoning goes to
    stderr, dimmed on a terminal. Without `thoughts`, a terminal only shows that the model is thinking.
    """
    wrapper = Wrapper(write, width=lambda: shutil.get_terminal_size().columns) if wrap and sys.stdout.isatty() else None
    out = wrapper.feed if wrapper else write
    out(prompt)
    begun, thinking = not answer, False
    try:
        for token in generation:
            if token.thoughts and thoughts:
                _think(token.thoughts)
            elif token.thoughts and not thinking and sys.stderr.isatty():
                say("(thinking)")
            thinking = thinking or token.thoughts != ""
            if token.text and thinking and thoughts:
                _think("\n")
            thinking = thinking and token.text == ""
            text = token.text if begun else token.text.lstrip()
            begun = begun or text != ""
            out(text)
    finally:
        if wrapper:
            wrapper.finish()
        write("\n")


def _think(text: str):
    with suppress(OSError):
        click.echo(click.style(text, dim=True) if sys.stderr.isatty() else text, err=True, nl=False)


def say(message: str):
    """Print a message on stderr, so that stdout has only the result. On a terminal, lines break between words.

    If stderr cannot be written (for example on a full disk), the message is lost and the command continues.
    """
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        message = "\n".join(wrapped(line, width) for line in message.split("\n"))
    with suppress(OSError):
        click.echo(message, err=True)


def wrapped(line: str, width: int, indent: str = "") -> str:
    """Break a line between words, and indent all lines after the first by `indent`. A word that is too long stays
    whole.

    >>> wrapped("  Once upon a time, there was", 14)
    '  Once upon a\\ntime, there\\nwas'
    >>> wrapped("it is in /home/ann/.cache/llamaspec/compiled now", 14)
    'it is in\\n/home/ann/.cache/llamaspec/compiled\\nnow'
    """
    lines = wrap(line, max(width, 1), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) or line


def write_rows(*rows: str):
    """Write rows to stdout. On a terminal, rows that are too long are broken between words."""
    columns = shutil.get_terminal_size().columns
    write("".join(f"{wrapped_row(row, columns) if sys.stdout.isatty() else row}\n" for row in rows))


def wrapped_row(row: str, columns: int) -> str:
    """Break a row between words into lines of at most `columns`.

    A row has a label, two or more spaces, and a text. New lines are indented to the start of the text.

    >>> wrapped_row("  law     batching changes nothing", 24)
    '  law     batching\\n          changes\\n          nothing'
    """
    label = re.match(r"(\s*\S+ {2,})*\s*", row)
    indent = label.end() if label and label.end() <= columns // 2 else 0
    return wrapped(row, columns, " " * indent)


def fail(message: str, status: int) -> NoReturn:
    """Print an error as one line, and end the process with `status`."""
    say(f"error: {' '.join(message.split())}")
    sys.exit(status)


def one_line(error: Exception) -> str:
    """Describe an error in one line. An error that we did not expect is described as a bug of llamaspec."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:  # leave out the errno that Python adds
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ValueError | MemoryError | OSError | FloatingPointError):
        return text
    if type(error).__name__ == "JaxRuntimeError":
        from llamaspec.model.device import is_full, no_room_to_start

        if is_full(text):
            return no_room_to_start()
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get(error.name or "")):
        return f"{error.name} is missing: pip install 'llamaspec[{extra}]'"
    if isinstance(error, ModuleNotFoundError) and error.name and not _is_ours(error.name):
        # Users of docs/verify-your-kernel.md install only the packages that `verify` needs.
        return f"{text}: this Python lacks packages that llamaspec needs: pip install PATH/TO/llamaspec"
    return f"{type(error).__name__}: {text} (this is a bug of llamaspec: --debug shows the traceback)"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "llamaspec"
