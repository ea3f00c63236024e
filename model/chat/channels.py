"""The channels of gpt-oss's answers: reasoning, the answer itself, and tool calls.

An answer is a list of messages, `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant<|channel|>...`. The text
before `<|message|>` is the message's header. Each message has a channel: analysis (the model's reasoning), commentary
or final. A message with ` to=functions.NAME` in its header, before or after the channel, calls the tool NAME, and its
TEXT contains the arguments. Source: the format harmony, https://github.com/openai/harmony.
"""

import re
from typing import Literal, NamedTuple

from llamaspec.model.tokenizers.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HIDDEN = "analysis"
TO_TOOL = " to="  # in a header, comes before the name of the tool that the message calls
FUNCTIONS = "functions."  # prefix of the name of a function that the conversation offers


class ChannelText(NamedTuple):
    """The text that one token adds to the answer, to the reasoning or to a tool call."""

    text: str
    thoughts: str = ""
    called: str | None = None  # the name of the tool, if a call begins
    arguments: str = ""  # more of the arguments of the current call
    is_answer: bool = True  # whether the token belongs to the answer's text
    waits: bool = False  # whether only later tokens decide where this token's text belongs


class Channels:
    """Sorts the tokens of an answer, one at a time, into the answer's text, reasoning and tool calls."""

    def __init__(self, tokenizer: Tokenizer, *, tools: frozenset[str] = frozenset()):
        """Begin an answer.

        Text before any channel belongs to the answer's text, and so do calls of tools that are not in `tools`.
        """
        names = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
        self._controls = {tokenizer.special[name]: name for name in names if name in tokenizer.special}
        self._tools = tools
        self._header: str | None = None  # the current header so far; None: we are not in a header
        self._first: str | None = ""  # text at the start that may belong to a header; None: this is decided
        self._kind: Literal["answer", "thought", "call"] = "answer"

    def ends_character(self, token: int) -> bool:
        """Return whether `token` is a control token. If so, it also ends an incomplete UTF-8 character before it."""
        return token in self._controls

    def feed(self, token: int, text: str) -> ChannelText:
        """Process a token and its text.

        For a control token, `text` is the incomplete UTF-8 character before the token, or "" if there is none.
        """
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


def channels_of(tokenizer: Tokenizer, *, tools: frozenset[str] = frozenset()) -> Channels | None:
    """Make a `Channels` if the tokenizer has the control tokens of channels. Returns None for any other tokenizer."""
    return Channels(tokenizer, tools=tools) if {CHANNEL, MESSAGE} <= tokenizer.special.keys() else None
