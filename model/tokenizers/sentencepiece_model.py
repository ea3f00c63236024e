"""SentencePiece models: Llama 2, TinyLlama, Mistral. The algorithm is defined in `reference.sentencepiece_bpe`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.tokenizers.charsmap import check_charsmap
from llamaspec.model.tokenizers.limits import MOST_SPECIAL, MOST_TOKENS, check_count, check_special
from llamaspec.model.tokenizers.tokenizer import UNKNOWN, check_text
from llamaspec.model.tokenizers.tokenizer_config import Added, read_added, read_config, stated_bos, stated_prefix

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # SentencePiece.Type in sentencepiece_model.proto
MISTRALS = "[INST]"  # a control token of Mistral's models alone


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """See `model.tokenizers.tokenizer.Tokenizer`."""

    vocab: int
    bos: int | None
    special: Mapping[str, int]
    dummy_prefix: bool
    absorbs: Mapping[str, tuple[bool, bool]]
    _prefix_after_special: bool = field(repr=False)
    _first: SentencePieceProcessor = field(repr=False)  # for the start of a text
    _next: SentencePieceProcessor = field(repr=False)  # for text that continues other text: adds no space in front

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        check_text(text)
        return (self._first if start else self._next).encode(text)

    def encode_after_special(self, text: str) -> list[int]:
        return self.encode(text, start=self._prefix_after_special)

    def bytes_of(self, token: int) -> bytes:
        if not 0 <= token < self.vocab or self._first.is_control(token):
            return b""
        if self._first.is_unknown(token):
            return UNKNOWN.encode()
        piece = self._first.id_to_piece(token)
        if self._first.is_byte(token):
            return bytes([int(piece[3:5], 16)])  # "<0x41>"
        return piece.replace("▁", " ").encode()

    def first_bytes_of(self, token: int) -> bytes:
        return self.bytes_of(token).removeprefix(b" " if self.dummy_prefix else b"")

    def proto(self) -> ModelProto:
        """The model that `read_sentencepiece` read, with the tokens that were added to it."""
        proto = ModelProto()
        proto.ParseFromString(self._first.serialized_model_proto())
        return proto

    def piece(self, token: int) -> str:
        return self._first.id_to_piece(token) if 0 <= token < self.vocab else ""


def read_sentencepiece(data: bytes, *, path: str) -> SentencePieceTokenizer:
    """Read a tokenizer from the bytes of a `tokenizer.model`; `path` is for messages, and for what lies beside it.

    An added_tokens.json and a tokenizer_config.json there may add tokens, name BOS, and say whether text after a
    control token gets a space in front ("legacy"). Raises `CheckpointError`.
    """
    if _fields(data) > MOST_TOKENS:
        raise refused(path, f"a SentencePiece model of more than {MOST_TOKENS:,} tokens")
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise refused(path, "not a tokenizer, or a damaged one: it is no SentencePiece model") from None
    if not (proto.pieces and proto.HasField("trainer_spec") and proto.HasField("normalizer_spec")):
        # They are written in this order, so a file that was cut between two of them still parses.
        raise refused(path, "an incomplete SentencePiece model: it lacks pieces, trainer_spec or normalizer_spec")
    folder = Path(path).parent
    added = read_added(folder)
    _add(proto, added, path)
    if (prefix := stated_prefix(folder, byte_level=False)) is not None:
        proto.normalizer_spec.add_dummy_prefix = prefix
    ids = {piece.piece: id for id, piece in enumerate(proto.pieces)}
    # Mistral's own encoder, and transformers without "legacy", give text after a control token no space in front.
    legacy = read_config(folder).get("legacy")
    own_space = not any(piece.piece == MISTRALS and piece.type == CONTROL for piece in proto.pieces)
    absorbs = {name: (token.lstrip, token.rstrip) for name, token in added.items() if token.lstrip or token.rstrip}
    tokenizer = from_proto(
        proto, path=path, absorbs=absorbs, prefix_after_special=legacy if isinstance(legacy, bool) else own_space
    )
    return replace(tokenizer, bos=stated_bos(folder, ids.get, begins=True, default=tokenizer.bos))


def from_proto(
    proto,
    *,
    path: str,
    prefix_after_special: bool = True,
    absorbs: Mapping[str, tuple[bool, bool]] | None = None,
) -> SentencePieceTokenizer:
    """Make a tokenizer of a ModelProto, which this changes. Raises `CheckpointError`; `path` is for messages."""
    if proto.trainer_spec.treat_whitespace_as_suffix or not proto.normalizer_spec.escape_whitespaces:
        raise refused(path, "a SentencePiece model that does not write spaces as a leading ▁ is not supported")
    check_count(len(proto.pieces), path)
    special = {piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type == CONTROL}
    check_special(special, path)
    if table := proto.normalizer_spec.precompiled_charsmap:
        check_charsmap(table, path)
    dummy_prefix = proto.normalizer_spec.add_dummy_prefix
    first = _processor(proto, path)
    proto.normalizer_spec.add_dummy_prefix = False
    return SentencePieceTokenizer(
        vocab=len(proto.pieces),
        bos=first.bos_id() if first.bos_id() >= 0 else None,
        special=special,
        dummy_prefix=dummy_prefix,
        absorbs={name: sides for name, sides in (absorbs or {}).items() if name in special},
        _prefix_after_special=prefix_after_special,
        _first=first,
        _next=_processor(proto, path),
    )


def _add(proto, added: Mapping[str, Added], path: str) -> None:
    """Put added tokens into a model: control tokens, and tokens that text spells but that are never split."""
    for name, token in sorted(added.items(), key=lambda item: item[1].id):
        if token.id >= len(proto.pieces) + MOST_SPECIAL:
            raise refused(path, f"added token {short(name)} has id {token.id}, far from the {len(proto.pieces)} others")
        while len(proto.pieces) < token.id:
            proto.pieces.add(piece=f"[PAD{len(proto.pieces)}]", score=0.0, type=UNUSED)
        if len(proto.pieces) == token.id:
            proto.pieces.add(piece=name, score=0.0, type=NORMAL)
        piece = proto.pieces[token.id]
        if piece.piece != name:
            raise refused(path, f"added token {short(name)} has id {token.id}, as {short(piece.piece)} has")
        if piece.type in (NORMAL, USER_DEFINED, UNUSED):
            piece.type = CONTROL if token.special else USER_DEFINED


def _fields(data: bytes) -> int:
    """The number of top-level fields in protobuf's wire format, as far as it can be read.

    Each piece is such a field, and this count takes far less memory than to parse them.
    """
    count = at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while at < len(data):
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128 or shift > 63:
                break
        return value

    while at < len(data) and count <= MOST_TOKENS:
        match number() & 7:
            case 0:
                number()
            case 1:
                at += 8
            case 2:
                size = number()
                at += size
            case 5:
                at += 4
            case _:
                break
        count += 1
    return count


def _processor(proto, path: str) -> SentencePieceProcessor:
    try:
        return SentencePieceProcessor(model_proto=proto.SerializeToString())
    except (RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise refused(path, f"SentencePiece refuses this model: {message}") from None
