"""Reads the tokens of an answer with a `TextReader`."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from llamaspec.model.tokenizers.tokenizer import Tokenizer, decode
from llamaspec.serving.streaming import AnswerPiece, DrawnToken, TextReader


def pieces_of(reader: TextReader, ids: Sequence[int], cuts: Iterable[int] = ()) -> list[AnswerPiece]:
    """Read an answer in parts that end at `cuts`; return the piece after each part, and the piece after the end."""
    pieces = []
    for first, last in pairwise((0, *sorted(cuts), len(ids))):
        reader.feed([DrawnToken(token) for token in ids[first:last]])
        pieces.append(reader.piece())
    reader.finish()
    return [*pieces, reader.piece()]


def joined(pieces: Sequence[AnswerPiece], tokenizer: Tokenizer) -> tuple[str, str, str]:
    """Return an answer's text, its reasoning, and the text of its tokens."""
    text, thoughts = ("".join(getattr(piece, name) for piece in pieces) for name in ("text", "thoughts"))
    return (
        text,
        thoughts,
        decode(tokenizer, [placed.token.id for piece in pieces for placed in piece.tokens], start=False),
    )
