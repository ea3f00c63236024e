"""Decodes the tokens of a tokenizer.json one at a time, so that text can be shown as it is generated.

The library decodes whole lists of ids. This module supports decoders that treat each token by itself, and decoders that
remove a space from the start of the text; `read_decoder` refuses all others, and names them. The text differs from the
library's in one case. If a run of byte tokens is not UTF-8, the library replaces every byte of the run, and this module
keeps the valid characters.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import Regex, decoders

from llamaspec.model.checkpoints.checkpoint import CheckpointError, refused
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.tokenizers.huggingface_parts import Part, check_growth, may_panic, steps
from llamaspec.model.tokenizers.rust_library import library_errors

Decode = Callable[[list[str]], str]


@dataclass(frozen=True)
class Spelling:
    """The bytes that a token's piece adds to a text."""

    _characters: Mapping[str, int] | None = field(repr=False)  # for byte-level pieces, the byte of each character
    _decode: Decode = field(default="".join, repr=False)
    _first_differs: bool = False  # whether `_decode` treats the first piece of its list in another way
    _bytes: bool = False  # whether "<0x41>" stands for a byte
    _strips: bool = False  # whether the text loses a space at its start

    @property
    def byte_level(self) -> bool:
        return self._characters is not None

    def bytes_of(self, piece: str) -> bytes:
        """Return the bytes of a piece that does not begin a text."""
        if self._characters is None:
            return self._spelled(self._decode(["", piece] if self._first_differs else [piece]))
        if all(character in self._characters for character in piece):
            return bytes(self._characters[character] for character in piece)
        return piece.encode()  # The library's own decoder does so for a piece that is not spelled in bytes.

    def first_bytes_of(self, piece: str) -> bytes:
        """Return the bytes of a piece that begins a text."""
        spelled = self._spelled(self._decode([piece])) if self._first_differs else self.bytes_of(piece)
        return spelled.removeprefix(b" ") if self._strips else spelled

    def _spelled(self, text: str) -> bytes:
        if self._bytes and (byte := re.fullmatch(r"<0x(\+?[0-9a-fA-F]{1,2})>", text)) and len(text) == 6:
            return bytes([int(byte[1], 16)])
        return text.encode()


def byte_characters() -> dict[str, int]:
    """Return the bytes that GPT-2's 256 printable characters stand for.

    A printable byte is its own character; the other bytes have the characters from U+0100 on.

    >>> characters = byte_characters()
    >>> characters["a"], characters["Ġ"], characters["Ċ"]
    (97, 32, 10)
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


def read_decoder(decoder: Part | None, before: Part | None, *, path: str) -> Spelling:
    """Make the `Spelling` of a decoder and a pre-tokenizer. Raises `CheckpointError` for unsupported parts."""
    parts = steps(decoder)
    types = [part["type"] for part in parts]
    if types == ["ByteLevel"]:
        if not any(step["type"] == "ByteLevel" for step in steps(before)):
            raise refused(path, "a tokenizer with a byte-level decoder, but no byte-level pre-tokenizer")
        return Spelling(byte_characters())
    if not any(_makes_spaces(part) for part in parts):
        stated = " and ".join(types) or "no decoder"
        raise refused(path, f"neither a byte-level nor a SentencePiece-like tokenizer: it has {stated}")
    check_growth([part for part in parts if part["type"] == "Replace"], "decoder", path)
    per_token = parts[: types.index("Fuse")] if "Fuse" in types else parts
    on_joined = [part for part in parts[len(per_token) :] if part["type"] != "Fuse"]
    falls_back = bool(per_token) and per_token[-1]["type"] == "ByteFallback"
    chain = [_library(part, path) for part in (per_token[:-1] if falls_back else per_token)]
    decode = decoders.Sequence(chain).decode if len(chain) > 1 else chain[0].decode
    return Spelling(
        None,
        _guarded(decode, path) if may_panic(per_token) else decode,
        _first_differs="Metaspace" in types,
        _bytes=falls_back,
        _strips=_strips(on_joined, path),
    )


def _guarded(decode: Decode, path: str) -> Decode:
    """Wrap a decoder of the library that may panic: it raises `CheckpointError` instead."""

    def decode_or_refuse(pieces: list[str]) -> str:
        with library_errors(path, "cannot decode a token"):
            return decode(pieces)

    return decode_or_refuse


def _makes_spaces(part: Part) -> bool:
    return part["type"] == "Metaspace" or (part["type"] == "Replace" and part["content"] == " ")


def _library(part: Part, path: str) -> decoders.Decoder:
    """Make the library's decoder for a part that treats each token by itself."""
    match part:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return decoders.Replace(pattern, content)
        case {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}:
            return decoders.Replace(Regex(pattern), content)
        case {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme}:
            return decoders.Metaspace(replacement, scheme)
    raise _unsupported(part, path)


def _strips(on_joined: Sequence[Part], path: str) -> bool:
    """Tell whether the parts that treat the whole text remove a space from its start."""
    match on_joined:
        case []:
            return False
        case [{"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}]:
            return start == 1
    raise _unsupported(on_joined[0], path)


def _unsupported(part: Part, path: str) -> CheckpointError:
    stated = ", ".join(f"{key} {short(value)}" for key, value in part.items() if key != "type")
    return refused(path, f"its decoder's part {part['type']}{f' ({stated})' if stated else ''} is not supported there")
