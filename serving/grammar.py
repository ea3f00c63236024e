"""Grammars for JSON answers: masks of the tokens that may follow. Uses llguidance, an optional package."""

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool

from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.serving.openai import JsonFormat, Refusal, SchemaFormat
from llamaspec.serving.request import Allowed, DeadEnd
from llamaspec.serving.schemas import prepared

if TYPE_CHECKING:
    from llguidance import LLMatcher

Rules = Callable[[], Allowed | None]  # makes the mask function of one answer; None: every token is allowed
LARGEST_SCHEMA = 1 << 16  # bytes
MOST_COMPILED = 32  # compiled schemas that we keep for later requests
TRIALS = 4  # random answers that test a schema
TRIAL_TOKENS = 64
END = 256  # the id that ends a text; ids below it are bytes
SIGNS = re.compile(rb"[\s\"{}\[\],:]+")  # matches tokens that open or close values
ESCAPES_BEGUN = (b"", b"\\", b"\\u", b"\\u0", b"\\u00", b"\\u000", b"\\u001", b"\\u007")
ESCAPE_GOES_ON = {*(bytes([byte]) for byte in b"u0123456789abcdefABCDEF")}
# Matches text in which no escape spells a character that can be written plainly. The text may end in an incomplete
# escape.
ONE_SPELLING = re.compile(rb"(?:[^\\]|\\[^u]|\\u00(?:[01][0-9a-fA-F]|7[fF]))*(\\(?:u(?:0(?:0[017]?)?)?)?)?", re.DOTALL)
# White space is fixed, because a model that may choose white space may repeat it forever.
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiles grammars for one tokenizer.

    `vocab` is the number of logits, and `stops` are the ids that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab: int, stops: frozenset[int]):
        """Store the arguments. The first grammar prepares llguidance, which takes a second for a large vocabulary."""
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._stops = stops
        self._learned: Any = None
        self._spelling: Escapes | None = None
        self._compiled: dict[tuple[str, int, str], LLMatcher] = {}

    def allowed_by(self, form: JsonFormat | SchemaFormat) -> Callable[[], Allowed]:
        """Compile a `response_format` that asks for JSON.

        Each call of the returned function makes an `Allowed`, which gives the masks for one answer.
        Raises Refusal for a schema that llguidance cannot use, or if llguidance is missing.
        """
        schema = {"type": "object"} if isinstance(form, JsonFormat) else form.json_schema.schema
        return self.of_schema(schema, param="response_format")

    def of_schema(
        self, schema: dict[str, Any], *, param: str, most: int = 1, separator: str = ""
    ) -> Callable[[], Allowed]:
        """Compile a JSON schema. Each call of the returned function makes an `Allowed` for one answer.

        `param` is the request's field with the schema. An answer has up to `most` values that match the schema, with
        `separator` between them. If the separator contains the name of a control token, the answer contains that token.
        """
        if not self._stops:
            raise _unusable(param, "this model has no token that ends an answer")
        written = json.dumps(schema)
        if len(written) > LARGEST_SCHEMA:
            raise _unusable(param, f"expected a schema of at most {LARGEST_SCHEMA:,} bytes, got {len(written):,}")
        try:
            import llguidance  # noqa: F401
        except ModuleNotFoundError:
            message = f"{param} needs llguidance, which this server lacks: pip install 'llamaspec[serve]'"
            raise Refusal(message, param=param, code="unsupported_parameter") from None
        key = written, most, separator
        try:
            matcher = self._compiled[key] if key in self._compiled else self._compile(schema, most, separator)
        except (ValueError, RecursionError) as error:  # for example, if the schema is nested too deeply
            raise _unusable(param, str(error).split("\n")[0][:300]) from None
        self._compiled[key] = matcher
        while len(self._compiled) > MOST_COMPILED:
            self._compiled.pop(next(iter(self._compiled)), None)
        return lambda: AnswerGrammar(matcher.deep_copy(), self._escapes())

    def _compile(self, schema: dict[str, Any], most: int, separator: str) -> "LLMatcher":
        """Compile and test a schema.

        Raises ValueError if the schema is invalid, or if a test answer reaches a dead end.
        """
        from llguidance import LLMatcher

        written = json.dumps(prepared(schema, _matches_only))
        # With a grammar around the schema, llguidance words its errors differently, so we use a grammar only for
        # several values.
        if most == 1:
            grammar = LLMatcher.grammar_from_json_schema(written, overrides=SPACING)
        else:
            spaced = json.dumps({**json.loads(written), "x-guidance": SPACING})
            between = self._in_lark(separator)
            lark = f"start: value ({between} value){{0,{most - 1}}}\nvalue: %json {spaced}\n"
            grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._guidance_tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        for seed in range(TRIALS):
            self._try(AnswerGrammar(matcher.deep_copy(), self._escapes()), random.Random(seed), closing=seed == 0)
        return matcher

    def _try(self, rule: "AnswerGrammar", draw: random.Random, *, closing: bool) -> None:
        """Draw a random answer of up to `TRIAL_TOKENS` tokens, to test the schema. Raises ValueError at a dead end.

        Half of the steps choose only among tokens that open or close a value, because dead ends occur there. If
        `closing` is set, all steps choose only such tokens, and the answer ends as soon as the grammar allows.
        """
        drawn: list[int] = []
        signs = self._escapes().signs
        while len(drawn) < TRIAL_TOKENS and (not drawn or drawn[-1] not in self._stops):
            try:
                allowed = rule(drawn)
            except DeadEnd:
                text = b"".join(map(self._tokenizer.bytes_of, drawn)).decode(errors="replace")
                raise ValueError(f"the schema leads to a dead end: no token can follow {text[-60:]!r}") from None
            ends = [token for token in self._stops if token < len(allowed) and allowed[token]]
            if ends and (closing or draw.random() < 0.3):
                return
            choices = np.flatnonzero(allowed & signs) if closing or draw.random() < 0.5 else np.zeros(0, int)
            choices = choices if len(choices) else np.flatnonzero(allowed)
            drawn.append(int(choices[draw.randrange(len(choices))]))

    def _in_lark(self, text: str) -> str:
        """Format `text`, which has no quotation mark and no backslash, as part of a Lark grammar for llguidance."""
        special = self._tokenizer.special
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True) if name) or "(?!)"
        parts = re.split(f"({names})", text)
        return " ".join(f"<[{special[part]}]>" if i % 2 else json.dumps(part) for i, part in enumerate(parts) if part)

    def _escapes(self) -> "Escapes":
        """Return the masks for escapes. The first call computes them."""
        if self._spelling is None:
            self._spelling = Escapes([self._tokenizer.bytes_of(token) for token in range(self._vocab)])
        return self._spelling

    def _guidance_tokenizer(self) -> Any:
        """Return llguidance's tokenizer for this vocabulary. The first call makes it."""
        if self._learned is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            words = TokenizerWrapper(GrammarTokenizer(self._tokenizer, self._vocab, min(self._stops)))
            self._learned = LLTokenizer(words, n_vocab=self._vocab, eos_token=sorted(self._stops))
        return self._learned


class GrammarTokenizer:
    """A tokenizer with the interface that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: int):
        """Store the bytes of all `vocab` ids. Control tokens, and ids that the tokenizer lacks, have no bytes."""
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos
        self.eos_token_id = eos
        self.tokens = [tokenizer.bytes_of(token) for token in range(vocab)]
        self.special_token_ids = [token for token, spelled in enumerate(self.tokens) if not spelled]

    def __call__(self, text: str) -> list[int]:
        """Encode a text as the continuation of another text."""
        return self._tokenizer.encode(text, start=False)


class Escapes:
    r"""Masks of tokens that let an answer spell each character of a JSON string in only one way.

    llguidance allows any escape in names that a schema does not declare, so `\u0061` could spell a declared name `a`.
    These masks allow `\u` only for control characters, which have no other spelling in JSON.
    """

    def __init__(self, spelled: Sequence[bytes]):
        """Compute the masks for a vocabulary, given the bytes of each token."""
        self.spelled = spelled
        self.signs = np.array([SIGNS.fullmatch(token) is not None for token in spelled])
        doubtful = [i for i, token in enumerate(spelled) if b"\\" in token or token[:1] in ESCAPE_GOES_ON]
        self._allowed: dict[bytes, Bool[np.ndarray, " vocab"]] = {}
        for begun in ESCAPES_BEGUN:
            allowed = np.ones(len(spelled), bool)
            for i in doubtful:
                allowed[i] = ONE_SPELLING.fullmatch(begun + spelled[i]) is not None
            self._allowed[begun] = allowed

    def allowed_after(self, begun: bytes) -> Bool[np.ndarray, " vocab"]:
        """Return the mask of tokens that may follow the incomplete escape `begun`."""
        return self._allowed[begun]

    def begun(self, begun: bytes, token: int) -> bytes:
        """Append `token` to the incomplete escape `begun`.

        Returns the incomplete escape at the end of the result, or b"".
        """
        match = ONE_SPELLING.fullmatch(begun + self.spelled[token])
        return match[1] or b"" if match else b""


class AnswerGrammar:
    """The grammar of one answer. A call returns the mask of tokens that may follow."""

    def __init__(self, matcher: "LLMatcher", escapes: Escapes):
        """Begin an empty answer."""
        self._matcher = matcher
        self._escapes = escapes
        self._begun = b""  # the incomplete escape at the end of the answer, or b""
        self._read = 0
        self._allowed: Bool[np.ndarray, " vocab"] | None = None  # the mask of the latest call

    def __call__(self, drawn: Sequence[int]) -> Bool[np.ndarray, " vocab"]:
        """Return the mask of tokens that may follow `drawn`, which must begin with the tokens of the previous call.

        Raises ValueError if a drawn token was not allowed, and DeadEnd if no token may follow.
        """
        tokens = list(drawn[self._read :])
        self._matcher.consume_tokens(tokens)
        self._read = len(drawn)
        for token in tokens:
            self._begun = self._escapes.begun(self._begun, token)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            is_allowed = not tokens or (self._allowed is not None and len(tokens) == 1 and self._allowed[tokens[0]])
            raise (DeadEnd if is_allowed else ValueError)(self._matcher.get_error().split("\n")[0])
        vocab = len(self._escapes.spelled)
        self._allowed = np.unpackbits(bits, bitorder="little")[:vocab].astype(bool)
        self._allowed &= self._escapes.allowed_after(self._begun)
        if not self._allowed.any():
            raise DeadEnd("the vocabulary has no token for any character that the grammar allows next")
        return self._allowed


def _matches_only(pattern: str, names: set[str]) -> bool:
    """Return whether every name that a JSON schema's pattern matches is in `names`."""
    from llguidance import LLMatcher

    matcher = LLMatcher(
        _bytes_as_tokens(),
        LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern})),
        log_level=0,
    )
    return not matcher.is_error() and _spells_only(
        matcher, [json.dumps(name, ensure_ascii=False).encode() for name in names]
    )


def _spells_only(matcher: "LLMatcher", texts: list[bytes]) -> bool:
    """Return whether every text that a grammar allows is in `texts`.

    We check this recursively: each first byte that the grammar allows must begin one of `texts`, and the same must be
    true of the remaining bytes.
    """
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = {int(byte) for byte in np.flatnonzero(np.unpackbits(bits, bitorder="little")[:END])}
    if not allowed <= {text[0] for text in texts if text}:
        return False
    for byte in allowed:
        after = matcher.deep_copy()
        after.consume_token(byte)
        if not _spells_only(after, [text[1:] for text in texts if text[:1] == bytes([byte])]):
            return False
    return True


@cache
def _bytes_as_tokens() -> Any:
    """Make a llguidance tokenizer with one token per byte."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(ByteTokenizer()), n_vocab=END + 1, eos_token=[END])


class ByteTokenizer:
    """A tokenizer of bytes, with the interface that llguidance expects."""

    def __init__(self):
        """Make a vocabulary of all bytes and one token that ends a text."""
        self.bos_token_id, self.eos_token_id = None, END
        self.tokens = [*(bytes([byte]) for byte in range(END)), b""]
        self.special_token_ids = [END]

    def __call__(self, text: str) -> list[int]:
        """Encode a text as its UTF-8 bytes."""
        return [*text.encode()]


def _unusable(param: str, reason: str) -> Refusal:
    return Refusal(f"{param}: {reason}", param=param, code="invalid_schema")
