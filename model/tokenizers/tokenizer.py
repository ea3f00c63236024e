"""The interface of all tokenizers, and the way from ids back to text."""

import codecs
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

UNKNOWN = " ⁇ "  # SentencePiece prints this for a character that a vocabulary without bytes cannot spell.


@runtime_checkable
class Tokenizer(Protocol):
    """Turns text into ids, and an id into the bytes it stands for."""

    @property
    def vocab(self) -> int:
        """The number of ids, which are 0 to vocab - 1."""
        ...

    @property
    def bos(self) -> int | None:
        """The id that begins texts, or None where the model's convention has none."""
        ...

    @property
    def eos(self) -> int | None:
        """The id that ends texts by the tokenizer's own files, or None where they name none.

        A GGUF file names the id by a key of the model (`Checkpoint.stops`).
        """
        ...

    @property
    def special(self) -> Mapping[str, int]:
        """The ids of control tokens by name, such as "<s>" or "<|eot_id|>". Encoding a text never gives these ids."""
        ...

    @property
    def dummy_prefix(self) -> bool:
        """Whether a text is encoded with a space in front, so that its first word is like any other."""
        ...

    @property
    def absorbs(self) -> Mapping[str, tuple[bool, bool]]:
        """Control tokens that absorb the white space before them, after them, or both."""
        ...

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Encode plain text, without BOS. Names of control tokens in the text are just characters.

        `start=False` says that `text` continues other text, and so gets no space in front. Raises ValueError if `text`
        is not valid Unicode, or if the tokenizer's library fails over it.
        """
        ...

    def encode_after_special(self, text: str) -> list[int]:
        """Encode plain text that follows a control token within a conversation, otherwise like `encode`.

        Tokenizers differ in whether this text gets a space in front.
        """
        ...

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that `token` adds to a text.

        A control token adds nothing. An id that the vocabulary lacks adds nothing either, since models may have more
        rows than their tokenizer has ids.
        """
        ...

    def first_bytes_of(self, token: int) -> bytes:
        """Return the bytes that `token` adds at the start of a text: no space that `encode` has put in front."""
        ...

    def piece(self, token: int) -> str:
        """The spelling of `token` in the vocabulary."""
        ...


def encode_text(tokenizer: Tokenizer, text: str, *, bos: bool = True) -> list[int]:
    """Encode a whole text, with BOS first if the model's convention has it."""
    begin = [tokenizer.bos] if bos and tokenizer.bos is not None else []
    return [*begin, *tokenizer.encode(text)]


def named_tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> frozenset[int]:
    """Return the ids of the control tokens that `texts` name. A stop string may be such a name."""
    return frozenset(tokenizer.special[text] for text in texts if text in tokenizer.special)


class Decoder:
    """Turns ids into text, one at a time, as soon as characters are complete.

    With `start`, the ids begin a text, and the space that `encode` put in front of the text is removed. Control tokens
    before the text, such as BOS, do not count as text.
    """

    def __init__(self, tokenizer: Tokenizer, *, start: bool = True):
        self._tokenizer = tokenizer
        self._starts = start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Decode the next id. Returns the text that the id completes, or "" while a character still lacks bytes."""
        spelling = self._tokenizer.bytes_of(token)
        if spelling and self._starts:
            spelling = self._tokenizer.first_bytes_of(token)
            self._starts = False
        return self._utf8.decode(spelling)

    def finish(self) -> str:
        """End the text. Returns U+FFFD if the ids ended within a character."""
        return self._utf8.decode(b"", final=True)


def decode(tokenizer: Tokenizer, ids: Iterable[int], *, start: bool = True) -> str:
    """Decode `ids`; `start=False` if they continue a text. Bytes that are not UTF-8 become U+FFFD."""
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
        if 0xDC80 <= lone <= 0xDCFF:  # so Python reads a byte of stdin or of an argument that is not UTF-8
            message += f" (the byte {lone - 0xDC00:02X}, which is not UTF-8)"
        raise ValueError(message) from None


def check_texts(value: Any) -> None:
    """Check each string of a JSON value as `check_text` does, keys included."""
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
