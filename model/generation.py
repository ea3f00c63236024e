"""Turns generated tokens into text, with stop strings and timings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from llamaspec.model.chat.channels import Channels, ChannelText
from llamaspec.model.running.session import FinishReason
from llamaspec.model.running.speculation import Speculation
from llamaspec.model.tokenizers.tokenizer import Decoder, Tokenizer


class Token(NamedTuple):
    """A generated token, and the text that can be shown once the token is known.

    `text` is empty while a character is incomplete, or while the text may be the beginning of a stop string. If the
    model marks its reasoning, the reasoning is in `thoughts`, not in `text`.
    """

    id: int
    text: str
    thoughts: str = ""


class Timings(NamedTuple):
    """The times of a generation in seconds, and its tokens per second."""

    first_token_seconds: float  # from the request to the first token
    total_seconds: float
    tokens_per_second: float  # after the first token


class Generation(Iterator[Token]):
    """A completion in progress.

    Iterate over it to get tokens as they are drawn. `completion` contains the text so far, and `thoughts` the reasoning
    so far.
    """

    def __init__(
        self,
        bursts: Iterator[tuple[list[int], FinishReason | None]],
        tokenizer: Tokenizer,
        *,
        prompt: str,
        prompt_ids: Sequence[int],
        stop_texts: Sequence[str],
        stops: frozenset[int],
        seed: int,
        channels: Channels | None = None,
        speculation: Speculation | None = None,
    ):
        self.prompt = prompt
        self.prompt_tokens = len(prompt_ids)
        self.seed = seed
        self.ids: list[int] = []  # every token drawn, including one that stopped the completion
        self.completion = ""
        self.thoughts = ""  # the reasoning, if the model marks it
        self.finish_reason: FinishReason | None = None  # None: not finished
        self.channels = channels  # None: all text belongs to the answer
        self.speculation = speculation  # counts drafted and accepted tokens; None: there are no drafts
        self._text = StopTexts(stop_texts)
        self._decoder = Decoder(tokenizer, start=prompt == "")
        self.stops = stops  # ids that end the completion
        self._began = perf_counter()
        self._first = self._latest = self._began
        self._tokens = self._run(bursts)

    def __next__(self) -> Token:
        return next(self._tokens)

    @property
    def timings(self) -> Timings:
        """The times of this generation up to now."""
        decoding = self._latest - self._first
        rate = (len(self.ids) - 1) / decoding if decoding > 0 else 0.0
        return Timings(self._first - self._began, self._latest - self._began, rate)

    @property
    def first_at(self) -> float:
        """The time of the first token on the clock `time.perf_counter`.

        Before the first token, it is the time of the request.
        """
        return self._first

    def _run(self, bursts: Iterator[tuple[list[int], FinishReason | None]]) -> Iterator[Token]:
        for drawn, reason in bursts:
            self._latest = perf_counter()
            if not self.ids:
                self._first = self._latest
            for i, token in enumerate(drawn):
                last = reason is not None and i == len(drawn) - 1
                self.ids.append(token)
                ends_character = self.channels is not None and self.channels.ends_character(token)
                spelled = "" if token in self.stops or ends_character else self._decoder.feed(token)
                spelled += self._decoder.finish() if last or ends_character else ""
                heard = self.channels.feed(token, spelled) if self.channels else ChannelText(spelled)
                if last and self.channels:  # release the text that `channels` still holds back
                    heard = heard._replace(text=heard.text + self.channels.hear("").text)
                self.thoughts += heard.thoughts
                text = self._text.feed(heard.text)
                if last and not self._text.stopped:
                    text += self._text.finish()
                self.completion += text
                if self._text.stopped:
                    self.finish_reason = "stop"
                    yield Token(token, text, heard.thoughts)
                    return
                if last:
                    self.finish_reason = reason
                yield Token(token, text, heard.thoughts)
            if reason is not None and not drawn:
                yield from self._end(reason)

    def _end(self, reason: FinishReason) -> Iterator[Token]:
        """Yield the text that was held back, if a generation ends without a new token.

        The item has the id of the last token.
        """
        last_text = self._decoder.finish()
        heard = self.channels.hear(last_text) if self.channels else ChannelText(last_text)
        self.thoughts += heard.thoughts
        text = self._text.feed(heard.text) + self._text.finish()
        self.completion += text
        self.finish_reason = reason
        if text or heard.thoughts:
            yield Token(self.ids[-1], text, heard.thoughts)


@dataclass
class StopTexts:
    """A filter that passes text on up to the first stop string. It holds back text that may begin a stop string."""

    stops: Sequence[str]
    stopped: bool = False
    _pending: str = ""

    def feed(self, text: str) -> str:
        """Add new text. Returns the text that certainly comes before any stop string, and was not returned before."""
        if self.stopped:
            return ""
        text = self._pending + text
        end = min((at + len(stop) for stop in self.stops if (at := text.find(stop)) >= 0), default=None)
        if end is not None:  # the stop string that is complete first, no matter how the text was split
            self.stopped = True
            return text[: min(end - len(stop) for stop in self.stops if text[:end].endswith(stop))]
        longest = max((len(stop) for stop in self.stops), default=0)
        length = next((n for n in range(min(longest - 1, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        self._pending = text[len(text) - length :]
        return text[: len(text) - length]

    def finish(self) -> str:
        """End the completion. Returns the text that was held back."""
        text, self._pending = self._pending, ""
        return "" if self.stopped else text

    def _may_begin(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self.stops)
