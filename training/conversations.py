"""Reads data for fine-tuning from JSON lines in TRL's formats, and decides which tokens count in the loss.

    {"text": "..."}                                              every token counts
    {"prompt": "...", "completion": "..."}                       the completion counts
    {"messages": [{"role": "user", "content": "..."}, ...]}      the assistant's answers count
    {"prompt": [message, ...], "completion": [message, ...]}     the assistant's answers in the completion count
    {"prompt": ..., "chosen": ..., "rejected": ...}              a preference: two completions of one prompt
    {"prompt": ..., "answer": "..."}                             a question, and the answer that earns the reward

A chat template says which characters of a conversation belong to the assistant. Some templates have `{% generation %}`
tags around them. For other templates, we render the conversation twice for each answer: up to the answer, and with it.
The text that the second rendering adds is the answer. This is right only if each rendering begins with the rendering
before it. We refuse a template that breaks this rule (some drop earlier thoughts), so no other text counts by mistake.
An answer ends with the token that ends a turn, since the model must learn to stop.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from llamaspec.model.chat.marked_text import QUOTED, MarkedText, marked, marks_of, plain
from llamaspec.model.chat.messages import Messages, check_messages
from llamaspec.model.chat.template import ChatTemplate, SpecialTokens, turn_stops
from llamaspec.model.chat.template_process import Workers
from llamaspec.model.checkpoints.checkpoint import CheckpointError, refused
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.text import read_text
from llamaspec.model.tokenizers.tokenizer import Tokenizer, check_texts, encode_text
from llamaspec.training.data import Example, end_of_text

# Control tokens that begin a message. The prompt for an answer holds them, so no answer may.
HEADERS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>", "<|assistant|>", "<|user|>")
BEGIN, END = "\ue000", "\ue001"  # characters for private use: they mark the tag's content in a rendering
TAG = re.compile(r"\{%[-+]?\s*(end)?generation\s*([-+]?)%\}(\n?)")


class Preference(NamedTuple):
    """A chosen and a rejected completion of one prompt."""

    chosen: Example
    rejected: Example


class Question(NamedTuple):
    """A prompt, and the answer that earns the reward."""

    ids: list[int]
    answer: str


@dataclass(frozen=True)
class Reader:
    """Turns lines of data into examples, for one model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none, and conversations are refused
    end: int | None  # the id that ends a text

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer)

    @cached_property
    def _stops(self) -> frozenset[int]:
        return turn_stops(self.tokenizer, self.template)

    def example(self, line: dict[str, Any]) -> Example:
        """Make an example from a line with text, with prompt and completion, or with messages.

        Raises ValueError if the line has none of these.
        """
        match line:
            case {"messages": messages}:
                return self.conversation(_messages(messages))
            case {"prompt": list() as prompt, "completion": completion}:
                begin = _messages(prompt)
                return self.conversation([*begin, *_messages(completion)], first=len(begin))
            case {"prompt": prompt, "completion": completion}:
                return self.completion(_text("prompt", prompt), _text("completion", completion))
            case {"text": text}:
                return self.completion("", _text("text", text))
        raise ValueError(f"expected messages, or prompt and completion, or text; got {_keys(line)}")

    def preference(self, line: dict[str, Any]) -> Preference:
        """Make two examples from a line with prompt, chosen and rejected.

        The prompt may be missing if chosen and rejected are whole conversations. Raises ValueError if anything else is
        missing.
        """
        match line:
            case {"prompt": list(), "chosen": chosen, "rejected": rejected} | {
                "prompt": str(),
                "chosen": chosen,
                "rejected": rejected,
            }:
                sides = (self.example({"prompt": line["prompt"], "completion": side}) for side in (chosen, rejected))
                return Preference(*sides)
            case {"chosen": list() as chosen, "rejected": list() as rejected}:
                return Preference(*(self.conversation(_messages(side), last=True) for side in (chosen, rejected)))
        raise ValueError(f"expected prompt, chosen and rejected; got {_keys(line)}")

    def question(self, line: dict[str, Any]) -> Question:
        """Make the question from a line with prompt and answer. Raises ValueError if the line lacks one of them."""
        match line:
            case {"prompt": list() as prompt, "answer": answer}:
                if self.template is None:
                    raise ValueError(
                        "holds a conversation, but the model has no chat template: choose one with --template"
                    )
                text = self._render(_messages(prompt), prompt=True)
                return Question(self._special.encode(text), _text("answer", answer).strip())
            case {"prompt": prompt, "answer": answer}:
                ids = encode_text(self.tokenizer, _text("prompt", prompt))
                if not ids:
                    raise ValueError("prompt is empty")
                return Question(ids, _text("answer", answer).strip())
        raise ValueError(f"expected prompt and answer; got {_keys(line)}")

    def completion(self, prompt: str, text: str) -> Example:
        """Make an example of plain text. The loss counts the text and its end token, but not BOS and the prompt."""
        before = [] if self.tokenizer.bos is None else [self.tokenizer.bos]
        before += self.tokenizer.encode(prompt) if prompt else []
        ids = self.tokenizer.encode(text, start=not prompt) + ([] if self.end is None else [self.end])
        return Example([*before, *ids], [0.0] * len(before) + [1.0] * len(ids))

    def conversation(self, messages: Messages, *, first: int = 0, last: bool = False) -> Example:
        """Make an example of a conversation. The loss counts the answers from message `first` on.

        With `last`, it counts only the last message. Raises ValueError if the template does not show which text is an
        answer.
        """
        if self.template is None:
            raise ValueError("holds a conversation, but the model has no chat template: choose one with --template")
        first = len(messages) - 1 if last else first
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not answers:
            raise ValueError("has no message of the assistant to learn from")
        if not TAG.search(self.template.source):
            return self._encoded(self._by_prefixes(messages, answers))
        every = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        pieces = self._tagged(messages)
        if (blocks := sum(counts for _, counts in pieces)) != len(every):
            what = f"has {blocks} {{% generation %}} blocks with text, expected one for each of {len(every)} answers"
            raise ValueError(f"{self.template.name}: {what}")
        chosen = iter([i in answers for i in every])
        return self._encoded([(text, counts and next(chosen)) for text, counts in pieces])

    def _render(self, messages: Messages, *, prompt: bool = False) -> MarkedText:
        assert self.template
        return self.template.render(messages, add_generation_prompt=prompt)

    def _by_prefixes(self, messages: Messages, answers: Sequence[int]) -> list[tuple[MarkedText, bool]]:
        """Split a rendered conversation into pieces. Returns each piece, and whether it is one of the `answers`.

        `answers` has the indices of the messages that count.
        """
        assert self.template
        pieces: list[tuple[MarkedText, bool]] = []
        done = marked("")
        for i in answers:
            before, after = self._render(messages[:i], prompt=True), self._render(messages[: i + 1])
            for shorter, longer in ((done, before), (before, after)):
                if not plain(longer).startswith(plain(shorter)):
                    what = f"renders the messages before message {i + 1} differently if this message follows them"
                    raise ValueError(
                        f"{self.template.name}: {what}, so we cannot tell which tokens belong to the answer: "
                        "use a template with {% generation %}, or one answer per line"
                    )
            answer = after[len(before) :]
            begin = plain(answer)[: max(0, marks_of(answer).find(QUOTED))]
            if header := next((name for name in HEADERS if name in begin), None):
                what = f"writes {header} before message {i + 1}, but not in the prompt for it"
                raise ValueError(f"{self.template.name}: {what}, so the model would learn to write this header")
            pieces += [(before[len(done) :], False), (answer, True)]
            done = after
        return pieces

    def _tagged(self, messages: Messages) -> list[tuple[MarkedText, bool]]:
        """Split a rendered conversation at the template's `{% generation %}` tags.

        Returns each piece, and whether it is an answer.
        """
        assert self.template
        expected = self._render(messages)
        if BEGIN in plain(expected) or END in plain(expected):
            raise ValueError(f"holds {BEGIN!r} or {END!r}: a conversation to learn from must not contain them")
        template = replace(self.template, source=_with_marks(self.template.source))
        text, pieces, counts = template.render(messages, add_generation_prompt=False), [], False
        while True:
            begin, end = plain(text).find(BEGIN), plain(text).find(END)
            at = max(begin, end) if min(begin, end) < 0 else min(begin, end)
            piece = text if at < 0 else text[:at]
            pieces.append((piece, counts and plain(piece) != ""))
            if at < 0:
                break
            counts, text = plain(text)[at] == BEGIN, text[at + 1 :]
        if "".join(plain(piece) for piece, _ in pieces) != plain(expected):
            raise ValueError(f"{self.template.name}: its text changes if we print marks at its {{% generation %}} tags")
        return pieces

    def _encoded(self, pieces: Sequence[tuple[MarkedText, bool]]) -> Example:
        """Encode the pieces as one text. In an answer, tokens after the last token that ends a turn do not count."""
        ids: list[int] = []
        weights: list[float] = []
        done = marked("")
        for text, counts in pieces:
            new = self._special.encode(text, after=done) if done else self._special.encode(text)
            ends = [i for i, id in enumerate(new) if id in self._stops]
            length = (ends[-1] + 1 if ends else len(new)) if counts else 0
            ids += new
            weights += [1.0] * length + [0.0] * (len(new) - length)
            done = done + text
        return Example(ids, weights)


def _with_marks(source: str) -> str:
    """Add code to a template, to print a mark at each generation tag. Each tag strips white space as before."""

    def with_mark(tag: re.Match[str]) -> str:
        mark = END if tag[1] else BEGIN
        printed = f'{{{{ "{mark}" -}}}}' if tag[2] == "-" else f'{{{{ "{mark}" }}}}'
        return tag[0] + printed

    return TAG.sub(with_mark, source)


def _messages(value: Any) -> Messages:
    """Check a list of messages. A string is a single answer of the assistant."""
    return check_messages([{"role": "assistant", "content": value}] if isinstance(value, str) else value)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key} is {short(value)}, expected a string")
    if key != "prompt" and not value.strip():
        raise ValueError(f"{key} is empty")
    return value


def _keys(line: dict[str, Any]) -> str:
    return ", ".join(map(str, line))[:100] or "no key"


def read_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the JSON object of each line of a file. Skips empty lines.

    Raises CheckpointError, with the line's number, for a line that is not a JSON object.
    """
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            check_texts(value)
        except RecursionError:
            raise refused(path, f"line {number}: is nested too deeply") from None
        except ValueError as error:
            what = f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise refused(path, f"line {number}: is not usable JSON: {what}") from None
        if not isinstance(value, dict):
            raise refused(path, f"line {number}: expected a JSON object, got {short(value)}")
        yield number, value


def read_data[Read](
    path: str | Path,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    read: Callable[[Reader, dict[str, Any]], Read],
    *,
    eos: int | None = None,
) -> list[Read]:
    """Read a JSON lines file. `read` converts each line, for example `Reader.example`.

    `eos` is the id that ends a text. If it is None, we use the tokenizer's. If `read` refuses a line, raises
    CheckpointError with the line's number.
    """
    end = end_of_text(tokenizer, {}) if eos is None else eos
    examples: list[Read] = []
    with closing(Workers()) as workers:
        reader = Reader(tokenizer, template and replace(template, workers=workers), end)
        for number, line in read_lines(path):
            try:
                examples.append(read(reader, line))
            except (CheckpointError, ValueError) as error:
                raise refused(path, f"line {number}: {error}") from None
    if not examples:
        raise refused(path, "holds no example")
    return examples


def marked_text(tokenizer: Tokenizer, example: Example) -> str:
    """Convert an example to text, with « and » around the tokens that the loss counts. Control tokens have their names.

    The first token never counts, because the model does not predict it.
    """
    names = {id: name for name, id in tokenizer.special.items()}
    pieces, run, counted = [], [], False
    weights = [0.0, *example.weights[1:]]

    def flush() -> None:
        text = b"".join(part if isinstance(part, bytes) else part.encode() for part in run).decode("utf-8", "replace")
        pieces.append(f"«{text}»" if counted and run else text)
        run.clear()

    for id, weight in zip(example.ids, weights, strict=True):
        if (weight > 0) != counted:
            flush()
            counted = weight > 0
        run.append(names[id] if id in names else tokenizer.bytes_of(id))
    flush()
    return "".join(pieces)
