r"""Byte-level byte-pair encoding, as in Llama 3.

(Radford et al., 2019, "Language models are unsupervised multitask learners". Byte-pair encoding is from Sennrich et
al., 2016, https://arxiv.org/abs/1508.07909.)

A vocabulary is a set of byte strings, including the 256 single bytes, each with a rank. Encoding a text has three
steps:

    1. split the text into chunks (words with the space before them, digits, punctuation, ...) by a regular expression
    2. if a chunk is a token, use that token; otherwise split the chunk into its UTF-8 bytes
    3. join the two neighbors with the lowest-ranked joint token, the leftmost on ties; repeat while such a pair exists

A token's rank is also its id, and its position in the order of training. No text is unknown, nothing is normalized and
no space is added, so decoding is concatenation and restores every text exactly.

tiktoken stores a vocabulary in this way: ranks determine everything. Hugging Face stores a list of merges instead, i.e.
pairs of tokens that form a token, and writes each byte as a printable character ("Ġ" is a space). For a trained
vocabulary, both give the same ids.

The pattern is as much a part of the vocabulary as the ranks. GPT-2 keeps a run of digits together. Llama 3 cuts the run
into groups of three digits, and Qwen2 and Mistral's Tekken cut it into single digits. Tekken also splits "camelCase"
before the capital.
"""

from collections.abc import Mapping, Sequence

import regex

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(text: str, *, pattern: str) -> list[str]:
    """Split `text` into chunks. No token crosses a border between chunks.

    >>> split("In 2024,  it's", pattern=LLAMA3)
    ['In', ' ', '202', '4', ',', ' ', ' it', "'s"]
    >>> split("In 2024", pattern=GPT2)
    ['In', ' 2024']
    """
    return regex.findall(pattern, text)


def encode(text: str, ranks: Mapping[bytes, int], *, pattern: str) -> list[int]:
    """Encode `text` as ids.

    >>> ranks = {bytes([byte]): byte for byte in range(256)} | {b"bc": 256, b"ab": 257}
    >>> encode("abc", ranks, pattern=LLAMA3)  # "bc" is joined first, because its rank is lower
    [97, 256]
    """
    return [token for chunk in split(text, pattern=pattern) for token in merge(chunk.encode(), ranks)]


def merge(chunk: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    """Encode one chunk: join its bytes, the pair with the lowest rank first, until no two neighbors form a token."""
    if chunk in ranks:
        return [ranks[chunk]]
    parts = [bytes([byte]) for byte in chunk]
    while places := [i for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in ranks]:
        best = min(places, key=lambda i: ranks[parts[i] + parts[i + 1]])  # the leftmost of equal ranks
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return [ranks[part] for part in parts]


def decode(ids: Sequence[int], ranks: Mapping[bytes, int]) -> bytes:
    """Decode `ids` to bytes, which may begin or end within a character.

    >>> decode([226, 130, 172], {bytes([byte]): byte for byte in range(256)}).decode()
    '€'
    """
    tokens = {rank: token for token, rank in ranks.items()}
    return b"".join(tokens[token] for token in ids)
