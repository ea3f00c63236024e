"""A conversation with a model, turn by turn. Each turn computes only the new tokens."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamaspec.model.chat.channels import channels_of
from llamaspec.model.chat.marked_text import MarkedText, marked, quoted
from llamaspec.model.chat.messages import Messages, check_messages
from llamaspec.model.chat.template import ChatTemplate, SpecialTokens, check_options, find_template, turn_stops
from llamaspec.model.generation import Generation
from llamaspec.model.llama import Llama
from llamaspec.model.options import SamplingOptions
from llamaspec.model.tokenizers.tokenizer import check_text, check_texts

MARGIN = 100  # tokens; a template puts fewer around a question
LONGEST_TOKEN = 256  # characters per token; the longest known token is 128 spaces


@dataclass(frozen=True)
class _Turn:
    """A question, and the model's answer so far."""

    question: dict[str, Any]  # the question as a message
    text: MarkedText  # the conversation up to the answer, as the template renders it
    ids: list[int]  # the ids of `text`
    generation: Generation = field(repr=False)

    @property
    def messages(self) -> Messages:
        """The question and the answer as messages. Empty while the answer has no tokens."""
        if not self.generation.ids:  # the answer did not begin, or was interrupted before its first token
            return []
        answer = {"role": "assistant", "content": self.generation.completion}
        if self.generation.thoughts:
            answer["reasoning_content"] = self.generation.thoughts
        return [self.question, answer]


class Chat:
    """A conversation with a model. Each call of `reply` is a turn.

    The conversation keeps the tokens that the model read and wrote, so a turn computes only new tokens. If the template
    changes an earlier turn (for example, drops its reasoning), the model computes all tokens from that turn on again.

        chat = Chat(load("path/to/a/model"), system="Be brief.")
        for token in chat.reply("Why is the sky blue?"):
            print(token.text, end="", flush=True)
    """

    def __init__(
        self,
        llama: Llama,
        template: ChatTemplate | None = None,
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ):
        """Begin a conversation with `llama`. If `template` is None, use the template that came with the model.

        - `tools` are JSON schemas of functions. The template describes the functions to the model. If the model's
          answer calls a function, run it and pass the result to `reply(result, role="tool")`.
        - `options` set variables of the template by name, such as `{"enable_thinking": False}`.

        Raises CheckpointError if the model has no template, and ValueError for options or tools that the template does
        not read.
        """
        template = template or find_template(llama.tokenizer, *llama.places)
        self._llama = llama
        self._template = template
        check_options(template, options or {})
        if tools and not template.reads("tools"):
            raise ValueError(f"{template.name}: this chat template does not read tools, so the model cannot use them")
        self._special = SpecialTokens(llama.tokenizer)
        check_texts(tools)
        self._variables = {"tools": _as_json(list(tools)) or None, **(options or {})}
        self._session = llama.session()
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._stops = llama.stops | turn_stops(llama.tokenizer, template)
        self.reset()

    @property
    def messages(self) -> Messages:
        """The messages so far, as `{"role": ..., "content": ...}`, including an unfinished answer.

        An answer keeps its leading white space, because templates expect that. If an answer has reasoning, its message
        has the key `reasoning_content`. The template decides whether the model sees the reasoning again.
        """
        return [dict(message) for message in (*self._messages, *(self._turn.messages if self._turn else []))]

    @property
    def context(self) -> int:
        """The largest number of tokens that the conversation may have."""
        return self._llama.context

    def instruct(self, system: str | None) -> None:
        """Forget the conversation, and begin a new one with the system message `system`, or without one."""
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def resume(self, messages: Messages) -> None:
        """Forget the conversation, and continue the one that `messages` hold, as the property `messages` returns them.

        The model reads them with the next question. Leading messages with the role system are the system message.
        Raises ValueError, and leaves the conversation unchanged, if the messages are not valid, or if the template
        refuses them.
        """
        check_texts(check_messages(messages))
        self._rendered(messages)
        begin = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        self._system = messages[:begin]
        self.reset()
        self._messages = list(messages)

    def take_back(self) -> dict[str, Any]:
        """Forget the last question and everything after it. Return the question as a message.

        Raises ValueError if the conversation has no question.
        """
        turn, self._turn = self._turn, None
        if turn is not None:
            return dict(turn.question)
        asked = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
        if not asked:
            raise ValueError("the conversation has no question yet")
        question = self._messages[asked[-1]]
        del self._messages[asked[-1] :]
        self._text, self._ids = marked(""), []
        return dict(question)

    def make_room(self, text: str, *, answer: int) -> int:
        """Forget the oldest turns if the next question and its answer would not fit in the context.

        `text` is the question, and `answer` is the largest number of tokens in the answer. We reserve room for the
        answer, but at most a quarter of the context. Returns the number of forgotten turns.

        After we forget turns, the model computes the remaining conversation again. So that this does not happen at
        every turn, we forget enough turns to free half of the context. If the question does not fit even then, we
        forget nothing, and `reply` will raise ValueError. Raises ValueError if the template refuses the conversation.
        """
        self._settle()
        room = min(answer, self.context // 4)
        if len(self._ids) + len(self._special.encode(quoted(text))) + room + MARGIN <= self.context:
            return 0
        first, end, dropped = len(self._system), len(self._messages), 0
        # We forget the result of a tool together with the question that led to the call.
        begins = [i for i in range(first, end) if i == first or self._messages[i]["role"] == "user"]
        turns, begins = len(begins), [*begins, end]

        def size() -> int:
            messages = [*self._messages[:first], *self._messages[begins[dropped] :]]
            rendered = self._rendered([*messages, {"role": "user", "content": text}])
            if len(rendered) > self._longest:  # too long for the context, and slow to encode
                return self.context + 1
            return len(self._special.encode(rendered))

        if size() + room <= self.context:
            return 0
        # We keep the latest turn if it fits, because the question is probably about that turn.
        while dropped < turns and size() > (self.context // 2 if dropped < turns - 1 else self.context - room):
            dropped += 1
        if size() > self.context:
            return 0
        del self._messages[first : begins[dropped]]
        self._text, self._ids = marked(""), []
        return dropped

    def reset(self) -> None:
        """Forget everything except the system message."""
        self._messages = list(self._system)
        self._text, self._ids = marked(""), []  # the conversation as the template rendered it, and its ids
        self._turn: _Turn | None = None

    def reply(
        self,
        text: str,
        *,
        role: str = "user",
        max_new_tokens: int = 256,
        sampling: SamplingOptions | None = None,
        seed: int | None = None,
        stop: Iterable[str] = (),
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Ask the model a question. Iterate over the result to generate the answer, as with `Llama.generate`.

        `role` is the author of the message `text`. It is "tool" for the result of a tool that the model called.

        Once the answer has its first token, the question and the tokens of the answer so far belong to the
        conversation. The next call of `reply` or `reset` ends the answer. Raises ValueError, and leaves the
        conversation unchanged, if the template refuses the conversation or if the conversation no longer fits the
        context.
        """
        check_text(text)
        self._settle()
        question = {"role": role, "content": text}
        rendered = self._rendered([*self._messages, question])
        if len(rendered) > self._longest:
            limit = f"the context of {self._llama.context} tokens allows at most {self._longest:,}"
            raise ValueError(
                f"{self._template.name}: renders this conversation as {len(rendered):,} characters, but {limit}"
            )
        if self._text and self._special.begins(rendered, self._text):
            remainder = rendered[len(self._text) :]
            ids = [*self._ids, *self._special.encode(remainder, after=self._text)]
        else:
            ids = self._special.encode(rendered)
        if not ids:
            raise ValueError(f"{self._template.name}: renders this conversation as an empty text")
        if len(ids) > self._llama.context:
            limit = f"the context of {self._llama.context}"
            if len(self._messages) == len(self._system):  # there is nothing to forget
                raise ValueError(f"the question has {len(ids)} tokens, more than {limit}")
            what = f"the conversation and this question have {len(ids)} tokens, more than {limit}"
            raise ValueError(f"{what}: ask a shorter question, or forget earlier turns (reset, make_room)")

        def ended() -> bool:
            return interrupted() or self._turn is not turn

        generation = self._llama.continue_ids(
            self._session,
            ids,
            prompt=self._special.tail(rendered),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            stop=stop,
            stops=self._stops,
            interrupted=ended,
            channels=channels_of(self._llama.tokenizer, ids),
        )
        turn = self._turn = _Turn(question, rendered, ids, generation)
        return generation

    @property
    def _longest(self) -> int:
        """The number of characters above which a text certainly has more tokens than the context."""
        return self.context * LONGEST_TOKEN

    def _rendered(self, messages: Iterable[dict[str, Any]]) -> MarkedText:
        return self._template.render(list(messages), **self._variables)

    def _settle(self) -> None:
        """Append the latest turn to the conversation."""
        turn, self._turn = self._turn, None
        if turn is None or not turn.messages:
            return
        self._messages += turn.messages
        kept_ids, characters = self._reusable_ids(turn)
        self._text = turn.text + quoted(turn.generation.completion[:characters])
        self._ids = [*turn.ids, *kept_ids]

    def _reusable_ids(self, turn: _Turn) -> tuple[list[int], int]:
        """Return the ids of the answer that the conversation can keep, and the number of characters that they spell.

        Usually it keeps all ids except the one that stopped the answer. But a stop string may have cut the text of a
        token, or U+FFFD may have replaced bytes that are not UTF-8. From this token on, the ids no longer spell the
        answer's text, so we drop them, and the next turn encodes this part of the answer again. If the answer has marks
        of reasoning, we keep no ids.
        """
        channels = turn.generation.channels
        if channels and channels.is_marked:  # the template writes an earlier answer without its reasoning
            return [], 0
        answer, read, kept_ids, whole_bytes = turn.generation.completion.encode(), 0, 0, 0
        begins_text = turn.generation.prompt == ""
        for count, token in enumerate(turn.generation.ids, start=1):
            spelling = self._llama.tokenizer.bytes_of(token)
            if spelling and begins_text:
                spelling, begins_text = self._llama.tokenizer.first_bytes_of(token), False
            if token in turn.generation.stops or not answer.startswith(spelling, read):
                break
            read += len(spelling)
            if read == len(answer) or answer[read] & 0xC0 != 0x80:  # a character ends here
                kept_ids, whole_bytes = count, read
        return turn.generation.ids[:kept_ids], len(answer[:whole_bytes].decode())


def _as_json(value: Any) -> Any:
    """Copy a tool's description, with dicts and lists in place of other mappings and tuples."""
    match value:
        case Mapping():
            return {key: _as_json(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_as_json(entry) for entry in value]
    return value
