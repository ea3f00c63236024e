"""Separates the parts of an answer: the text for the reader, the model's reasoning, and tool calls.

Models mark their reasoning in two ways:

- Qwen 3, DeepSeek's distillations, SmolLM3 and EXAONE write `<think>REASONING</think>TEXT`. Each tag is one token. Some
  chat templates end a prompt with `<think>`, so that the answer begins with reasoning.
- gpt-oss writes a list of messages, `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant<|channel|>...`. The text
  before `<|message|>` is the message's header. Each message has a channel: analysis (the model's reasoning), commentary
  or final. A message with ` to=functions.NAME` in its header, before or after the channel, calls the tool NAME, and its
  TEXT contains the arguments. Source: the format harmony, https://github.com/openai/harmony.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from llamaspec.model.tokenizers.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HIDDEN = "analysis"
TO_TOOL = " to="  # in a header, comes before the name of the tool that the message calls
FUNCTIONS = "functions."  # prefix of the name of a function that the conversation offers
THINK, END_OF_THOUGHTS = "<think>", "</think>"


class ChannelText(NamedTuple):
    """The text that one token adds to the answer, to the reasoning or to a tool call."""

    text: str
    thoughts: str = ""
    called: str | None = None  # the name of the tool, if a call begins
    arguments: str = ""  # more of the arguments of the current call
    is_answer: bool = True  # whether the token belongs to the answer's text
    waits: bool = False  # whether only later tokens decide where this token's text belongs


@runtime_checkable
class Channels(Protocol):
    """Sorts the tokens of an answer, one at a time, into the answer's text, reasoning and tool calls."""

    @property
    def is_marked(self) -> bool:
        """True if the answer may contain tokens that are not part of its text (except the token that ended it)."""
        ...

    def ends_character(self, token: int) -> bool:
        """Return whether `token` marks a part of the answer. If so, it also ends an incomplete UTF-8 character."""
        ...

    def feed(self, token: int, text: str) -> ChannelText:
        """Process a token and its text.

        For a token that `ends_character`, `text` is the incomplete UTF-8 character before the token, or "" if there is
        none.
        """
        ...

    def hear(self, text: str) -> ChannelText:
        """Add `text` to the current part of the answer."""
        ...


class ThinkTags:
    """The `Channels` of an answer with its reasoning between `<think>` and `</think>`.

    Only white space may come before an answer's reasoning. A later `<think>` belongs to the text, for example to an
    explanation of such tags. White space at the edges of the reasoning, and white-space tokens between `</think>` and
    the text, are dropped.
    """

    def __init__(self, opens: int, closes: int, *, is_open: bool):
        """Begin an answer. `opens` and `closes` are the tags. With `is_open`, the prompt ends with `<think>`."""
        self._opens, self._closes = opens, closes
        self._part: Literal["start", "thoughts", "between", "text"] = "thoughts" if is_open else "start"
        self._begun = False  # whether the reasoning has any text
        self._space = ""  # white space at the end of the reasoning so far
        self.is_marked = is_open

    def ends_character(self, token: int) -> bool:
        """Return whether `token` is a tag that begins or ends the reasoning."""
        return token == {"start": self._opens, "thoughts": self._closes}.get(self._part)

    def feed(self, token: int, text: str) -> ChannelText:
        """Process a token and its text (see `Channels.feed`)."""
        if not self.ends_character(token):
            return self.hear(text)
        before_tag = self.hear(text)
        self._part, self.is_marked = "thoughts" if token == self._opens else "between", True
        return before_tag._replace(is_answer=False)

    def hear(self, text: str) -> ChannelText:
        """Add `text` to the reasoning or to the answer's text."""
        if self._part == "thoughts":
            text = self._space + text if self._begun else text.lstrip()
            thoughts = text.rstrip()
            self._begun, self._space = self._begun or thoughts != "", text[len(thoughts) :]
            return ChannelText("", thoughts, is_answer=False)
        if text.isspace():
            return ChannelText("", is_answer=False) if self._part == "between" else ChannelText(text)
        self._part = "text"  # without text, a token is a part of a character, or a control token
        return ChannelText(text)


class HarmonyChannels:
    """The `Channels` of gpt-oss."""

    is_marked = True

    def __init__(self, tokenizer: Tokenizer, *, tools: frozenset[str] = frozenset()):
        """Begin an answer.

        Text before the first channel belongs to the answer's text. If the answer calls a tool that is not in `tools`,
        this call also becomes part of the text.
        """
        names = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
        self._controls = {tokenizer.special[name]: name for name in names if name in tokenizer.special}
        self._tools = tools
        self._header: str | None = None  # the current header so far; None: we are not in a header
        self._first: str | None = ""  # text at the start that may belong to a header; None: this is decided
        self._kind: Literal["answer", "thought", "call"] = "answer"

    def ends_character(self, token: int) -> bool:
        """Return whether `token` is a control token of these channels."""
        return token in self._controls

    def feed(self, token: int, text: str) -> ChannelText:
        """Process a token and its text (see `Channels.feed`)."""
        control = self._controls.get(token)
        if control is None:
            if self._header is None:
                return self._begin(text) if self._first is not None else self.hear(text)
            self._header += text
        elif control == MESSAGE:
            return self._open(text)
        elif control in ENDS:
            heard, self._kind = self.hear(text), "answer"
            return heard._replace(is_answer=False)
        elif control == CONSTRAIN and self._header is not None:
            self._header += text + " "
        elif control == CHANNEL and (self._header or self._first):
            self._header, self._first = f"{self._header or self._first}{text} ", None
        else:
            heard, self._header, self._kind = self.hear(text), "", "answer"
            return heard._replace(is_answer=False)
        return ChannelText("", is_answer=False)

    def hear(self, text: str) -> ChannelText:
        """Add `text` to the current message: to the answer's text, to the reasoning or to the arguments of a call."""
        first, self._first = self._first or "", None
        match self._kind:
            case "thought":
                return ChannelText("", text, is_answer=False)
            case "call":
                return ChannelText("", arguments=text, is_answer=False)
        return ChannelText(first + text)

    def _begin(self, text: str) -> ChannelText:
        """Process text at the start of the answer, before any control token.

        If the text so far may be the beginning of ` to=` and the name of a tool, we hold it back until later tokens
        decide.
        """
        assert self._first is not None
        self._first += text
        is_open = TO_TOOL.startswith(self._first) or self._first.startswith(TO_TOOL)
        return ChannelText("", waits=True) if is_open else self.hear("")

    def _open(self, text: str) -> ChannelText:
        """Begin a message. Its header decides whether the message is an answer, reasoning or a call."""
        header, self._header, self._first = self._header or self._first or "", None, None
        # The header may contain " to=" and a name in the role, before the channel, or after the channel.
        recipient = re.search(rf"(?:^|\s){TO_TOOL.strip()}(\S+)", header)
        name = recipient[1].removeprefix(FUNCTIONS) if recipient else None
        if name in self._tools:
            self._kind = "call"
            return ChannelText("", called=name, is_answer=False)
        self._kind = "thought" if HIDDEN in header.split(" ") else "answer"
        visible = header if recipient and self._kind == "answer" else ""
        return ChannelText(visible.removeprefix("assistant ") + text, is_answer=False)


def has_harmony(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer has the control tokens of gpt-oss's channels."""
    return {CHANNEL, MESSAGE} <= tokenizer.special.keys()


def is_thinking(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Return whether a prompt ends with `<think>` and perhaps white space, so that the answer begins with reasoning."""
    tags = _think_tags(tokenizer)
    return tags is not None and _ends_with(tokenizer, prompt, tags[0])


def channels_of(tokenizer: Tokenizer, prompt: Sequence[int], *, tools: frozenset[str] = frozenset()) -> Channels | None:
    """Make the `Channels` of an answer to `prompt`. Returns None if the tokenizer has no tokens that mark reasoning.

    `tools` are the names of the functions that the answer may call.
    """
    if has_harmony(tokenizer):
        return HarmonyChannels(tokenizer, tools=tools)
    tags = _think_tags(tokenizer)
    return ThinkTags(*tags, is_open=_ends_with(tokenizer, prompt, tags[0])) if tags else None


def _ends_with(tokenizer: Tokenizer, prompt: Sequence[int], tag: int) -> bool:
    """Return whether a prompt ends with `tag` and perhaps white space."""
    for token in reversed(prompt):
        if token == tag:
            return True
        if not tokenizer.bytes_of(token).isspace():
            return False
    return False


def _think_tags(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the tokens `<think>` and `</think>`, or None if the tokenizer lacks one of them.

    In some vocabularies, they are control tokens. In others, they are added tokens: if an ordinary text contains the
    tags, the tokenizer encodes them as these tokens, too.
    """
    tags = []
    for name in (THINK, END_OF_THOUGHTS):
        ids = [tokenizer.special[name]] if name in tokenizer.special else tokenizer.encode(name, start=False)
        if len(ids) != 1:
            return None
        tags += ids
    return tags[0], tags[1]
