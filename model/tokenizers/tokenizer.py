"""`Tokenizer`, the interface of all tokenizers, and `Decoder`, which converts ids back to text."""

import codecs
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

UNKNOWN = " ⁇ "  # SentencePiece prints this for a character that a vocabulary without bytes cannot spell.


@runtime_checkable
class Tokenizer(Protocol):
    """Converts a text to ids, and an id to the bytes that it represents."""

    @property
    def vocab(self) -> int:
        """The number of ids, which are 0 to vocab - 1."""
        ...

    @property
    def bos(self) -> int | None:
        """The id of the token that begins texts; None if texts begin without such a token."""
        ...

    @property
    def eos(self) -> int | None:
        """The id of the token that ends texts, as the tokenizer's own files state it; None if they state no such token.

        In a GGUF file, a key of the model states this id (see `Checkpoint.stops`).
        """
        ...

    @property
    def appended(self) -> tuple[int, ...]:
        """The ids that the tokenizer's own files put after a text.

        Models of embeddings expect them. We do not put them after a text that a model continues.
        """
        ...

    @property
    def special(self) -> Mapping[str, int]:
        """The ids of control tokens by name, such as "<s>" or "<|eot_id|>". `encode` never returns these ids."""
        ...

    @property
    def dummy_prefix(self) -> bool:
        """True if `encode` puts a space in front of a text, so that the first word gets the same ids as other words."""
        ...

    @property
    def absorbs(self) -> Mapping[str, tuple[bool, bool]]:
        """The control tokens that absorb white space, by name.

        The values say whether a token absorbs the white space before it, and whether it absorbs the white space after
        it.
        """
        ...

    def trimmed(self, text: str, *, after: str | None, before: str | None) -> str:
        """Remove the white space that the control tokens `after` and `before` absorb from a text between them.

        None means that there is a control token that absorbs nothing, or an end of the whole text.
        """
        ...

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Encode a text, without BOS. Names of control tokens in the text are ordinary characters.

        With `start=False`, `text` continues another text, and `encode` does not put a space in front of it. Raises
        ValueError if `text` is not valid Unicode, or if the tokenizer's library fails.
        """
        ...

    def encode_after_special(self, text: str) -> list[int]:
        """Encode a text that follows a control token in a conversation. For all other texts, use `encode`.

        Some tokenizers put a space in front of such a text, and others do not.
        """
        ...

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that `token` adds to a text.

        A control token adds no bytes. An id outside the vocabulary also adds no bytes: a model may have more rows than
        its tokenizer has ids.
        """
        ...

    def first_bytes_of(self, token: int) -> bytes:
        """Return the bytes that `token` adds at the start of a text, without the space that `encode` put in front."""
        ...

    def piece(self, token: int) -> str:
        """Return the spelling of `token` in the vocabulary."""
        ...


def encode_text(tokenizer: Tokenizer, text: str, *, bos: bool = True) -> list[int]:
    """Encode a whole text; with `bos`, the first id is BOS if the tokenizer has BOS."""
    begin = [tokenizer.bos] if bos and tokenizer.bos is not None else []
    return [*begin, *tokenizer.encode(text)]


def named_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> frozenset[int]:
    """Return the ids of the control tokens with a name in `texts`, so that a stop string can name a control token."""
    return frozenset(tokenizer.special[text] for text in texts if text in tokenizer.special)


class Decoder:
    """Converts ids to text one at a time, and returns each character as soon as all its bytes have arrived.

    With `start`, the ids begin a text, and we remove the space that `encode` put in front of the text. Control tokens
    before the text, such as BOS, do not count as text.
    """

    def __init__(self, tokenizer: Tokenizer, *, start: bool = True):
        self._tokenizer = tokenizer
        self._starts = start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Decode the next id, and return the characters that it completes; "" if a character still lacks bytes."""
        spelling = self._tokenizer.bytes_of(token)
        if spelling and self._starts:
            spelling = self._tokenizer.first_bytes_of(token)
            self._starts = False
        return self._utf8.decode(spelling)

    def finish(self) -> str:
        """End the text, and return U+FFFD if the last character lacks bytes, else an empty string."""
        return self._utf8.decode(b"", final=True)


def decode(tokenizer: Tokenizer, ids: Iterable[int], *, start: bool = True) -> str:
    """Decode `ids` to a text. Bytes that are not valid UTF-8 become U+FFFD.

    With `start=False`, the ids continue another text, so we keep a space at the start.
    """
    decoder = Decoder(tokenizer, start=start)
    return "".join(decoder.feed(token) for token in ids) + decoder.finish()


def is_byte(piece: str) -> bool:
    """Tell whether `piece` is one of "<0x00>" to "<0xFF>".

    >>> is_byte("<0x41>"), is_byte("<0x4>")
    (True, False)
    """
    return re.fullmatch("<0x[0-9A-F]{2}>", piece) is not None


def check_text(text: str) -> None:
    """Raise ValueError if `text` has half of a surrogate pair, which libraries treat in different ways.

    >>> check_text("wave: \\ud83d")
    Traceback (most recent call last):
    ValueError: the text is not valid Unicode: character 6 is a lone surrogate, U+D83D
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        lone = ord(text[error.start])
        message = f"the text is not valid Unicode: character {error.start} is a lone surrogate, U+{lone:04X}"
        if 0xDC80 <= lone <= 0xDCFF:  # Python reads an invalid byte of stdin or of an argument as such a surrogate.
            message += f" (the byte {lone - 0xDC00:02X}, which is not UTF-8)"
        raise ValueError(message) from None


def check_texts(value: Any) -> None:
    """Call `check_text` for each string in a JSON value, including keys."""
    match value:
        case str():
            check_text(value)
        case Mapping():
            for key, entry in value.items():
                check_texts(key)
                check_texts(entry)
        case list() | tuple():
            for entry in value:
                check_texts(entry)
