"""Turns drawn tokens into text: whole characters, no part of a stop text, and the position of each token.

A slow client costs no memory per token, because text that it has not received yet is joined into one piece.
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
    """A drawn token, with log-probabilities if they were requested."""

    id: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()  # ids and log-probabilities, the likeliest first


class Placed(NamedTuple):
    """A token, and the offset of its text in the whole text, in characters."""

    token: Drawn
    start: int
    first: bool  # whether the token begins a text, so that it has no space in front


class CallPiece(NamedTuple):
    """A piece of a call: more of its arguments, and in the first piece the function's name."""

    number: int  # of the call within its answer
    name: str | None
    arguments: str


class AnswerPiece(NamedTuple):
    """A piece of an answer: text with its tokens, thoughts, and pieces of calls."""

    text: str
    tokens: list[Placed]
    thoughts: str = ""
    calls: Sequence[CallPiece] = ()


class TextReader:
    """Turns the tokens of one answer into text that can no longer change.

    Text is held back while a character is incomplete, and while it may be the beginning of a stop text. Its tokens are
    held back with it. Tokens of a stop text are never returned. Thoughts and calls have no tokens, and stop texts do
    not apply to them.
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
        """Start an answer, which either `begins` a text or continues one.

        `begun` are tokens of the answer that the request has given. `stops` are ids that end the answer and
        have no text; if `shows_end`, the tokens of the answer include the one that ended it. `spelled` lists control
        tokens with the text that stands for them. `channels` separates thoughts and calls from text.
        """
        self.count = 0  # tokens drawn for this text, including one that stopped it
        self.stopped = False  # whether a stop text has ended the answer
        self._decoder = Decoder(tokenizer, start=begins)
        self._filter = StopTexts(stop_texts)
        self._tokenizer = tokenizer
        self._stops = stops
        self._shows_end = shows_end
        self._end: Drawn | None = None  # the token that ended the answer
        self._spelled = spelled or {}
        self._first = begins  # whether the next token with text begins the text
        self._decoded = 0  # characters decoded, released or held back
        self._certain = 0  # characters released
        self._held_back: deque[tuple[Placed, int]] = deque()  # tokens held back, and where their text ends
        self._text: list[str] = []
        self._tokens: list[Placed] = []
        self._channels = channels
        self._thoughts: list[str] = []
        self._calls: list[CallPiece] = []
        self._called = 0  # number of calls so far
        self._undecided: list[Placed] = []  # tokens that belong to text or to the header of a channel
        for token in begun:
            self._hear(token)
        self._thoughts = []

    @property
    def length(self) -> int:
        """The number of characters released so far."""
        return self._certain

    def feed(self, tokens: Sequence[Drawn]) -> None:
        """Take drawn tokens in order. Tokens after a stop text are ignored."""
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
                self._held_back.append((placed, self._decoded))
            self._out(self._filter.feed(heard.text))

    def finish(self) -> None:
        """End the text, and release the text and tokens that were held back."""
        if self.stopped:
            return
        heard = self._store(self._channels.hear(self._decoder.finish())) if self._channels else None
        text = heard.text if heard else self._decoder.finish()
        self._decide(text)
        self._out(self._filter.feed(text))
        self._out(self._filter.finish())
        if self._shows_end and self._end and not self.stopped:  # after the bytes of an incomplete character
            self._tokens.append(Placed(self._end, self._decoded, self._first))

    def piece(self) -> AnswerPiece:
        """Return the text and the tokens released since the last call."""
        piece = AnswerPiece("".join(self._text), self._tokens, "".join(self._thoughts), self._calls)
        self._text, self._tokens, self._thoughts, self._calls = [], [], [], []
        return piece

    def _hear(self, token: int) -> Heard:
        """Decode a token: return new text, and store new thoughts and calls."""
        if self._channels is None:
            return Heard("" if token in self._stops else self._decode(token))
        if self._channels.ends_character(token):
            return self._store(self._channels.feed(token, self._decoder.finish()))
        return self._store(self._channels.feed(token, "" if token in self._stops else self._decode(token)))

    def _decide(self, text: str) -> None:
        """Count decoded `text`. Undecided tokens belong to this text, or to the header of a channel if it is empty."""
        self._decoded += len(text)
        if text:
            self._held_back += [(placed, self._decoded) for placed in self._undecided]
        self._undecided = []

    def _store(self, heard: Heard) -> Heard:
        """Store the thoughts and calls that came with a piece of text."""
        if heard.thoughts:
            self._thoughts.append(heard.thoughts)
        if heard.called is not None:
            self._called += 1
        if heard.called is not None or heard.arguments:
            self._calls.append(CallPiece(self._called - 1, heard.called, heard.arguments))
        return heard

    def _decode(self, token: int) -> str:
        if token in self._spelled:
            return self._decoder.finish() + self._spelled[token]  # bytes of an incomplete character come first
        self._first = self._first and not self._tokenizer.bytes_of(token)
        return self._decoder.feed(token)

    def _out(self, text: str) -> None:
        if text:
            self._text.append(text)
        self._certain += len(text)
        self.stopped = self._filter.stopped
        while (
            self._held_back
            and self._held_back[0][1] <= self._certain
            and not self._is_of_stop_text(self._held_back[0][0])
        ):
            self._tokens.append(self._held_back.popleft()[0])
        if self.stopped:  # A stop text may begin inside a token; then the beginning of the token's text was released.
            self._tokens += [placed for placed, _ in self._held_back if placed.start < self._certain]
            self._held_back.clear()

    def _is_of_stop_text(self, placed: Placed) -> bool:
        return self.stopped and placed.start >= self._certain


class Inbox:
    """Passes events from the engine's thread to a coroutine."""

    def __init__(self):
        """Deliver events to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._events: list[tuple[int, Any]] = []
        self._news = asyncio.Event()

    def put(self, index: int, event: Any) -> None:
        """Pass an event of the request with this index. Any thread may call this."""
        with suppress(RuntimeError):  # the event loop has ended, so there is no reader
            self._loop.call_soon_threadsafe(self._arrive, index, event)

    async def take(self) -> list[tuple[int, Any]]:
        """Wait for events, and take all of them."""
        await self._news.wait()
        self._news.clear()
        events, self._events = self._events, []
        return events

    def _arrive(self, index: int, event: Any) -> None:
        self._events.append((index, event))
        self._news.set()


def server_sent(data: Any, *, event: str | None = None) -> bytes:
    """Format one event of a stream: `data` as JSON, or unchanged if it is a string.

    Some clients treat certain Unicode characters as the end of a line, so these are escaped in JSON.
    """
    body = data.encode() if isinstance(data, str) else _in_one_line(msgspec.json.encode(data))
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + body + b"\n\n"


def _in_one_line(json: bytes) -> bytes:
    """Escape the characters that end a line in Unicode but not in this format.

    >>> _in_one_line('{"a": "b\u2028c"}'.encode())
    b'{"a": "b\\\\u2028c"}'
    """
    for character in "\u0085\u2028\u2029":
        json = json.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return json
