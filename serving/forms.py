"""Writes answers in OpenAI's two formats, completions and chat, as one object or in chunks."""

import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from msgspec import UNSET, Struct, UnsetType

from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.serving.answers import Choice
from llamaspec.serving.openai_answers import (
    AnswerCall,
    AssistantMessage,
    CallDelta,
    CallPart,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from llamaspec.serving.streaming import AnswerPiece, CallPiece, DrawnToken, Placed
from llamaspec.serving.tools import CallReader, TextAndCalls

LEAST_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot represent, as in OpenAI's API


@dataclass(frozen=True)
class Head:
    """Fields that each answer, and each chunk of a stream, has."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@runtime_checkable
class WireFormat(Protocol):
    """A wire format for answers."""

    def answer(self, choices: list[tuple[Choice, AnswerPiece]], usage: Usage) -> Struct:
        """Build the object of a complete answer."""
        ...

    def chunks(self, choice: Choice, piece: AnswerPiece) -> list[Struct]:
        """Build the chunks for a new piece of one choice, and for its end if the choice has ended."""
        ...

    def last(self, usage: Usage) -> Struct:
        """Build the chunk with the token counts."""
        ...


class CompletionForm:
    """The format of completions: choices that continue a prompt."""

    def __init__(self, head: Head, tokenizer: Tokenizer, *, logprobs: int | None, usage: bool):
        """Write the `logprobs` likeliest tokens per position. If `usage`, every chunk has the field `usage`."""
        self._head = vars(head)
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._usage: UnsetType | None = None if usage else UNSET

    def answer(self, choices: list[tuple[Choice, AnswerPiece]], usage: Usage) -> Completion:
        """Build the object of a complete answer."""
        written = [
            CompletionChoice(choice.index, piece.text, choice.finish_reason, self._logprobs_of(piece))
            for choice, piece in choices
        ]
        return Completion(**self._head, choices=written, usage=usage)

    def chunks(self, choice: Choice, piece: AnswerPiece) -> list[Struct]:
        """Build the chunks for a new piece of one choice, and for its end if the choice has ended."""
        written: list[Struct] = []
        if piece.text or piece.tokens:
            written.append(self._chunk(CompletionChoice(choice.index, piece.text, None, self._logprobs_of(piece))))
        if choice.finish_reason:
            written.append(self._chunk(CompletionChoice(choice.index, "", choice.finish_reason)))
        return written

    def last(self, usage: Usage) -> Completion:
        """Build the chunk with the token counts."""
        return Completion(**self._head, choices=[], usage=usage)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return Completion(**self._head, choices=[choice], usage=self._usage)

    def _logprobs_of(self, piece: AnswerPiece) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        tokens = piece.tokens
        return CompletionLogprobs(
            tokens=[spell(self._tokenizer, placed.token.id, first=placed.first) for placed in tokens],
            token_logprobs=[_finite(placed.token.logprob) for placed in tokens],
            top_logprobs=[self._likeliest(placed) for placed in tokens] if self._logprobs else None,
            text_offset=[placed.start for placed in tokens],
        )

    def _likeliest(self, placed: Placed) -> dict[str, float] | None:
        """Map the spelling of each likely token to its log-probability.

        If two tokens share a spelling, keep the likelier one.
        """
        if placed.token.logprob is None:
            return None
        written: dict[str, float] = {}
        for id, logprob in placed.token.likeliest:
            written.setdefault(spell(self._tokenizer, id, first=placed.first), max(logprob, LEAST_LOGPROB))
        return written


class ChatForm:
    """The format of chat: answers to a conversation."""

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer,
        *,
        logprobs: bool,
        usage: bool,
        count: int = 1,
        reader: Callable[[], CallReader] | None = None,
    ):
        """Write log-probabilities if `logprobs` is set. If `usage` is set, every chunk has the field `usage`.

        An answer has `count` choices. `reader` makes a parser for each choice, which separates tool calls from text.
        """
        self._to_begin = range(count)  # choices that have no chunk yet
        self._head = vars(head)
        self._reader = reader
        self._readers: dict[int, CallReader] = {}  # by the index of the choice
        self._called: set[int] = set()  # choices with tool calls from a channel, not from the text
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._usage: UnsetType | None = None if usage else UNSET

    def answer(self, choices: list[tuple[Choice, AnswerPiece]], usage: Usage) -> ChatCompletion:
        """Build the object of a complete answer."""
        written = []
        for choice, piece in choices:
            parsed = self._parse(choice, piece)
            calls = _whole_calls(parsed.calls)
            message = AssistantMessage(
                None if calls and not parsed.text else parsed.text,
                reasoning_content=piece.thoughts or UNSET,
                tool_calls=calls or UNSET,
            )
            written.append(ChatChoice(choice.index, message, self._reason(choice), self._logprobs_of(piece)))
        return ChatCompletion(**self._head, choices=written, usage=usage)

    def chunks(self, choice: Choice, piece: AnswerPiece) -> list[Struct]:
        """Build the chunks for a new piece of one choice, and for its end if the choice has ended.

        A stream begins with the roles of all choices in order, because OpenAI's client fails if another choice comes
        first.
        """
        parsed = self._parse(choice, piece)
        deltas = [Delta(reasoning_content=piece.thoughts)] if piece.thoughts else []
        about = len(deltas)  # index of the delta with the log-probabilities
        if parsed.text or (self._logprobs and piece.tokens and not parsed.calls):
            deltas.append(Delta(content=parsed.text))
        deltas += [Delta(tool_calls=[_delta(call)]) for call in parsed.calls]
        first = [ChatChunkChoice(index, Delta(content="", role="assistant")) for index in self._to_begin]
        self._to_begin = range(0)
        written: list[Struct] = [*map(self._chunk, first)]
        for i, delta in enumerate(deltas):
            logprobs = self._logprobs_of(piece) if i == about and piece.tokens else None
            written.append(self._chunk(ChatChunkChoice(choice.index, delta, logprobs=logprobs)))
        if choice.finish_reason:
            written.append(self._chunk(ChatChunkChoice(choice.index, Delta(), self._reason(choice))))
        return written

    def last(self, usage: Usage) -> ChatChunk:
        """Build the chunk with the token counts."""
        return ChatChunk(**self._head, choices=[], usage=usage)

    def _parse(self, choice: Choice, piece: AnswerPiece) -> TextAndCalls:
        """Separate the tool calls in a piece from its text."""
        if piece.calls:
            self._called.add(choice.index)
        if self._reader is None:
            return TextAndCalls(piece.text, [*piece.calls])
        if choice.index not in self._readers:
            self._readers[choice.index] = self._reader()
        reader = self._readers[choice.index]
        parsed = reader.feed(piece.text)
        if not choice.finish_reason:
            return parsed
        end = reader.finish()
        return TextAndCalls(parsed.text + end.text, parsed.calls + end.calls)

    def _reason(self, choice: Choice) -> FinishReason | None:
        """Return the finish reason: `tool_calls` if the model ended its answer after complete tool calls."""
        reader = self._readers.get(choice.index)
        waits = reader.is_complete if reader else choice.index in self._called
        return "tool_calls" if choice.finish_reason == "stop" and waits else choice.finish_reason

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(**self._head, choices=[choice], usage=self._usage)

    def _logprobs_of(self, piece: AnswerPiece) -> ChatLogprobs | None:
        return ChatLogprobs([self._token(placed) for placed in piece.tokens]) if self._logprobs else None

    def _token(self, placed: Placed) -> TokenLogprob:
        token = placed.token
        likeliest = [self._candidate(DrawnToken(id, logprob), placed.first) for id, logprob in token.likeliest]
        drawn = self._candidate(token, placed.first)
        return TokenLogprob(drawn.token, drawn.logprob, drawn.bytes, drawn.id, likeliest)

    def _candidate(self, token: DrawnToken, first: bool) -> TopLogprob:
        name = spell(self._tokenizer, token.id, first=first)
        raw = _bytes_of(self._tokenizer, token.id, first=first)
        return TopLogprob(name, _finite(token.logprob) or 0.0, list(raw), token.id)


def _delta(piece: CallPiece) -> CallDelta:
    if piece.name is None:
        return CallDelta(piece.number, CallPart(piece.arguments))
    return CallDelta(piece.number, CallPart(piece.arguments, piece.name), _call_id(), "function")


def _whole_calls(pieces: list[CallPiece]) -> list[AnswerCall]:
    calls: list[AnswerCall] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append(AnswerCall(_call_id(), CallPart("", piece.name)))
        calls[-1].function.arguments += piece.arguments
    return calls


def _call_id() -> str:
    """Make the id of a tool call: nine letters or digits, as Mistral's templates require."""
    return uuid.uuid4().hex[:9]


def spell(tokenizer: Tokenizer, token: int, *, first: bool = False) -> str:
    """Spell a token: its text, its name if it is special, or its bytes if a character is incomplete (as OpenAI does).

    `first` says that the token begins a text, so that its leading space is dropped.
    """
    raw = _bytes_of(tokenizer, token, first=first)
    if not raw:
        return tokenizer.piece(token) if token < tokenizer.vocab else ""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _bytes_of(tokenizer: Tokenizer, token: int, *, first: bool) -> bytes:
    return tokenizer.first_bytes_of(token) if first else tokenizer.bytes_of(token)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None or math.isnan(logprob) else max(logprob, LEAST_LOGPROB)
