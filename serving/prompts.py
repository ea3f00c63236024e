"""Prompts as ids: texts, ids, and conversations by the model's own template.

A person's text never yields special tokens, in a conversation or outside one.
"""

from collections.abc import Sequence
from typing import NamedTuple

from model.chat.chat import LONGEST_TOKEN
from model.chat.template import ChatTemplate, SpecialTokens, turn_stops
from model.tokenizers.tokenizer import Tokenizer, check_text, decode, encode_text
from serving.openai import Message, Refusal


class Prompt(NamedTuple):
    """Tokens to continue."""

    ids: list[int]
    begins: bool  # whether the completion begins a text, so that it needs no space in front
    stops: frozenset[int]  # ids that end the completion
    begun: tuple[int, ...] = ()  # ids at the end of `ids` that the completion has begun with


class Prompts:
    """Makes prompts for one model. Each method takes up to a tenth of a second, so call it in a thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None,
        stops: frozenset[int],
        context: int,
        vocab: int,
    ):
        """Prepare for a model with this context and vocabulary; `stops` are the ids that end a plain text."""
        self.tokenizer = tokenizer
        self.template = template
        self.stops = stops
        self._context = context
        self._vocab = vocab
        self._special = SpecialTokens(tokenizer)
        self.turn_stops = stops | turn_stops(tokenizer, template)

    def from_text(self, text: str, *, bos: bool = True, param: str = "prompt") -> Prompt:
        """Encode a text, with BOS first where the model's convention has it. Raises Refusal."""
        self._check_characters(text, param)
        ids = encode_text(self.tokenizer, text, bos=bos)
        return Prompt(ids, text == "", self.stops)

    def from_ids(self, ids: Sequence[int], *, param: str = "prompt") -> Prompt:
        """Take ids as they are. Raises Refusal for one that the vocabulary lacks."""
        begins = not any(self.tokenizer.bytes_of(token) for token in self._checked(ids, param))
        return Prompt(list(ids), begins, self.stops)

    def from_messages(self, messages: Sequence[Message], *, begun: Sequence[int] = ()) -> Prompt:
        """Render a conversation, ready for the assistant's answer, or for more of one that has `begun` with these ids.

        Raises Refusal where the model has no template, or where its template refuses the conversation.
        """
        if self.template is None:
            raise Refusal("this model has no chat template: use /v1/completions, or serve it with --template")
        try:
            text = self.template.render([self._disguised(message) for message in messages])
        except ValueError as error:  # whose file is nobody's business
            reason = str(error).removeprefix(f"{self.template.name}: ")
            raise Refusal(f"messages: the chat template {reason}", param="messages") from None
        self._check_characters(text, "messages", check=False)
        begun = self._checked(begun, "answer_ids")
        return Prompt([*self._special.encode(text), *begun], self._special.tail(text) == "", self.turn_stops, begun)

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode a whole text."""
        return decode(self.tokenizer, ids)

    def _checked(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        for token in ids:
            if not 0 <= token < self._vocab:
                raise Refusal(f"{param}: token ids are between 0 and {self._vocab - 1}, got {token}", param=param)
        return tuple(ids)

    def _check_characters(self, text: str, param: str, *, check: bool = True) -> None:
        """Refuse a text that the context cannot hold, before it is encoded, and one that is not valid Unicode."""
        if len(text) > self._context * LONGEST_TOKEN:
            raise too_long(f"{len(text):,} characters", self._context, param)
        if check:
            try:
                check_text(text)
            except ValueError as error:
                raise Refusal(str(error), param=param) from None

    def _disguised(self, message: Message) -> dict[str, str]:
        role = "system" if message.role == "developer" else message.role
        content = message.content
        text = content if isinstance(content, str) else "".join(part.text for part in content or ())
        disguise = self._special.disguise_names if role == "assistant" else self._special.disguise
        said = {"role": role, "content": disguise(text)}
        return said if message.name is None else said | {"name": self._special.disguise(message.name)}


def too_long(length: str, context: int, param: str) -> Refusal:
    """Make the error about a prompt that the context cannot hold, with the code that OpenAI's clients know."""
    message = f"{param}: {length} are more than the context of {context} tokens holds"
    return Refusal(message, param=param, code="context_length_exceeded")
