"""The channels that gpt-oss writes its answers to: what it thinks, and what it says.

An answer is a list of messages, `<|channel|>NAME<|message|>TEXT<|end|><|start|>assistant<|channel|>...`, each to a
channel: analysis, which nobody but the model reads, commentary and final. Source: the format harmony,
https://github.com/openai/harmony.
"""

from typing import NamedTuple

from model.tokenizers.tokenizer import Tokenizer

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
HEADERS, ENDS = ("<|start|>", CHANNEL), ("<|end|>", "<|call|>", "<|return|>")
HIDDEN = "analysis"
TO_TOOL = " to="  # within the name: the message is a call, and its name says of what


class Heard(NamedTuple):
    """The text that a token adds to an answer, and to the thoughts before it."""

    text: str
    thoughts: str = ""


class Channels:
    """Tells what an answer says from what the model thinks, token by token."""

    def __init__(self, tokenizer: Tokenizer):
        """Begin an answer, where text before the name of a channel is said."""
        self._controls = {
            tokenizer.special[name]: name for name in (*HEADERS, MESSAGE, *ENDS) if name in tokenizer.special
        }
        self._header: str | None = None  # what has come of the name; None: within a message
        self._hidden = False

    def feed(self, token: int, text: str) -> Heard:
        """Take a token and the text that it brought."""
        control = self._controls.get(token)
        if control in HEADERS:
            self._header = text
        elif control == MESSAGE:
            header, self._header = self._header or "", None
            self._hidden = header.split(" ")[0] == HIDDEN
            return Heard((header if TO_TOOL in header and not self._hidden else "") + text)
        elif control in ENDS:
            heard, self._hidden = self.hear(text), False
            return heard
        elif self._header is not None:
            self._header += text
            return Heard("")
        return self.hear(text)

    def hear(self, text: str) -> Heard:
        """Take text that belongs to the message that is under way."""
        return Heard("", text) if self._hidden else Heard(text)


def channels_of(tokenizer: Tokenizer) -> Channels | None:
    """Make a reader of channels for a tokenizer that has their control tokens; None for another."""
    return Channels(tokenizer) if {CHANNEL, MESSAGE} <= tokenizer.special.keys() else None
