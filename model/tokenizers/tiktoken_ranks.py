"""Llama 3's `tokenizer.model`: byte strings and their ranks. The algorithm is defined in `reference.byte_bpe`.

Each line is a token in base64, a space and its rank, which is its id. The control tokens are not in the file: they
follow in the order of Meta's code (https://github.com/meta-llama/llama-models, models/llama3/tokenizer.py).
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import tiktoken

from model.checkpoints.checkpoint import refused
from model.tokenizers.limits import check_count
from model.tokenizers.tokenizer import check_text
from reference.byte_bpe import LLAMA3

SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",  # the end of a message that expects a tool's answer
    "<|eot_id|>",  # the end of a turn
    "<|python_tag|>",
    "<|image|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(2, 246)),
)  # 256 in all

LONGEST_RUN = 25_000  # characters of white space; tiktoken's stack overflows somewhere below 1,000,000


@dataclass(frozen=True)
class TiktokenTokenizer:
    """See `model.tokenizers.tokenizer.Tokenizer`."""

    vocab: int
    bos: int | None
    special: Mapping[str, int]
    dummy_prefix: bool
    absorbs: Mapping[str, tuple[bool, bool]]
    _tokens: Sequence[bytes] = field(repr=False)  # by id, without the control tokens
    _names: Sequence[str] = field(repr=False)  # the control tokens, which follow
    _encoding: tiktoken.Encoding = field(repr=False)

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        check_text(text)
        return [token for part in cut(text) for token in self._encoding.encode_ordinary(part)]

    def encode_after_special(self, text: str) -> list[int]:
        return self.encode(text)

    def bytes_of(self, token: int) -> bytes:
        return self._tokens[token] if 0 <= token < len(self._tokens) else b""

    def first_bytes_of(self, token: int) -> bytes:
        return self.bytes_of(token)

    def piece(self, token: int) -> str:
        if 0 <= token - len(self._tokens) < len(self._names):
            return self._names[token - len(self._tokens)]
        return self.bytes_of(token).decode(errors="backslashreplace")


def cut(text: str) -> Iterator[str]:
    """Cut `text` into parts where white space is longer than tiktoken can bear, as Meta does.

    >>> [len(part) for part in cut("a" + " " * 60_000 + "b")]
    [25001, 25000, 10001]
    """
    done = 0
    for run in re.finditer(r"\s+", text):
        for end in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            yield text[done:end]
            done = end
    yield text[done:]


def read_tiktoken(data: bytes, *, path: str) -> TiktokenTokenizer:
    """Read a tokenizer from the bytes of a file of ranks; `path` is for messages. Raises `CheckpointError`."""
    tokens = _parse(data, path)
    special = {name: len(tokens) + i for i, name in enumerate(SPECIAL)}
    encoding = tiktoken.Encoding(
        name=path,
        pat_str=LLAMA3,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens=special,
    )
    return TiktokenTokenizer(
        vocab=len(tokens) + len(SPECIAL),
        bos=special["<|begin_of_text|>"],
        special=special,
        dummy_prefix=False,
        absorbs={},
        _tokens=tokens,
        _names=SPECIAL,
        _encoding=encoding,
    )


def _parse(data: bytes, path: str) -> list[bytes]:
    """The tokens in the order of their ranks."""
    check_count(data.count(b"\n"), path)
    tokens: list[bytes] = []
    seen: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines()):
        match line.split():
            case [word, rank] if rank.isdigit() and int(rank[:20]) == number:
                try:
                    token = base64.b64decode(word, validate=True)
                except binascii.Error:
                    raise refused(path, f"line {number + 1} is not base64: {word[:40]!r}") from None
            case _:
                expected = f"a token in base64 and its rank, {number}"
                raise refused(path, f"line {number + 1} is {line[:40]!r}, not {expected}; the file may be cut short")
        if token in seen or not token:
            raise refused(path, f"line {number + 1} repeats a token, or has an empty one")
        seen[token] = number
        tokens.append(token)
    missing = [byte for byte in range(256) if bytes([byte]) not in seen]
    if missing:
        raise refused(path, f"no token for {len(missing)} of the 256 bytes, 0x{missing[0]:02X} first")
    return tokens
