"""Turns drawn tokens into text: complete characters, without stop strings, with the position of each token.

A slow client costs no memory per token, because we join the text that it has not received yet into one piece.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from llamaspec.model.chat.channels import Channels, ChannelText
from llamaspec.model.generation import StopTexts
from llamaspec.model.tokenizers.tokenizer import Decoder, Tokenizer


class DrawnToken(NamedTuple):
    """A drawn token, with log-probabilities if the request asked for them."""

    id: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()  # (id, log-probability), from the likeliest on


class Placed(NamedTuple):
    """A token, and the offset of its text in the text of the choice, in characters."""

    token: DrawnToken
    start: int
    first: bool  # whether the token begins a text, so that its leading space is dropped


class CallPiece(NamedTuple):
    """A piece of a tool call: more of its arguments. The first piece also has the name of the function."""

    number: int  # index of the call in its answer
    name: str | None
    arguments: str


class AnswerPiece(NamedTuple):
    """A piece of an answer: text with its tokens, reasoning, and pieces of tool calls."""

    text: str
    tokens: list[Placed]
    thoughts: str = ""
    calls: Sequence[CallPiece] = ()


class TextReader:
    """Turns the tokens of one answer into text that will not change any more.

    We hold text back while its last character is incomplete, and while its end may be the beginning of a stop string.
    We also hold back the tokens of this text. Tokens of a stop string are never returned. Reasoning and tool calls have
    no tokens, and stop strings do not apply to them.
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
        """Start an answer. If `begins`, the answer is a separate text; otherwise it continues the prompt's text.

        `begun` are the first tokens of the answer, if the prompt already ends with them. `stops` are ids that end the
        answer and have no text. If `shows_end`, the tokens of the answer include the token that ended it. `spelled`
        maps control tokens to the text that we show for them. `channels` separates reasoning and tool calls from text.
        """
        self.count = 0  # tokens drawn for this answer, including the one that stopped it
        self.stopped = False  # whether a stop string has ended the answer
        self._decoder = Decoder(tokenizer, start=begins)
        self._filter = StopTexts(stop_texts)
        self._tokenizer = tokenizer
        self._stops = stops
        self._shows_end = shows_end
        self._end: DrawnToken | None = None  # the token that ended the answer
        self._spelled = spelled or {}
        self._first = begins  # whether the next token that has text begins the answer's text
        self._decoded = 0  # number of characters decoded, both released and held back
        self._certain = 0  # number of characters released
        self._held_back: deque[tuple[Placed, int]] = deque()  # tokens held back, and the offset where their text ends
        self._text: list[str] = []
        self._tokens: list[Placed] = []
        self._channels = channels
        self._thoughts: list[str] = []
        self._calls: list[CallPiece] = []
        self._called = 0  # number of tool calls so far
        self._undecided: list[Placed] = []  # tokens that belong to text or to a channel's header; later tokens decide
        for token in begun:
            self._hear(token)
        self._thoughts = []

    @property
    def length(self) -> int:
        """The number of characters released so far."""
        return self._certain

    def feed(self, tokens: Sequence[DrawnToken]) -> None:
        """Process drawn tokens in order. Tokens after a stop string are ignored."""
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
            self._append_text(self._filter.feed(heard.text))

    def finish(self) -> None:
        """End the answer, and release the text and tokens that were held back."""
        if self.stopped:
            return
        heard = self._store(self._channels.hear(self._decoder.finish())) if self._channels else None
        text = heard.text if heard else self._decoder.finish()
        self._decide(text)
        self._append_text(self._filter.feed(text))
        self._append_text(self._filter.finish())
        if self._shows_end and self._end and not self.stopped:  # placed after the text of an incomplete character
            self._tokens.append(Placed(self._end, self._decoded, self._first))

    def piece(self) -> AnswerPiece:
        """Return the text and tokens that were released since the last call."""
        piece = AnswerPiece("".join(self._text), self._tokens, "".join(self._thoughts), self._calls)
        self._text, self._tokens, self._thoughts, self._calls = [], [], [], []
        return piece

    def _hear(self, token: int) -> ChannelText:
        """Decode a token. Returns new text, and stores new reasoning and tool calls."""
        if self._channels is None:
            return ChannelText("" if token in self._stops else self._decode(token))
        if self._channels.ends_character(token):
            return self._store(self._channels.feed(token, self._decoder.finish()))
        return self._store(self._channels.feed(token, "" if token in self._stops else self._decode(token)))

    def _decide(self, text: str) -> None:
        """Count the characters of the decoded `text`, and decide where the undecided tokens belong.

        If `text` is not empty, the tokens belong to it. If it is empty, the tokens belong to the header of a channel,
        which the answer does not show.
        """
        self._decoded += len(text)
        if text:
            self._held_back += [(placed, self._decoded) for placed in self._undecided]
        self._undecided = []

    def _store(self, heard: ChannelText) -> ChannelText:
        """Store the reasoning and tool calls that came with a piece of text."""
        if heard.thoughts:
            self._thoughts.append(heard.thoughts)
        if heard.called is not None:
            self._called += 1
        if heard.called is not None or heard.arguments:
            self._calls.append(CallPiece(self._called - 1, heard.called, heard.arguments))
        return heard

    def _decode(self, token: int) -> str:
        if token in self._spelled:
            return self._decoder.finish() + self._spelled[token]  # first, the bytes of an incomplete character
        self._first = self._first and not self._tokenizer.bytes_of(token)
        return self._decoder.feed(token)

    def _append_text(self, text: str) -> None:
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
        if self.stopped:  # if the stop string begins inside a token, the token's text before it is released
            self._tokens += [placed for placed, _ in self._held_back if placed.start < self._certain]
            self._held_back.clear()

    def _is_of_stop_text(self, placed: Placed) -> bool:
        return self.stopped and placed.start >= self._certain


class Inbox:
    """Passes events from the engine's thread to a coroutine."""

    def __init__(self):
        """Deliver events to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._events: list[tuple[int, Any]] = []
        self._news = asyncio.Event()

    def put(self, index: int, event: Any) -> None:
        """Pass on an event of the request with this index. Any thread may call this method."""
        with suppress(RuntimeError):  # the event loop has ended, so there is no reader
            self._loop.call_soon_threadsafe(self._arrive, index, event)

    async def take(self) -> list[tuple[int, Any]]:
        """Wait for events, and return all that have arrived."""
        await self._news.wait()
        self._news.clear()
        events, self._events = self._events, []
        return events

    def _arrive(self, index: int, event: Any) -> None:
        self._events.append((index, event))
        self._news.set()


def server_sent(data: Any, *, event: str | None = None) -> bytes:
    """Format one server-sent event: `data` as JSON, or unchanged if it is a string.

    In JSON, we escape the Unicode characters that some clients treat as the end of a line.
    """
    body = data.encode() if isinstance(data, str) else _in_one_line(msgspec.json.encode(data))
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + body + b"\n\n"


def _in_one_line(json: bytes) -> bytes:
    """Escape the characters that end a line in Unicode, but do not end one in server-sent events.

    >>> _in_one_line('{"a": "b\u2028c"}'.encode())
    b'{"a": "b\\\\u2028c"}'
    """
    for character in "\u0085\u2028\u2029":
        json = json.replace(character.encode(), f"\\u{ord(character):04x}".encode())
    return json
