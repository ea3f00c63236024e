"""SentencePiece's byte-pair encoding (Kudo & Richardson, 2018, https://arxiv.org/abs/1808.06226), as in Llama 2.

A vocabulary is a set of pieces of text, each with a score. Text becomes pieces in four steps:

    1. put a space in front, and write each space as "▁" (U+2581):    "in it" -> "▁in▁it"
    2. take it apart into characters
    3. join the two neighbors whose joint piece scores highest, the leftmost on ties; repeat while any two are a piece
    4. a character that is no piece is the pieces of its UTF-8 bytes, "<0xC3>" "<0xA9>" for "é" (byte fallback);
       a vocabulary without those has "<unk>" for every run of such characters

The space in front (the dummy prefix) lets a word begin with the same piece at the start of a text as within it.
A piece's score is minus its place in the order in which training found it, so step 3 replays the training.

Pieces of text are all that text can spell: "<s>" or "<0x41>" in a text are ordinary characters, never the control
token or the byte. Not here, because no released Llama has them: normalization (NFKC, squeezed spaces) and pieces that
users define.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

SPACE = "▁"


class Piece(NamedTuple):
    id: int
    score: float


class Vocabulary(NamedTuple):
    pieces: Mapping[str, Piece]  # what text is made of; a space is spelled "▁"
    bytes: Sequence[int]  # the ids of <0x00> to <0xFF>; empty: no byte fallback
    unknown: int  # the id that stands for unknown characters where there are no bytes


def encode(text: str, vocabulary: Vocabulary, *, start: bool = True) -> list[int]:
    """The ids of `text`; `start=False` when it continues other text, and so gets no space in front.

    >>> a, b, c = Piece(256, -4.0), Piece(257, -4.0), Piece(258, -4.0)
    >>> pieces = {"a": a, "b": b, "c": c, "ab": Piece(259, -1.0), "bc": Piece(260, -2.0), "▁": Piece(261, -3.0)}
    >>> vocabulary = Vocabulary(pieces, bytes=range(256), unknown=-1)
    >>> encode("abc", vocabulary)  # "ab" goes first: it scores higher than "bc"
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
    """Join neighbors, the best first, until no two of them are a piece.

    >>> merge(list("aaa"), {"aa": Piece(0, 0.0)})
    ['aa', 'a']
    """
    parts = list(parts)
    while places := [i for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in pieces]:
        best = max(places, key=lambda i: pieces[parts[i] + parts[i + 1]].score)  # the first of equals
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def decode(ids: Sequence[int], vocabulary: Vocabulary, *, start: bool = True) -> str:
    """The text of `ids`; `start=False` when it continues other text, and so has no space in front to lose.

    Control tokens are no text, bytes that are not UTF-8 become U+FFFD, and what was unknown shows as " ⁇ ".

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
