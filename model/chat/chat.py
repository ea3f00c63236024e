"""A conversation with a model, turn by turn: only what is new is computed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from model.chat.template import END_OF_TURN, ChatTemplate, SpecialTokens, find_template
from model.generation import Generation
from model.llama import Llama
from model.options import SamplingOptions


@dataclass(frozen=True)
class _Turn:
    """A question as it was put to the model, and the answer as far as it has come."""

    question: str
    text: str  # the conversation up to the answer, as the template has it, disguised
    ids: list[int]  # and its ids
    generation: Generation = field(repr=False)

    @property
    def messages(self) -> list[dict[str, str]]:
        if not self.generation.ids:  # not begun, or interrupted before its first token: nothing was said
            return []
        answer = self.generation.completion
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": answer}]


class Chat:
    """A conversation; `reply` is a turn.

    Its tokens are kept as the model read and wrote them, so a turn computes the new ones alone. A template that
    rewrites what was said before (by dropping thoughts, say) has the rest computed from where it differs.

        chat = Chat(load("path/to/a/model"), system="Be brief.")
        for token in chat.reply("Why is the sky blue?"):
            print(token.text, end="", flush=True)
    """

    def __init__(self, llama: Llama, template: ChatTemplate | None = None, *, system: str | None = None):
        """Begin a conversation with `llama`, by `template` or for None by the one that came with the model.

        Raises CheckpointError where the model has no template.
        """
        template = template or find_template(llama.tokenizer, *llama.places)
        self._llama = llama
        self._template = template
        self._special = SpecialTokens(llama.tokenizer)
        self._session = llama.session()
        self._system = [] if system is None else [{"role": "system", "content": system}]
        ends = {*END_OF_TURN, template.tokens.get("eos_token")}
        self._stops = llama.stops | {token for name, token in llama.tokenizer.special.items() if name in ends}
        self.reset()

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said so far, as `{"role": ..., "content": ...}`, an unfinished answer included.

        An answer is what the model wrote, white space in front included: the template expects that.
        """
        return [dict(message) for message in (*self._messages, *(self._turn.messages if self._turn else []))]

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._system)
        self._text, self._ids = "", []  # the conversation as the template had it, disguised, and its ids
        self._turn: _Turn | None = None

    def reply(
        self,
        text: str,
        *,
        max_new_tokens: int = 256,
        sampling: SamplingOptions | None = None,
        seed: int | None = None,
        stop: Iterable[str] = (),
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Generation:
        """Put a question. Iterate over the result for the answer, as over that of `Llama.generate`.

        The answer, as far as it is iterated over, and its question are part of the conversation from its first
        token on; the next `reply` or `reset` ends it. Raises ValueError, and the conversation stays as it was, where
        the template refuses it or it no longer fits the context.
        """
        self._settle()
        messages = [*self._messages, {"role": "user", "content": text}]
        rendered = self._template.render([self._disguised(message) for message in messages])
        if self._text and rendered.startswith(self._text):
            rest = rendered[len(self._text) :]
            ids = [*self._ids, *self._special.encode(rest, start=self._special.tail(self._text) == "")]
        else:
            ids = self._special.encode(rendered)
        if not ids:
            raise ValueError(f"{self._template.name}: makes nothing of this conversation")
        if len(ids) > self._llama.context:
            limit = f"the context of {self._llama.context}"
            raise ValueError(f"with this, the conversation is {len(ids)} tokens, more than {limit}: /reset begins anew")

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
        )
        turn = self._turn = _Turn(text, rendered, ids, generation)
        return generation

    def _settle(self) -> None:
        """Make the latest turn a part of what was said."""
        turn, self._turn = self._turn, None
        if turn is None or not turn.messages:
            return
        self._messages += turn.messages
        kept, characters = self._kept(turn)
        self._text = turn.text + self._special.disguise_names(turn.generation.completion)[:characters]
        self._ids = [*turn.ids, *kept]

    def _kept(self, turn: _Turn) -> tuple[list[int], int]:
        """The ids whose text the answer begins with, and how many characters that is.

        All but the stopping one, as a rule. But a stop text may have cut the last short, and bytes that are not UTF-8
        became another character: from there on it is encoded again.
        """
        answer, read, kept, whole = turn.generation.completion.encode(), 0, 0, 0
        space_in_front = self._llama.tokenizer.dummy_prefix and turn.generation.prompt == ""
        for count, token in enumerate(turn.generation.ids, start=1):
            spelling = self._llama.tokenizer.bytes_of(token)
            if spelling and space_in_front:
                spelling, space_in_front = spelling.removeprefix(b" "), False
            if token in self._stops or not answer.startswith(spelling, read):
                break
            read += len(spelling)
            if read == len(answer) or answer[read] & 0xC0 != 0x80:  # not within a character
                kept, whole = count, read
        return turn.generation.ids[:kept], len(answer[:whole].decode())

    def _disguised(self, message: dict[str, str]) -> dict[str, str]:
        said_by_model = message["role"] == "assistant"
        disguise = self._special.disguise_names if said_by_model else self._special.disguise
        return message | {"content": disguise(message["content"])}
