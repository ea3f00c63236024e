"""Reads llama2.c's `tokenizer.bin`, which has the pieces and scores of a SentencePiece model.

    u32 length of the longest piece, then for each piece:  f32 score, u32 length, the piece in UTF-8

See https://github.com/karpathy/llama2.c. Pieces contain spaces instead of "▁". The first pieces are <unk>, BOS and EOS
(spelled "\\n<s>\\n" and "\\n</s>\\n"), then the 256 bytes. The file does not state the number of pieces, so a file that
is truncated between two pieces looks complete.
"""

import math
import struct
from typing import NamedTuple

from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.tokenizers.limits import check_count
from llamaspec.model.tokenizers.sentencepiece_model import SentencePieceTokenizer, from_proto

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # SentencePiece.Type in sentencepiece_model.proto
BPE = 2  # TrainerSpec.ModelType
FIRST_BYTE = 3  # the id of <0x00>
FIRST_PIECE = FIRST_BYTE + 256


class PieceRecord(NamedTuple):
    """A piece and its score, as the file stores them."""

    text: str
    score: float


def read_llama2c(data: bytes, *, path: str) -> SentencePieceTokenizer:
    """Read a tokenizer from `data`, the bytes of a `tokenizer.bin`; `path` is its path, for error messages.

    We build a SentencePiece model in memory, so that one implementation serves both kinds of file. Raises
    `CheckpointError` if the file is damaged.
    """
    pieces = _parse(data, path)
    if len(pieces) <= FIRST_PIECE:
        what = f"a llama2.c tokenizer has more than {FIRST_PIECE}: the file is truncated"
        raise refused(path, f"has {len(pieces)} pieces, but {what}")
    seen: dict[str, int] = {}
    proto = ModelProto()
    for i, (text, score) in enumerate(pieces):
        kind = NORMAL
        if i < FIRST_BYTE:
            text, kind = text.strip("\n"), UNKNOWN if i == 0 else CONTROL
        elif i < FIRST_PIECE:
            kind = BYTE
            if text != f"<0x{i - FIRST_BYTE:02X}>":
                what = f"piece {i} is {text[:40]!r}, expected '<0x{i - FIRST_BYTE:02X}>'"
                raise refused(path, f"is not a llama2.c tokenizer: {what}")
        else:
            text = text.replace(" ", "▁")
        if not text:
            raise refused(path, f"piece {i} is empty")
        if text in seen:
            raise refused(path, f"pieces {seen[text]} and {i} are both {text[:40]!r}")
        seen[text] = i
        proto.pieces.add(piece=text, score=score, type=kind)

    unknown, bos, eos = (piece.piece for piece in proto.pieces[:FIRST_BYTE])
    proto.trainer_spec.MergeFrom(
        type(proto.trainer_spec)(
            model_type=BPE, vocab_size=len(pieces), byte_fallback=True, unk_piece=unknown, bos_piece=bos, eos_piece=eos
        )
    )
    # llama2.c puts a space in front of a text, and does not change the text in any other way.
    proto.normalizer_spec.add_dummy_prefix = True
    proto.normalizer_spec.remove_extra_whitespaces = False
    return from_proto(proto, path=path)


def _parse(data: bytes, path: str) -> list[PieceRecord]:
    """Read the pieces, and check the length of each against the number of remaining bytes."""
    longest = int.from_bytes(data[:4], "little")
    pieces: list[PieceRecord] = []
    at = 4
    while at < len(data):
        check_count(i := len(pieces), path)
        if len(data) - at < 8:
            raise refused(path, f"the file ends within piece {i}")
        score, length = struct.unpack_from("<fI", data, at)
        at += 8
        if length > longest:
            raise refused(path, f"piece {i} has {length} bytes, but the header states at most {longest}")
        if length > len(data) - at:
            raise refused(path, f"the file ends within piece {i}")
        if not math.isfinite(score):
            raise refused(path, f"the score of piece {i} is {score}, expected a finite number")
        try:
            text = data[at : at + length].decode()
        except UnicodeDecodeError:
            raise refused(path, f"piece {i} is not valid UTF-8: {data[at : at + length][:40]!r}") from None
        pieces.append(PieceRecord(text, score))
        at += length
    return pieces
