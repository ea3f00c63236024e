"""SentencePiece models: Llama 2, TinyLlama, Mistral. The algorithm is defined in `reference.sentencepiece_bpe`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from model.checkpoints.checkpoint import refused
from model.tokenizers.tokenizer import UNKNOWN, check_text

CONTROL = 3  # SentencePiece.Type in sentencepiece_model.proto


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """See `model.tokenizers.tokenizer.Tokenizer`."""

    vocab: int
    bos: int | None
    special: Mapping[str, int]
    dummy_prefix: bool
    _first: SentencePieceProcessor = field(repr=False)  # for the start of a text
    _next: SentencePieceProcessor = field(repr=False)  # for what continues it: no space in front

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        check_text(text)
        return (self._first if start else self._next).encode(text)

    def bytes_of(self, token: int) -> bytes:
        if not 0 <= token < self.vocab or self._first.is_control(token):
            return b""
        if self._first.is_unknown(token):
            return UNKNOWN.encode()
        piece = self._first.id_to_piece(token)
        if self._first.is_byte(token):
            return bytes([int(piece[3:5], 16)])  # "<0x41>"
        return piece.replace("▁", " ").encode()

    def proto(self) -> ModelProto:
        """The model that `read_sentencepiece` read."""
        proto = ModelProto()
        proto.ParseFromString(self._first.serialized_model_proto())
        return proto

    def piece(self, token: int) -> str:
        return self._first.id_to_piece(token) if 0 <= token < self.vocab else ""


def read_sentencepiece(data: bytes, *, path: str) -> SentencePieceTokenizer:
    """A tokenizer from the bytes of a `tokenizer.model`; `path` is for messages."""
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise refused(path, "not a tokenizer, or a damaged one: it is no SentencePiece model") from None
    if not (proto.pieces and proto.HasField("trainer_spec") and proto.HasField("normalizer_spec")):
        # They are written in this order, so a file that was cut between two of them still parses.
        raise refused(path, "an incomplete SentencePiece model: it lacks pieces, trainer_spec or normalizer_spec")
    return from_proto(proto, path=path)


def from_proto(proto, *, path: str) -> SentencePieceTokenizer:
    """A tokenizer from a ModelProto."""
    if proto.trainer_spec.treat_whitespace_as_suffix or not proto.normalizer_spec.escape_whitespaces:
        raise refused(path, "a SentencePiece model that does not write spaces as a leading ▁ is not supported")
    dummy_prefix = proto.normalizer_spec.add_dummy_prefix
    first = _processor(proto, path)
    proto.normalizer_spec.add_dummy_prefix = False
    return SentencePieceTokenizer(
        vocab=len(proto.pieces),
        bos=first.bos_id() if first.bos_id() >= 0 else None,
        special={piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type == CONTROL},
        dummy_prefix=dummy_prefix,
        _first=first,
        _next=_processor(proto, path),
    )


def _processor(proto, path: str) -> SentencePieceProcessor:
    try:
        return SentencePieceProcessor(model_proto=proto.SerializeToString())
    except (RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise refused(path, f"SentencePiece refuses this model: {message}") from None
