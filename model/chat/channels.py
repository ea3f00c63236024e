"""The channels that gpt-oss writes its answers to: what it thinks, what it says, and what it calls.

An answer is a list of messages, `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant<|channel|>...`, each to a
channel: analysis, which only the model reads, commentary and final. A message ` to=functions.NAME` calls a tool,
and its text is the arguments; these words stand before the channel or after it. Source: the format harmony,
https://github.com/openai/harmony.
"""

import re
from typing import Literal, NamedTuple

from llamaspec.model.tokenizers.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HIDDEN = "analysis"
TO_TOOL = " to="  # within the header: the message is a call, and this says of what
FUNCTIONS = "functions."  # before the name of a tool that the conversation has


class Heard(NamedTuple):
    """The text that a token adds to an answer, to the thoughts before it, or to a call of a tool."""

    text: str
    thoughts: str = ""
    called: str | None = None  # the tool, if a call begins
    arguments: str = ""  # more of the current call
    is_answer: bool = True  # whether the token belongs to the answer's text
    waits: bool = False  # whether that is yet to be told, with its text


class Channels:
    """Tells what an answer says from what the model thinks and calls, token by token."""

    def __init__(self, tokenizer: Tokenizer, *, tools: frozenset[str] = frozenset()):
        """Begin an answer, and count text before a channel name as the answer. Calls of other than `tools` are text."""
        names = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
        self._controls = {tokenizer.special[name]: name for name in names if name in tokenizer.special}
        self._tools = tools
        self._header: str | None = None  # what has come of the header; None: within a message
        self._first: str | None = ""  # text at the start that may be the rest of a header; None: none may
        self._kind: Literal["answer", "thought", "call"] = "answer"

    def ends_character(self, token: int) -> bool:
        """Tell whether the token is a control token, before which an unfinished character ends."""
        return token in self._controls

    def feed(self, token: int, text: str) -> Heard:
        """Take a token and the text that it brought; of a control token, the text that was unfinished before it."""
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
        return Heard("", is_answer=False)

    def hear(self, text: str) -> Heard:
        """Take text that belongs to the message that is under way."""
        first, self._first = self._first or "", None
        match self._kind:
            case "thought":
                return Heard("", text, is_answer=False)
            case "call":
                return Heard("", arguments=text, is_answer=False)
        return Heard(first + text)

    def _begin(self, text: str) -> Heard:
        """Take text at the start of the answer; it stays back while it may name the recipient of the first message."""
        assert self._first is not None
        self._first += text
        is_open = TO_TOOL.startswith(self._first) or self._first.startswith(TO_TOOL)
        return Heard("", waits=True) if is_open else self.hear("")

    def _open(self, text: str) -> Heard:
        """Begin a message; its header tells its kind."""
        header, self._header, self._first = self._header or self._first or "", None, None
        # The role stands before the channel, and only its " to=" matters.
        recipient = re.search(rf"(?:^|\s){TO_TOOL.strip()}(\S+)", header)
        name = recipient[1].removeprefix(FUNCTIONS) if recipient else None
        if name in self._tools:
            self._kind = "call"
            return Heard("", called=name, is_answer=False)
        self._kind = "thought" if HIDDEN in header.split(" ") else "answer"
        visible = header if recipient and self._kind == "answer" else ""
        return Heard(visible.removeprefix("assistant ") + text, is_answer=False)


def channels_of(tokenizer: Tokenizer, *, tools: frozenset[str] = frozenset()) -> Channels | None:
    """Make a reader of channels for a tokenizer that has their control tokens; None for another."""
    return Channels(tokenizer, tools=tools) if {CHANNEL, MESSAGE} <= tokenizer.special.keys() else None
