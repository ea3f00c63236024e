"""SentencePiece models: Llama 2, TinyLlama, Mistral. The algorithm is defined in `reference.sentencepiece_bpe`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.tokenizers.added_tokens import Leftmost, LongestFirst
from llamaspec.model.tokenizers.charsmap import check_charsmap
from llamaspec.model.tokenizers.limits import MOST_SPECIAL, MOST_TOKENS, check_count, check_special
from llamaspec.model.tokenizers.tokenizer import UNKNOWN, check_text
from llamaspec.model.tokenizers.tokenizer_config import (
    Added,
    read_added,
    read_config,
    stated_bos,
    stated_eos,
    stated_prefix,
)

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # SentencePiece.Type in sentencepiece_model.proto

# Rules for text after a control token or an added token: put nothing in front of it, always a space, or a space unless
# the text begins with one ("one space").
AfterAdded = Literal["nothing", "space", "one space"]


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """See `model.tokenizers.tokenizer.Tokenizer`."""

    vocab: int
    bos: int | None
    eos: int | None
    special: Mapping[str, int]
    dummy_prefix: bool
    absorbs: Mapping[str, tuple[bool, bool]]
    _added: Leftmost | LongestFirst | None = field(repr=False)  # added tokens that text spells
    _after_added: AfterAdded = field(repr=False)
    _first: SentencePieceProcessor = field(repr=False)  # for the start of a text
    _next: SentencePieceProcessor = field(repr=False)  # for text that continues other text: adds no space in front

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        check_text(text)
        if self._added is None:
            return (self._first if start else self._next).encode(text)
        ids: list[int] = []
        for part in self._added.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                begins = self._begins_anew(part) if ids else start  # Only the first text follows no added token.
                ids += (self._first if begins else self._next).encode(part)
        return ids

    def encode_after_special(self, text: str) -> list[int]:
        return self.encode(text, start=self._begins_anew(text))

    def _begins_anew(self, text: str) -> bool:
        """Tell whether text that follows a control token or an added token gets a space in front."""
        return self._after_added == "space" or (self._after_added == "one space" and text[:1] not in (" ", "▁"))

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

    @property
    def added(self) -> Mapping[str, Added]:
        """The added tokens that text can spell; they are found before the text is cut into pieces."""
        return self._added.added if self._added else {}

    @property
    def prefix_after_special(self) -> bool:
        """Whether text after a control token or an added token gets a space in front."""
        return self._after_added != "nothing"

    def piece(self, token: int) -> str:
        return self._first.id_to_piece(token) if 0 <= token < self.vocab else ""


def read_sentencepiece(data: bytes, *, path: str) -> SentencePieceTokenizer:
    """Read a tokenizer from the bytes of a `tokenizer.model`; `path` is for messages, and for files next to it.

    An added_tokens.json and a tokenizer_config.json there may add tokens, name BOS, and say whether text after a
    control token or an added token gets a space in front ("legacy"). Raises `CheckpointError`.

    The rules come from transformers 5.24 (models/llama/tokenization_llama.py, tokenization_utils_base.py
    `_from_pretrained`, convert_slow_tokenizer.py `SentencePieceExtractor`):

    1. Added tokens are found in the text as it is, spaces and all, before SentencePiece cuts what lies between them.
    2. The first text gets a space in front if the model asks for it (add_dummy_prefix). With "legacy" true, each text
       after an added token or a control token gets one, too, unless the text begins with a space.
    3. Tokens that the model itself has as user-defined are found by SentencePiece, after each space became "▁".

    One thing differs: where the first text begins with a space, transformers 5 puts none in front. SentencePiece,
    llama.cpp and transformers 4 do, and so does this module.
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
    absorbs = {name: (token.lstrip, token.rstrip) for name, token in added.items() if token.lstrip or token.rstrip}
    spelled = {
        name: token
        for name, token in added.items()
        if not token.special and proto.pieces[token.id].type in (NORMAL, UNUSED)  # SentencePiece finds its own
    }
    tokenizer = from_proto(
        proto,
        path=path,
        absorbs=absorbs,
        added=Leftmost(spelled) if spelled else None,
        after_added="one space" if read_config(folder).get("legacy") is True else "nothing",
    )
    end = proto.trainer_spec.eos_piece
    return replace(
        tokenizer,
        bos=stated_bos(folder, ids.get, begins=True, default=tokenizer.bos),
        eos=stated_eos(folder, ids.get, default=end if end in tokenizer.special else None),
    )


def from_proto(
    proto,
    *,
    path: str,
    absorbs: Mapping[str, tuple[bool, bool]] | None = None,
    added: Leftmost | LongestFirst | None = None,
    after_added: AfterAdded = "space",
) -> SentencePieceTokenizer:
    """Make a tokenizer from a ModelProto, and change the proto. Raises `CheckpointError`; `path` is for messages."""
    if proto.trainer_spec.treat_whitespace_as_suffix or not proto.normalizer_spec.escape_whitespaces:
        raise refused(path, "a SentencePiece model that does not write spaces as a leading ▁ is not supported")
    check_count(len(proto.pieces), path)
    special = {piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type == CONTROL}
    check_special([*special, *(added.added if added else ())], path)
    if table := proto.normalizer_spec.precompiled_charsmap:
        check_charsmap(table, path)
    dummy_prefix = proto.normalizer_spec.add_dummy_prefix
    first = _processor(proto, path)
    proto.normalizer_spec.add_dummy_prefix = False
    return SentencePieceTokenizer(
        vocab=len(proto.pieces),
        bos=first.bos_id() if first.bos_id() >= 0 else None,
        eos=None,
        special=special,
        dummy_prefix=dummy_prefix,
        absorbs={name: sides for name, sides in (absorbs or {}).items() if name in special},
        _added=added,
        _after_added=after_added,
        _first=first,
        _next=_processor(proto, path),
    )


def _add(proto, added: Mapping[str, Added], path: str) -> None:
    """Add tokens to the pieces of a model, at their ids; special ones become control tokens."""
    for name, token in sorted(added.items(), key=lambda item: item[1].id):
        if token.id >= len(proto.pieces) + MOST_SPECIAL:
            raise refused(path, f"added token {short(name)} has id {token.id}, far from the {len(proto.pieces)} others")
        while len(proto.pieces) < token.id:
            proto.pieces.add(piece=f"[PAD{len(proto.pieces)}]", score=0.0, type=UNUSED)
        if len(proto.pieces) == token.id:
            proto.pieces.add(piece=name, score=0.0, type=UNUSED)  # no pieces are merged to it
        piece = proto.pieces[token.id]
        if piece.piece != name:
            raise refused(path, f"added token {short(name)} has id {token.id}, as {short(piece.piece)} has")
        if token.special and piece.type in (NORMAL, USER_DEFINED, UNUSED):
            piece.type = CONTROL


def _fields(data: bytes) -> int:
    """Count the top-level fields of a message in protobuf's wire format, up to the first that cannot be read.

    Each piece is such a field. Counting them takes far less memory than parsing the message.
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
