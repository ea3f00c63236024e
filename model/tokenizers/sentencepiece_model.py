"""Reads SentencePiece models, such as those of Llama 2, TinyLlama and Mistral.

`reference.sentencepiece_bpe` defines the algorithm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.gguf.control_tokens import corrected_types
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.tokenizers.added_tokens import Leftmost, LongestFirst
from llamaspec.model.tokenizers.charsmap import check_charsmap
from llamaspec.model.tokenizers.limits import MOST_SPECIAL, MOST_TOKENS, check_count, check_single_word, check_special
from llamaspec.model.tokenizers.tokenizer import UNKNOWN, check_text
from llamaspec.model.tokenizers.tokenizer_config import (
    Added,
    read_added,
    read_config,
    stated_bos,
    stated_end,
    stated_eos,
    stated_prefix,
)

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # SentencePiece.Type in sentencepiece_model.proto

# What to put in front of text after a control token or an added token: nothing, always a space, or a space unless the
# text begins with a space ("one space").
AfterAdded = Literal["nothing", "space", "one space"]


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """A tokenizer from a SentencePiece model; the protocol `tokenizer.Tokenizer` explains the methods."""

    vocab: int
    bos: int | None
    eos: int | None
    special: Mapping[str, int]
    dummy_prefix: bool
    absorbs: Mapping[str, tuple[bool, bool]]
    _added: Leftmost | LongestFirst | None = field(repr=False)  # finds the added tokens that a text spells
    _after_added: AfterAdded = field(repr=False)
    _first: SentencePieceProcessor = field(repr=False)  # for the start of a text
    _next: SentencePieceProcessor = field(repr=False)  # for text that continues other text: adds no space in front
    appended: tuple[int, ...] = ()

    def trimmed(self, text: str, *, after: str | None, before: str | None) -> str:
        return (self._added or Leftmost({})).trimmed(text, after=after, before=before)

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        check_text(text)
        if self._added is None:
            return (self._first if start else self._next).encode(text)
        ids: list[int] = []
        for part in self._added.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                begins = self._begins_anew(part) if ids else start  # Every part but the first follows an added token.
                ids += (self._first if begins else self._next).encode(part)
        return ids

    def encode_after_special(self, text: str) -> list[int]:
        return self.encode(text, start=self._begins_anew(text))

    def _begins_anew(self, text: str) -> bool:
        """Tell whether we put a space in front of a text that follows a control token or an added token."""
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
        """Return the SentencePiece model that `read_sentencepiece` read, including the added tokens."""
        proto = ModelProto()
        proto.ParseFromString(self._first.serialized_model_proto())
        return proto

    @property
    def added(self) -> Mapping[str, Added]:
        """The added tokens that we find in a text by name, before SentencePiece splits the text into pieces."""
        return self._added.added if self._added else {}

    @property
    def prefix_after_special(self) -> bool:
        """True if we put a space in front of a text that follows a control token or an added token."""
        return self._after_added != "nothing"

    def piece(self, token: int) -> str:
        return self._first.id_to_piece(token) if 0 <= token < self.vocab else ""


def read_sentencepiece(data: bytes, *, path: str) -> SentencePieceTokenizer:
    """Read a tokenizer from `data`, the bytes of the file `path`, and from other files in the same folder.

    added_tokens.json and tokenizer_config.json may add tokens, name BOS and EOS, say whether texts begin and end with
    them, and say whether a text after a control token or an added token gets a space in front ("legacy"). Raises
    `CheckpointError` if a file cannot be used.

    The rules come from transformers 5.24 (models/llama/tokenization_llama.py, tokenization_utils_base.py
    `_from_pretrained`, convert_slow_tokenizer.py `SentencePieceExtractor`):

    1. We search for added tokens in the unchanged text. Then SentencePiece splits the parts between these tokens.
    2. We put a space in front of the first part if the model says so (add_dummy_prefix). If "legacy" is true, we also
       put a space in front of each part after an added token or a control token, unless the part begins with a space.
    3. SentencePiece itself finds the tokens that are user-defined in the model, after it has replaced spaces with "▁".

    One more rule comes from llama.cpp, as for GGUF (`model.checkpoints.gguf.control_tokens`): a piece with the name of
    a control token, such as `<|im_start|>`, becomes a control token even if its type in the model is normal or
    user-defined. So text in a user's message cannot become this token.

    We differ from transformers 5 in one case: if the first part begins with a space, transformers 5 does not put
    another space in front. SentencePiece, llama.cpp, transformers 4 and this module do.
    """
    if _fields(data) > MOST_TOKENS:
        raise refused(path, f"the SentencePiece model has more than {MOST_TOKENS:,} tokens")
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise refused(path, "is not a tokenizer in any known format, or is a damaged SentencePiece model") from None
    if not (proto.pieces and proto.HasField("trainer_spec") and proto.HasField("normalizer_spec")):
        # Files have these fields in this order, so a file that is truncated between two of them still parses.
        raise refused(path, "is an incomplete SentencePiece model: it lacks pieces, trainer_spec or normalizer_spec")
    texts = [piece.piece for piece in proto.pieces]  # read once, since protobuf takes 0.1 s for 256,000 texts
    for id, text in enumerate(texts):
        if isinstance(text, bytes):  # protobuf returns a string that is not valid UTF-8 as bytes
            raise refused(path, f"piece {id} is not valid UTF-8: {text[:40]!r}")
    folder = Path(path).parent
    ids = {text: id for id, text in enumerate(texts)}
    _correct_types(proto, ids)
    added = read_added(folder)
    check_single_word((name for name, token in added.items() if token.special and token.single_word), path)
    _add(proto, added, path)
    if (prefix := stated_prefix(folder, byte_level=False)) is not None:
        proto.normalizer_spec.add_dummy_prefix = prefix
    ids |= {piece.piece: id for id, piece in enumerate(proto.pieces[len(texts) :], len(texts))}
    absorbs = {name: (token.lstrip, token.rstrip) for name, token in added.items() if token.lstrip or token.rstrip}
    spelled = {
        name: token
        for name, token in added.items()
        if not token.special and proto.pieces[token.id].type in (NORMAL, UNUSED)  # SentencePiece finds the others
    }
    tokenizer = from_proto(
        proto,
        path=path,
        absorbs=absorbs,
        added=Leftmost(spelled) if spelled else None,
        after_added="one space" if read_config(folder).get("legacy") is True else "nothing",
    )
    end = proto.trainer_spec.eos_piece
    eos = stated_eos(folder, ids.get, default=end if end in tokenizer.special else None)
    return replace(
        tokenizer,
        appended=stated_end(folder, eos),
        bos=stated_bos(folder, ids.get, begins=True, default=tokenizer.bos),
        eos=eos,
    )


def from_proto(
    proto,
    *,
    path: str,
    absorbs: Mapping[str, tuple[bool, bool]] | None = None,
    added: Leftmost | LongestFirst | None = None,
    after_added: AfterAdded = "space",
) -> SentencePieceTokenizer:
    """Build a tokenizer from the ModelProto `proto`. This changes `proto`.

    `path` is the path of the model's file, for error messages. Raises `CheckpointError` if the model is not supported.
    """
    if proto.trainer_spec.treat_whitespace_as_suffix or not proto.normalizer_spec.escape_whitespaces:
        what = "treat_whitespace_as_suffix must be false, and escape_whitespaces true"
        raise refused(path, f"this kind of SentencePiece model is not supported: {what}")
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


def _correct_types(proto, ids: Mapping[str, int]) -> None:
    """Turn each normal or user-defined piece with the name of a known control token into a control token."""
    types = [piece.type for piece in proto.pieces]
    for id, after in enumerate(corrected_types(ids, types, named=())):
        if after == CONTROL and types[id] in (NORMAL, USER_DEFINED):
            proto.pieces[id].type = after


def _add(proto, added: Mapping[str, Added], path: str) -> None:
    """Add tokens to the pieces of a SentencePiece model, at their ids; special tokens become control tokens."""
    for name, token in sorted(added.items(), key=lambda item: item[1].id):
        if token.id >= len(proto.pieces) + MOST_SPECIAL:
            what = f"far beyond the {len(proto.pieces)} pieces of the model"
            raise refused(path, f"added token {short(name)} has id {token.id}, {what}")
        while len(proto.pieces) < token.id:
            proto.pieces.add(piece=f"[PAD{len(proto.pieces)}]", score=0.0, type=UNUSED)
        if len(proto.pieces) == token.id:
            proto.pieces.add(piece=name, score=0.0, type=UNUSED)  # no merge makes a piece of this type
        piece = proto.pieces[token.id]
        if piece.piece != name:
            what = f"but the model has the piece {short(piece.piece)} with this id"
            raise refused(path, f"added token {short(name)} has id {token.id}, {what}")
        if token.special and piece.type in (NORMAL, USER_DEFINED, UNUSED):
            piece.type = CONTROL


def _fields(data: bytes) -> int:
    """Count the top-level fields of a message in protobuf's wire format, up to the first field that we cannot read.

    Each piece of a SentencePiece model is such a field. Counting needs far less memory than parsing the message.
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
        raise refused(path, f"the SentencePiece library refuses this model: {message}") from None
