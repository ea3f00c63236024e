"""Submits one HTTP request to the engine as one engine request per choice, and turns the engine's events into text."""

from collections.abc import Sequence
from functools import partial
from time import perf_counter

from llamaspec.serving.metrics import Metrics
from llamaspec.serving.openai import Refusal
from llamaspec.serving.openai_answers import FinishReason, Usage
from llamaspec.serving.prompts import Prompt, too_long
from llamaspec.serving.request import (
    NO_WAY_ON,
    Deliver,
    Engine,
    Event,
    Finished,
    PromptLogprobs,
    PromptTooLong,
    QueueFull,
    Request,
    Tokens,
)
from llamaspec.serving.request import TopLogprobs as Likeliest
from llamaspec.serving.streaming import AnswerPiece, DrawnToken, Inbox, TextReader

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "context": "length"}

# With this header, OpenAI's clients do not repeat a request after status 500 or 503. A repeated request would fail
# again.
NO_RETRY = {"x-should-retry": "false"}


class Choice:
    """One generated text of an answer. If the client set `echo`, the text begins with the prompt."""

    def __init__(self, index: int, request: Request, prompt: Prompt, reader: TextReader, *, echo: TextReader | None):
        """Store the arguments. `reader` decodes the drawn tokens of `request`. `echo`, if given, decodes the prompt."""
        self.index = index
        self.request = request
        self.prompt = prompt
        self.number: int | None = None  # the engine's number of the request
        self.finish_reason: FinishReason | None = None
        self.refusal: Refusal | None = None  # the error that ended the text early
        self._reader = reader
        self._echo = echo
        self._before = 0  # characters of the echoed prompt
        if echo and request.prompt_logprobs is None:
            self._echo_prompt(None)

    @property
    def count(self) -> int:
        """The number of tokens drawn for this choice, including the one that stopped it."""
        return self._reader.count

    @property
    def ended(self) -> bool:
        """True if this choice is complete or has failed."""
        return self.finish_reason is not None or self.refusal is not None

    def take(self, event: Event) -> None:
        """Handle an event of the engine. Events after the end of the choice are ignored."""
        if self.ended:
            return
        match event:
            case PromptLogprobs():
                self._echo_prompt(event)
            case Tokens():
                self._reader.feed(_drawn_tokens(event))
                if self._reader.stopped:
                    self.finish_reason = "stop"
            case Finished(reason=reason) if reason in REASONS:
                self._reader.finish()
                self.finish_reason = REASONS[reason]
            case Finished():
                self.refusal = refusal_of(event)

    def piece(self) -> AnswerPiece:
        """Return the text and tokens that are new since the last call."""
        piece = self._reader.piece()
        tokens = [placed._replace(start=placed.start + self._before) for placed in piece.tokens]
        if self._echo is None:
            return piece._replace(tokens=tokens)
        prompt = self._echo.piece()
        return AnswerPiece(prompt.text + piece.text, [*prompt.tokens, *tokens])

    def _echo_prompt(self, known: PromptLogprobs | None) -> None:
        if self._echo is None:
            return
        ids = self.prompt.ids
        if known is None:
            self._echo.feed([DrawnToken(token) for token in ids])
        else:
            after = zip(ids[1:], known.logprobs, known.top_logprobs, strict=True)
            self._echo.feed([DrawnToken(ids[0]), *(DrawnToken(token, lp, _pairs(top)) for token, lp, top in after)])
        self._echo.finish()
        self._before = self._echo.length


class Answering:
    """The engine requests of one HTTP request."""

    def __init__(self, engine: Engine, choices: Sequence[Choice], metrics: Metrics):
        """Prepare to submit the requests of `choices`. The running event loop will receive their events."""
        self.choices = choices
        self._engine = engine
        self._metrics = metrics
        self._inbox = Inbox()
        self._began = self._latest = perf_counter()

    @property
    def open(self) -> bool:
        """True if at least one choice is unfinished."""
        return not all(choice.ended for choice in self.choices)

    @property
    def usage(self) -> Usage:
        """The token counts so far. A prompt with several choices counts once."""
        read = sum({id(choice.prompt): len(choice.prompt.ids) for choice in self.choices}.values())
        drawn = sum(choice.count for choice in self.choices)
        return Usage(prompt_tokens=read, completion_tokens=drawn, total_tokens=read + drawn)

    def start(self) -> None:
        """Submit all requests to the engine.

        If the engine refuses one of them, cancels the others and raises Refusal, or QueueFull if the queue is full.
        """
        try:
            for choice in self.choices:
                self._submit(choice)
        except (Refusal, QueueFull):
            self.cancel()
            raise

    async def news(self) -> list[Choice]:
        """Wait for events, and return the choices that have new text or have ended."""
        changed: dict[int, Choice] = {}
        for index, event in await self._inbox.take():
            choice = self.choices[index]
            if choice.ended:
                continue
            before = choice.count
            choice.take(event)
            self._time(choice.count - before, first=before == 0)
            changed[index] = choice
            if choice.ended and isinstance(event, Tokens) and choice.number is not None:
                self._engine.cancel(choice.number)  # the engine knows stop tokens, but not stop strings
        return list(changed.values())

    def cancel(self) -> None:
        """Cancel all unfinished requests. Calling this again does nothing."""
        for choice in self.choices:
            if choice.number is not None and not choice.ended:
                self._engine.cancel(choice.number)

    def _submit(self, choice: Choice) -> None:
        deliver = partial(self._inbox.put, choice.index)
        choice.number = submit(self._engine, choice.request, deliver, choice.prompt)

    def _time(self, count: int, *, first: bool) -> None:
        if count == 0:
            return
        now = perf_counter()
        if first:
            self._metrics.first_token_seconds.observe(now - self._began)
        else:
            self._metrics.token_seconds.observe((now - self._latest) / count)
        self._latest = now


def submit(engine: Engine, request: Request, deliver: Deliver, prompt: Prompt) -> int:
    """Submit a request to the engine, and return its number.

    Raises QueueFull if the engine accepts no request now, and Refusal if it has failed or refuses this request.
    """
    try:
        return engine.submit(request, deliver)
    except QueueFull:
        if engine.failed:
            raise Refusal("the engine has failed", status=503, code="engine_failed") from None
        raise
    except PromptTooLong:
        raise too_long(f"{len(prompt.ids):,} tokens", engine.context, prompt.param) from None
    except ValueError as error:
        raise Refusal(str(error)) from None


def queue_full(message: str) -> Refusal:
    """Make the error response for a request that does not fit in the queue."""
    return Refusal(message, status=429, code="queue_full", headers={"Retry-After": "1"})


def shutting_down() -> Refusal:
    """Make the error response for a request that the server drops because it is shutting down."""
    headers = {"Retry-After": "5"}  # seconds
    return Refusal("the server is shutting down", status=503, code="shutting_down", headers=headers)


def expired() -> Refusal:
    """Make the error response for a request that exceeded its time limit."""
    headers = {"Retry-After": "5"} | NO_RETRY
    return Refusal("the request exceeded its time limit", status=503, code="expired", headers=headers)


def _drawn_tokens(event: Tokens) -> list[DrawnToken]:
    if event.logprobs is None or event.top_logprobs is None:
        return [DrawnToken(token) for token in event.ids]
    known = zip(event.ids, event.logprobs, event.top_logprobs, strict=True)
    return [DrawnToken(token, logprob, _pairs(top)) for token, logprob, top in known]


def _pairs(top: Likeliest) -> tuple[tuple[int, float], ...]:
    return tuple(zip(top.ids, top.logprobs, strict=True))


def refusal_of(event: Finished) -> Refusal:
    """Make the error response for a request that the engine ended early."""
    match event.reason:
        case "cancelled":  # the server is shutting down; a client that has disconnected gets no response
            return shutting_down()
        case "expired":
            return expired()
    if event.message == NO_WAY_ON:
        return Refusal(event.message, code="invalid_schema")
    return Refusal(event.message or "the engine failed", status=500, code="engine_error", headers=NO_RETRY)
