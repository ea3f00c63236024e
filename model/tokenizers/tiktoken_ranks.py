"""Tokenizers that consist of byte strings and their ranks, such as Llama 3's `tokenizer.model`.

`reference.byte_bpe` defines the algorithm. Each line of the file is a token in base64, a space, and the token's rank,
which is also its id. The file does not contain the control tokens. They have the next ids, in the order of Meta's code
(https://github.com/meta-llama/llama-models, models/llama3/tokenizer.py).
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import tiktoken

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.tokenizers.limits import check_count
from llamaspec.model.tokenizers.tokenizer import check_text
from llamaspec.model.tokenizers.tokenizer_config import stated_end, stated_eos
from llamaspec.reference.byte_bpe import LLAMA3

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
    """A tokenizer from ranks, run by tiktoken; the protocol `tokenizer.Tokenizer` explains the methods."""

    vocab: int
    bos: int | None
    eos: int | None
    special: Mapping[str, int]
    dummy_prefix: bool
    absorbs: Mapping[str, tuple[bool, bool]]
    pattern: str  # the regular expression that splits a text into pieces
    _tokens: Sequence[bytes] = field(repr=False)  # by rank
    _names: Mapping[int, str] = field(repr=False)  # the control tokens, by id
    _first: int = field(repr=False)  # the id of rank 0
    _encoding: tiktoken.Encoding = field(repr=False)
    appended: tuple[int, ...] = ()

    def trimmed(self, text: str, *, after: str | None, before: str | None) -> str:
        return text

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        check_text(text)
        return [self._first + rank for part in cut(text) for rank in self._encoding.encode_ordinary(part)]

    def encode_after_special(self, text: str) -> list[int]:
        return self.encode(text)

    def bytes_of(self, token: int) -> bytes:
        return self._tokens[token - self._first] if 0 <= token - self._first < len(self._tokens) else b""

    def first_bytes_of(self, token: int) -> bytes:
        return self.bytes_of(token)

    def piece(self, token: int) -> str:
        return self._names.get(token) or self.bytes_of(token).decode(errors="backslashreplace")


def cut(text: str) -> Iterator[str]:
    """Split `text` within long runs of white space, as Meta's code does, since tiktoken cannot encode such runs.

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
    """Read a tokenizer from `data`, the bytes of a file of ranks; `path` is its path, for error messages.

    tokenizer_config.json in the same folder may state eos_token and add_eos_token. Raises `CheckpointError` if a file
    cannot be used.
    """
    tokens, begin, folder = _parse(data, path), "<|begin_of_text|>", Path(path).parent
    tokenizer = from_ranks(tokens, SPECIAL, pattern=LLAMA3, begin=begin, controls_first=False, path=path)
    eos = stated_eos(folder, tokenizer.special.get, default=None)
    return replace(tokenizer, eos=eos, appended=stated_end(folder, eos))


def from_ranks(
    tokens: Sequence[bytes], controls: Sequence[str], *, pattern: str, begin: str, controls_first: bool, path: str
) -> TiktokenTokenizer:
    """Build a tokenizer from `tokens` (in the order of their ranks) and `controls` (the names of control tokens).

    With `controls_first`, the control tokens have the lowest ids, otherwise the highest. `begin` is the control token
    that begins texts, and `path` is the path of the file, for error messages. Raises `CheckpointError` if two tokens
    are equal, if a byte has no token, or if the pattern is not a usable regular expression.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) < len(tokens) or b"" in ranks:
        twice = next((i for i, token in enumerate(tokens) if ranks[token] != i or not token), 0)
        raise refused(path, f"the token of rank {twice} is empty, or equal to another token")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise refused(path, f"{len(missing)} of the 256 bytes have no token, such as 0x{missing[0]:02X}")
    try:
        encoding = tiktoken.Encoding(name=path, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError as error:
        message = " ".join(str(error).split())[:200]
        raise refused(path, f"the pattern is not a usable regular expression: {message}") from None
    first, control = (len(controls), 0) if controls_first else (0, len(tokens))
    special = {name: control + i for i, name in enumerate(controls)}
    return TiktokenTokenizer(
        vocab=len(tokens) + len(controls),
        bos=special.get(begin),
        eos=None,
        special=special,
        dummy_prefix=False,
        absorbs={},
        pattern=pattern,
        _tokens=tokens,
        _names={id: name for name, id in special.items()},
        _first=first,
        _encoding=encoding,
    )


def _parse(data: bytes, path: str) -> list[bytes]:
    """Read the tokens in the order of their ranks."""
    check_count(data.count(b"\n"), path)
    tokens: list[bytes] = []
    for number, line in enumerate(data.splitlines()):
        match line.split():
            case [word, rank] if rank.isdigit() and int(rank[:20]) == number:
                try:
                    token = base64.b64decode(word, validate=True)
                except binascii.Error:
                    raise refused(path, f"line {number + 1} is not base64: {word[:40]!r}") from None
            case _:
                expected = f"a token in base64 and its rank, {number}"
                what = f"line {number + 1} is {line[:40]!r}, expected {expected}"
                raise refused(path, f"{what} (the file may be truncated)")
        tokens.append(token)
    return tokens
