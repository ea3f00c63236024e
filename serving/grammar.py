"""Answers that are JSON: the tokens that may follow, by llguidance, an optional package."""

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool

from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.serving.openai import JsonFormat, Refusal, SchemaFormat
from llamaspec.serving.request import Allowed

if TYPE_CHECKING:
    from llguidance import LLMatcher

Rules = Callable[[], Allowed | None]  # makes the rule of one answer; None: all tokens may follow
LARGEST_SCHEMA = 1 << 16  # bytes
# White space is fixed, since models that may choose it can go on with it for ever.
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Makes grammars for one tokenizer. `vocab` is the number of logits, and `stops` are the ids that end an answer."""

    def __init__(self, tokenizer: Tokenizer, *, vocab: int, stops: frozenset[int]):
        """Prepare nothing: the first grammar does, since llguidance takes a second to learn a large vocabulary."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._stops = stops
        self._learned: Any = None

    def allowed_by(self, form: JsonFormat | SchemaFormat) -> Callable[[], Allowed]:
        """Compile a `response_format` that asks for JSON; each call of the result gives the rule of one answer.

        Raises Refusal for a schema that cannot be used, and where llguidance is missing.
        """
        schema = {"type": "object"} if isinstance(form, JsonFormat) else form.json_schema.schema
        return self.of_schema(schema, param="response_format")

    def of_schema(
        self, schema: dict[str, Any], *, param: str, most: int = 1, separator: str = ""
    ) -> Callable[[], Allowed]:
        """Compile a JSON schema, as `allowed_by` does; `param` is the field of the request that wants it.

        An answer has up to `most` values that keep to it, with `separator` between. Names of control tokens in the
        separator stand for these tokens.
        """
        if not self._stops:
            raise _unusable(param, "this model has no token that ends an answer")
        written = json.dumps(schema)
        if len(written) > LARGEST_SCHEMA:
            raise _unusable(param, f"{len(written):,} bytes are more than {LARGEST_SCHEMA:,}")
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError:
            message = f"{param} needs llguidance, which this server lacks: pip install 'llamaspec[serve]'"
            raise Refusal(message, param=param, code="unsupported_parameter") from None
        try:
            # A grammar around the schema would change what errors of the schema say, so it is there only if needed.
            if most == 1:
                grammar = LLMatcher.grammar_from_json_schema(written, overrides=SPACING)
            else:
                spaced = json.dumps({**schema, "x-guidance": SPACING})
                between = self._in_lark(separator)
                lark = f"start: value ({between} value){{0,{most - 1}}}\nvalue: %json {spaced}\n"
                grammar = LLMatcher.grammar_from_lark(lark)
        except ValueError as error:  # as of a schema that is nested too deeply
            raise _unusable(param, str(error)[:300]) from None
        matcher = LLMatcher(self._known(), grammar, log_level=0)
        if matcher.is_error():
            raise _unusable(param, matcher.get_error().split("\n")[0][:300])
        return lambda: Rule(matcher.deep_copy(), self._vocab)

    def _in_lark(self, text: str) -> str:
        """Write a text that has no quotation mark or backslash in llguidance's form of Lark grammars."""
        special = self._tokenizer.special
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True) if name) or "(?!)"
        parts = re.split(f"({names})", text)
        return " ".join(f"<[{special[part]}]>" if i % 2 else json.dumps(part) for i, part in enumerate(parts) if part)

    def _known(self) -> Any:
        """Teach llguidance the vocabulary, once."""
        if self._learned is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            words = TokenizerWrapper(Vocabulary(self._tokenizer, self._vocab, min(self._stops)))
            self._learned = LLTokenizer(words, n_vocab=self._vocab, eos_token=sorted(self._stops))
        return self._learned


class Vocabulary:
    """A tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: int):
        """Spell all `vocab` ids; control tokens, and ids that the tokenizer lacks, have no text."""
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos
        self.eos_token_id = eos
        self.tokens = [tokenizer.bytes_of(token) for token in range(vocab)]
        self.special_token_ids = [token for token, spelled in enumerate(self.tokens) if not spelled]

    def __call__(self, text: str) -> list[int]:
        """Encode a text that goes on."""
        return self._tokenizer.encode(text, start=False)


class Rule:
    """The tokens that may follow those of one answer."""

    def __init__(self, matcher: "LLMatcher", vocab: int):
        """Begin an answer."""
        self._matcher = matcher
        self._vocab = vocab
        self._read = 0

    def __call__(self, drawn: Sequence[int]) -> Bool[np.ndarray, " vocab"]:
        """Give the tokens that may follow `drawn`, which begins with what it was at the call before.

        Raises ValueError where a token was drawn that may not be there.
        """
        self._matcher.consume_tokens(list(drawn[self._read :]))
        self._read = len(drawn)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error().split("\n")[0])
        return np.unpackbits(bits, bitorder="little")[: self._vocab].astype(bool)


def _unusable(param: str, reason: str) -> Refusal:
    return Refusal(f"{param}: {reason}", param=param, code="invalid_schema")
