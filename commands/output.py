"""Results on stdout, as bytes that nothing changes, and the end of a command that failed."""

from __future__ import annotations

import re
import shutil
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from llamaspec.model.generation import Generation


def write(text: str):
    """Write text to stdout at once, in UTF-8 whatever the locale is."""
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def write_json(value: object):
    """Write a value to stdout as one JSON object."""
    import json

    write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


class Wrapper:
    """Pass text on to `out`, with line breaks between words, so that no word is cut at a terminal's edge.

    A word is held back until it is known whether it fits on the line.

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
        self._space = self._word = ""
        self._within = False  # whether what comes next belongs to a word that is longer than a line

    def feed(self, text: str) -> None:
        """Pass on what is certain of `text` and of what was held back."""
        for character in text:
            if character == "\n":
                self.finish()
                self._out("\n")
                self._column, self._within = 0, False
            elif character.isspace():
                if self._word:
                    self.finish()
                self._within = False
                self._space += character
            elif cells(character) == 2:  # Chinese and Japanese break anywhere
                self.finish()
                self._word, self._within = character, False
            else:
                self._word += character
                if cells(self._word) > self._width():
                    self.finish()
                    self._within = True

    def finish(self) -> None:
        """Pass on what was held back: the text is over."""
        needed = cells(self._space) + cells(self._word)
        if self._word and self._column and not self._within and self._column + needed > self._width():
            self._out(f"\n{self._word}")
            self._column = cells(self._word)
        elif self._word or self._space:
            self._out(self._space + self._word)
            self._column += needed
        self._space = self._word = ""


def cells(text: str) -> int:
    """Count the columns that a terminal needs for a text.

    >>> cells("fox"), cells("狐"), cells("e\\u0301")
    (3, 2, 1)
    """
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def stream(
    generation: Generation, *, prompt: str = "", answer: bool = False, wrap: bool = False, thoughts: bool = False
):
    """Print `prompt` and tokens as they come, then a newline.

    An `answer` begins with a word, though templates put a space before it. With `wrap`, words are wrapped at the edge
    of a terminal; what is piped into another program stays as it is. With `thoughts`, what a model thinks before it
    answers goes to stderr, which a terminal shows dim; otherwise a terminal is told that it thinks.
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
    """Print a message on stderr, where it disturbs no result; a terminal does not cut its words.

    A message that cannot be written, as on a full disk, is lost, and nothing else.
    """
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        message = "\n".join(wrapped(line, width) for line in message.split("\n"))
    with suppress(OSError):
        click.echo(message, err=True)


def wrapped(line: str, width: int) -> str:
    """Break a line between words, so that no word is cut at a terminal's edge; a longer word is left whole.

    >>> wrapped("  Once upon a time, there was", 14)
    '  Once upon a\\ntime, there\\nwas'
    >>> wrapped("it is in /home/ann/.cache/llamaspec/compiled now", 14)
    'it is in\\n/home/ann/.cache/llamaspec/compiled\\nnow'
    """
    lines: list[str] = []
    wrapper = Wrapper(lines.append, width=lambda: width)
    wrapper.feed(line)
    wrapper.finish()
    return "".join(lines)


def write_rows(*rows: str):
    """Write rows of words to stdout, which a terminal that is too narrow does not cut.

    What stands left of the last two spaces of a row is its label: the text goes on below itself.
    """
    columns = shutil.get_terminal_size().columns
    write("".join(f"{below_itself(row, columns) if sys.stdout.isatty() else row}\n" for row in rows))


def below_itself(row: str, columns: int) -> str:
    """Break a row between words, so that its text stays right of its label.

    >>> below_itself("  law     a row alone gives the same", 24)
    '  law     a row alone\\n          gives the same'
    """
    label = re.match(r"(\s*\S+ {2,})*\s*", row)
    indent = label.end() if label and label.end() <= columns // 2 else 0
    return row[:indent] + wrapped(row[indent:], columns - indent).replace("\n", "\n" + " " * indent)


def fail(message: str, status: int) -> NoReturn:
    """End the process with an error of one line."""
    say(f"error: {' '.join(message.split())}")
    sys.exit(status)


def one_line(error: Exception) -> str:
    """Say what an error means to whoever typed the command: its own words, or that the fault is ours."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:  # without Python's number
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ValueError | MemoryError | OSError | FloatingPointError):
        return text
    if type(error).__name__ == "JaxRuntimeError":
        from llamaspec.model.running.device import is_full, no_room_to_start

        if is_full(text):
            return no_room_to_start()
    if isinstance(error, ModuleNotFoundError) and error.name and not _is_ours(error.name):
        # docs/verify-your-kernel.md installs no more than `verify` needs.
        return f"{text}: this Python lacks packages that llamaspec needs: pip install PATH/TO/llamaspec"
    return f"{type(error).__name__}: {text} (a fault of llamaspec: --debug shows where)"


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "llamaspec"
