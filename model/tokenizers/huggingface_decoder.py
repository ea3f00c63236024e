"""Decodes the tokens of a tokenizer.json one at a time, so that programs can show text while it is generated.

The tokenizers library decodes whole lists of ids. This module supports only decoders that treat each token separately,
and that may also remove a space from the start of the text. `read_decoder` refuses all other decoders. The text differs
from the library's in one case: if a run of byte tokens is not valid UTF-8, the library replaces every byte of the run,
but this module keeps the valid characters.
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
    """Converts the piece of a token to the bytes that the token adds to a text."""

    _characters: Mapping[str, int] | None = field(repr=False)  # for byte-level pieces: the byte of each character
    _decode: Decode = field(default="".join, repr=False)
    _first_differs: bool = False  # whether `_decode` treats the first piece of a list differently from other pieces
    _bytes: bool = False  # whether a piece such as "<0x41>" represents a byte
    _strips: bool = False  # whether decoding removes a space from the start of the text

    @property
    def byte_level(self) -> bool:
        return self._characters is not None

    def bytes_of(self, piece: str) -> bytes:
        """Return the bytes of a piece that does not begin a text."""
        if self._characters is None:
            return self._spelled(self._decode(["", piece] if self._first_differs else [piece]))
        if all(character in self._characters for character in piece):
            return bytes(self._characters[character] for character in piece)
        return piece.encode()  # The library does the same for a piece with characters that represent no byte.

    def first_bytes_of(self, piece: str) -> bytes:
        """Return the bytes of a piece that begins a text."""
        spelled = self._spelled(self._decode([piece])) if self._first_differs else self.bytes_of(piece)
        return spelled.removeprefix(b" ") if self._strips else spelled

    def _spelled(self, text: str) -> bytes:
        if self._bytes and (byte := re.fullmatch(r"<0x(\+?[0-9a-fA-F]{1,2})>", text)) and len(text) == 6:
            return bytes([int(byte[1], 16)])
        return text.encode()


def byte_characters() -> dict[str, int]:
    """Return the byte for each of GPT-2's 256 characters, which represent bytes in byte-level pieces.

    The character of a printable byte has the same number as the byte. The other bytes have characters from U+0100 on.

    >>> characters = byte_characters()
    >>> characters["a"], characters["Ġ"], characters["Ċ"]
    (97, 32, 10)
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


def read_decoder(decoder: Part | None, before: Part | None, *, path: str) -> Spelling:
    """Build the `Spelling` for the decoder and the pre-tokenizer (`before`) of a tokenizer.json.

    Raises `CheckpointError` if a part of the decoder is not supported.
    """
    parts = steps(decoder)
    types = [part["type"] for part in parts]
    if types == ["ByteLevel"]:
        if not any(step["type"] == "ByteLevel" for step in steps(before)):
            raise refused(path, "decoder has type ByteLevel, but pre_tokenizer has no part of type ByteLevel")
        return Spelling(byte_characters())
    if not any(_makes_spaces(part) for part in parts):
        stated = " and ".join(types) or "no decoder"
        what = f"decoder has {stated}, expected ByteLevel, Metaspace, or a Replace that makes spaces"
        raise refused(path, what)
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
    """Wrap a decoder of the library, so that it raises `CheckpointError` if Rust panics."""

    def decode_or_refuse(pieces: list[str]) -> str:
        with library_errors(path, "cannot decode a token"):
            return decode(pieces)

    return decode_or_refuse


def _makes_spaces(part: Part) -> bool:
    return part["type"] == "Metaspace" or (part["type"] == "Replace" and part["content"] == " ")


def _library(part: Part, path: str) -> decoders.Decoder:
    """Build the library's decoder for a part that treats each token separately. Raises `CheckpointError` for others."""
    match part:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return decoders.Replace(pattern, content)
        case {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}:
            return decoders.Replace(Regex(pattern), content)
        case {"type": "Metaspace", "replacement": replacement, "prepend_scheme": scheme}:
            return decoders.Metaspace(replacement, scheme)
    raise _unsupported(part, path)


def _strips(on_joined: Sequence[Part], path: str) -> bool:
    """Tell whether a decoder removes a space from the start of the text.

    `on_joined` has the parts of the decoder that process the whole text instead of single tokens.
    """
    match on_joined:
        case []:
            return False
        case [{"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}]:
            return start == 1
    raise _unsupported(on_joined[0], path)


def _unsupported(part: Part, path: str) -> CheckpointError:
    stated = ", ".join(f"{key} {short(value)}" for key, value in part.items() if key != "type")
    what = f"{part['type']}{f' ({stated})' if stated else ''}"
    return refused(path, f"the part {what} is not supported at this position in decoder")
