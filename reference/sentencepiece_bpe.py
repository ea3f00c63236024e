"""SentencePiece's byte-pair encoding (Kudo & Richardson, 2018, https://arxiv.org/abs/1808.06226), as in Llama 2.

A vocabulary is a set of pieces of text, each with a score. Text becomes pieces in four steps:

    1. put a space in front, and write each space as "▁" (U+2581):    "in it" -> "▁in▁it"
    2. split the text into characters
    3. join the two neighbors with the best-scoring joint piece, the leftmost on ties; repeat while such a pair exists
    4. replace a character that is not a piece by its UTF-8 bytes, "<0xC3>" "<0xA9>" for "é" (byte fallback);
       without byte pieces in the vocabulary, replace every run of such characters by "<unk>"

Because of the space in front (the dummy prefix), a word begins with the same piece at the start of a text as in the
middle. A piece's score is its position in the order of training, times -1. So step 3 joins in the order of training.

Text is always encoded as ordinary characters: "<s>" or "<0x41>" in a text never becomes the control token or the byte.
We leave out normalization (NFKC, squeezed spaces) and user-defined pieces, because no released Llama has them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

SPACE = "▁"


class Piece(NamedTuple):
    id: int
    score: float


class Vocabulary(NamedTuple):
    pieces: Mapping[str, Piece]  # the pieces of text; "▁" is a space
    bytes: Sequence[int]  # the ids of <0x00> to <0xFF>; empty: no byte fallback
    unknown: int  # the id for unknown characters if there are no byte pieces


def encode(text: str, vocabulary: Vocabulary, *, start: bool = True) -> list[int]:
    """Encode `text` as ids. With `start=False`, `text` continues an earlier text, so no space is put in front of it.

    >>> a, b, c = Piece(256, -4.0), Piece(257, -4.0), Piece(258, -4.0)
    >>> pieces = {"a": a, "b": b, "c": c, "ab": Piece(259, -1.0), "bc": Piece(260, -2.0), "▁": Piece(261, -3.0)}
    >>> vocabulary = Vocabulary(pieces, bytes=range(256), unknown=-1)
    >>> encode("abc", vocabulary)  # "ab" is joined first, because its score is higher
    [261, 259, 258]
    >>> encode("bcé", vocabulary, start=False)
    [260, 195, 169]
    """
    if text and start:
        text = " " + text
    ids = []
    unknown_before = False
    for part in merge(list(text.replace(" ", SPACE)), vocabulary.pieces):
        unknown = part not in vocabulary.pieces
        if not unknown:
            ids.append(vocabulary.pieces[part].id)
        elif vocabulary.bytes:
            ids.extend(vocabulary.bytes[byte] for byte in part.encode())
        elif not unknown_before:
            ids.append(vocabulary.unknown)
        unknown_before = unknown
    return ids


def merge(parts: Sequence[str], pieces: Mapping[str, Piece]) -> list[str]:
    """Join neighbors, the best pair first, until no two of them form a piece.

    >>> merge(list("aaa"), {"aa": Piece(0, 0.0)})
    ['aa', 'a']
    """
    parts = list(parts)
    while places := [i for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in pieces]:
        best = max(places, key=lambda i: pieces[parts[i] + parts[i + 1]].score)  # the leftmost of equal scores
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def decode(ids: Sequence[int], vocabulary: Vocabulary, *, start: bool = True) -> str:
    """Decode `ids` to text. With `start=False`, the ids continue an earlier text, so no leading space is removed.

    Control tokens give no text, invalid UTF-8 becomes U+FFFD, and the unknown token becomes " ⁇ ".

    >>> vocabulary = Vocabulary({"▁a": Piece(256, -1.0)}, bytes=range(256), unknown=-1)
    >>> decode([256, 256, 195, 169], vocabulary)
    'a aé'
    """
    spelling = {piece.id: text.replace(SPACE, " ").encode() for text, piece in vocabulary.pieces.items()}
    spelling |= {token: bytes([byte]) for byte, token in enumerate(vocabulary.bytes)}
    spelling[vocabulary.unknown] = " ⁇ ".encode()
    text = b"".join(spelling.get(token, b"") for token in ids)
    if start:
        text = text.removeprefix(b" ")
    return text.decode(errors="replace")
