"""Drawn tokens as text: whole characters, no part of a stop text, and each token with the text that it brought.

A reader that takes its time costs no memory for each token: what it has not taken yet is joined into one piece.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from llamaspec.model.chat.channels import Channels, Heard
from llamaspec.model.generation import StopTexts
from llamaspec.model.tokenizers.tokenizer import Decoder, Tokenizer


class Drawn(NamedTuple):
    """A drawn token. The log-probabilities are there if they were asked for."""

    id: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()  # ids and log-probabilities, the likeliest first


class Placed(NamedTuple):
    """A token, and where its text begins in the whole text, in characters."""

    token: Drawn
    start: int
    first: bool  # whether it begins a text, and so has no space in front


class CallPiece(NamedTuple):
    """A piece of a call: the function's name where it begins, and more of its arguments."""

    number: int  # of the call, in its answer
    name: str | None
    arguments: str


class Piece(NamedTuple):
    """A piece of an answer: its text, and the tokens that brought it; beside it, thoughts and calls of their own."""

    text: str
    tokens: list[Placed]
    thoughts: str = ""
    calls: Sequence[CallPiece] = ()


class TextReader:
    """Turns the tokens of one answer into text that is certain.

    Text stays back while a character lacks bytes, and while it may be the beginning of a stop text. A token stays back
    as long as its text. Tokens of a stop text never come out. Thoughts and calls come with neither tokens nor stop
    texts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        begins: bool,
        begun: Sequence[int] = (),
        stop_texts: Sequence[str] = (),
        stops: frozenset[int] = frozenset(),
        shows_end: bool = False,
        spelled: Mapping[int, str] | None = None,
        channels: Channels | None = None,
    ):
        """Begin an answer, which `begins` a text or continues one.

        The answer may have `begun` with tokens whose text is known. `stops` are ids that end it and have no text; the
        one that does is its last token if `shows_end`. `spelled` are control tokens that are part of the text here.
        `channels` tells thoughts and calls from text.
        """
        self.count = 0  # tokens that were drawn for the text, a stopping one included
        self.stopped = False  # whether a stop text has ended the answer
        self._decoder = Decoder(tokenizer, start=begins)
        self._filter = StopTexts(stop_texts)
        self._tokenizer = tokenizer
        self._stops = stops
        self._shows_end = shows_end
        self._end: Drawn | None = None  # the token that has ended the answer
        self._spelled = spelled or {}
        self._first = begins  # whether the next token with a text begins it
        self._decoded = 0  # characters that are known, whether certain or not
        self._certain = 0  # characters that have come out
        self._held: deque[tuple[Placed, int]] = deque()  # tokens that have not come out, and the end of their text
        self._text: list[str] = []
        self._tokens: list[Placed] = []
        self._channels = channels
        self._thoughts: list[str] = []
        self._calls: list[CallPiece] = []
        self._called = 0  # calls so far
        self._undecided: list[Placed] = []  # tokens that are text or the rest of a header
        for token in begun:
            self._hear(token)
        self._thoughts = []

    @property
    def length(self) -> int:
        """The number of characters that have come out, taken or not."""
        return self._certain

    def feed(self, tokens: Sequence[Drawn]) -> None:
        """Take tokens as they were drawn. Tokens after a stop text are ignored."""
        for token in tokens:
            if self.stopped:
                return
            self.count += 1
            placed = Placed(token, self._decoded, self._first)
            heard = self._hear(token.id)
            if heard.waits:
                self._undecided.append(placed)
                continue
            self._decide(heard.text)
            if token.id in self._stops:
                self._end = token
            elif heard.is_answer:
                self._held.append((placed, self._decoded))
            self._out(self._filter.feed(heard.text))

    def finish(self) -> None:
        """End the text: nothing follows, so what stayed back comes out."""
        if self.stopped:
            return
        heard = self._told(self._channels.hear(self._decoder.finish())) if self._channels else None
        rest = heard.text if heard else self._decoder.finish()
        self._decide(rest)
        self._out(self._filter.feed(rest))
        self._out(self._filter.finish())
        if self._shows_end and self._end and not self.stopped:  # after the bytes of an unfinished character
            self._tokens.append(Placed(self._end, self._decoded, self._first))

    def piece(self) -> Piece:
        """Give the text and the tokens that have come out since the last call."""
        piece = Piece("".join(self._text), self._tokens, "".join(self._thoughts), self._calls)
        self._text, self._tokens, self._thoughts, self._calls = [], [], [], []
        return piece

    def _hear(self, token: int) -> Heard:
        """Take a token: what it adds to the text, and what beside it."""
        if self._channels is None:
            return Heard("" if token in self._stops else self._decode(token))
        if self._channels.ends_character(token):
            return self._told(self._channels.feed(token, self._decoder.finish()))
        return self._told(self._channels.feed(token, "" if token in self._stops else self._decode(token)))

    def _decide(self, text: str) -> None:
        """Count what has come of the text; tokens before it that were undecided are of it, or else of a header."""
        self._decoded += len(text)
        if text:
            self._held += [(placed, self._decoded) for placed in self._undecided]
        self._undecided = []

    def _told(self, heard: Heard) -> Heard:
        """Keep what comes beside the text."""
        if heard.thoughts:
            self._thoughts.append(heard.thoughts)
        if heard.called is not None:
            self._called += 1
        if heard.called is not None or heard.arguments:
            self._calls.append(CallPiece(self._called - 1, heard.called, heard.arguments))
        return heard

    def _decode(self, token: int) -> str:
        if token in self._spelled:
            return self._decoder.finish() + self._spelled[token]  # Bytes of an unfinished character come before it.
        self._first = self._first and not self._tokenizer.bytes_of(token)
        return self._decoder.feed(token)

    def _out(self, text: str) -> None:
        if text:
            self._text.append(text)
        self._certain += len(text)
        self.stopped = self._filter.stopped
        while self._held and self._held[0][1] <= self._certain and not self._is_of_stop_text(self._held[0][0]):
            self._tokens.append(self._held.popleft()[0])
        if self.stopped:  # A stop text may begin within the text of a token, whose beginning has come out.
            self._tokens += [placed for placed, _ in self._held if placed.start < self._certain]
            self._held.clear()

    def _is_of_stop_text(self, placed: Placed) -> bool:
        return self.stopped and placed.start >= self._certain


class Inbox:
    """Events of an engine's thread, on their way to a coroutine."""

    def __init__(self):
        """Belong to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._events: list[tuple[int, Any]] = []
        self._news = asyncio.Event()

    def put(self, index: int, event: Any) -> None:
        """Hand over an event of the request with this index. Any thread may call this."""
        with suppress(RuntimeError):  # The loop has ended, and with it whoever would read the event.
            self._loop.call_soon_threadsafe(self._arrive, index, event)

    async def take(self) -> list[tuple[int, Any]]:
        """Wait until there are events, and take all."""
        await self._news.wait()
        self._news.clear()
        events, self._events = self._events, []
        return events

    def _arrive(self, index: int, event: Any) -> None:
        self._events.append((index, event))
        self._news.set()


def server_sent(data: Any, *, event: str | None = None) -> bytes:
    """Format one event of a stream: `data` as JSON, or a text as it is.

    JSON on one line may hold characters that some clients take for the end of a line; they are escaped.
    """
    body = data.encode() if isinstance(data, str) else _in_one_line(msgspec.json.encode(data))
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + body + b"\n\n"


def _in_one_line(json: bytes) -> bytes:
    """Escape the characters that end a line in Unicode, though not in this format.

    >>> _in_one_line('{"a": "b\u2028c"}'.encode())
    b'{"a": "b\\\\u2028c"}'
    """
    for character in "\u0085\u2028\u2029":
        json = json.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return json
