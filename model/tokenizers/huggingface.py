"""Hugging Face's `tokenizer.json`: byte-level BPE (Llama 3, Qwen, SmolLM2) or SentencePiece's (Llama 2, Mistral)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from model.checkpoints.checkpoint import CheckpointError, refused
from model.checkpoints.strict_json import read_object, short
from model.tokenizers.tokenizer import UNKNOWN, check_text

MOST_BRACKETS = 2_000_000  # a list for each merge: Llama 3 has 280,000, Gemma 3 515,000


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """See `model.tokenizers.tokenizer.Tokenizer`."""

    vocab: int
    bos: int | None
    special: Mapping[str, int]
    dummy_prefix: bool
    _added: Mapping[int, bytes] = field(repr=False)  # tokens beside the BPE vocabulary; control tokens are b""
    _characters: Mapping[str, int] | None = field(repr=False)  # byte-level: the byte that each character stands for
    _tokenizer: Tokenizer = field(repr=False)  # without the space in front, which `encode` adds

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        check_text(text)
        if text and start and self.dummy_prefix:
            text = " " + text
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        piece = self.piece(token)
        if self._characters is None:
            byte = is_byte(piece)
            return bytes([int(piece[3:5], 16)]) if byte else piece.replace("▁", " ").encode()
        if all(character in self._characters for character in piece):
            return bytes(self._characters[character] for character in piece)
        return piece.encode()  # a piece that is not spelled in bytes, as the library's own decoder has it

    @property
    def byte_level(self) -> bool:
        """Whether pieces are spelled in bytes; else they are SentencePiece's."""
        return self._characters is not None

    def spec(self) -> dict[str, Any]:
        """The tokenizer.json, without a space in front of texts."""
        return json.loads(self._tokenizer.to_str())

    def piece(self, token: int) -> str:
        return (self._tokenizer.id_to_token(token) or "") if 0 <= token < self.vocab else ""


def is_byte(piece: str) -> bool:
    """Whether `piece` is one of "<0x00>" to "<0xFF>".

    >>> is_byte("<0x41>"), is_byte("<0x4>")
    (True, False)
    """
    digits = piece[3:5]
    return len(piece) == 6 and piece[:3] == "<0x" and piece[5] == ">" and all(d in "0123456789ABCDEF" for d in digits)


def byte_characters() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes: itself where it is printable, else the next from U+0100.

    >>> characters = byte_characters()
    >>> characters["a"], characters["Ġ"], characters["Ċ"]
    (97, 32, 10)
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def read_huggingface(data: bytes, *, path: str) -> HuggingFaceTokenizer:
    """A tokenizer from the bytes of a `tokenizer.json`; a `tokenizer_config.json` beside `path` may name its BOS."""
    spec = _parse(data, path)
    _build(data.decode(), path)  # checks the whole structure
    byte_level, dummy_prefix = _kind(spec, path)
    _check_template(spec, path)
    tokenizer = _build(json.dumps(_without_prefix(spec)) if dummy_prefix else data.decode(), path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # the names of control tokens in a text are text

    unknown = spec["model"].get("unk_token")
    added, special = {}, {}
    for token, entry in tokenizer.get_added_tokens_decoder().items():
        added[token] = entry.content.encode()
        if entry.content == unknown:
            added[token] = UNKNOWN.encode()
        elif entry.special:
            added[token] = b""
            special[entry.content] = token
    pieces = spec["model"]["vocab"]
    if len(set(pieces.values())) < len(pieces):
        raise refused(path, "two tokens of the vocabulary have the same id")
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise refused(path, "the vocabulary is empty")
    return HuggingFaceTokenizer(
        vocab=max(ids) + 1,
        bos=_bos(tokenizer, path),
        special=special,
        dummy_prefix=dummy_prefix,
        _added=added,
        _characters=byte_characters() if byte_level else None,
        _tokenizer=tokenizer,
    )


def _parse(data: bytes, path: str) -> dict[str, Any]:
    """The object in the file, which may be far larger than the JSON that `strict_json` is for."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(values := dict(pairs)) < len(pairs):
            seen = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise refused(path, f"{short(twice)} is there twice")
        return values

    if data.count(b"[") + data.count(b"{") > MOST_BRACKETS:
        raise refused(path, f"more than {MOST_BRACKETS:,} lists and objects")
    try:
        spec = json.loads(data.decode(), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise refused(path, f"is not JSON: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise refused(path, f"is not JSON, or cut short: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise refused(path, "is not usable JSON: nested too deeply") from None
    except CheckpointError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise refused(path, f"is not usable JSON: {error}") from None
    if not isinstance(spec, dict):
        raise refused(path, "is not a JSON object")
    return spec


def _build(text: str, path: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        message = " ".join(str(error).split())[:200]
        raise refused(path, f"not a usable tokenizer.json: {message}") from None


def _steps(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer, decoder or post-processor as a list of its parts."""
    if component is None:
        return []
    if component.get("type") != "Sequence":
        return [{"type": "an untyped part"} | component]
    parts = next(value for key, value in component.items() if key != "type")
    return [step for part in parts for step in _steps(part)]


def _kind(spec: dict[str, Any], path: str) -> tuple[bool, bool]:
    """Whether the tokenizer is byte-level (else it is SentencePiece's), and whether it puts a space in front."""
    decoder, before = _steps(spec.get("decoder")), _steps(spec.get("pre_tokenizer"))
    types = [step["type"] for step in decoder]
    if spec["model"].get("type", "BPE") != "BPE":
        raise refused(path, f"a {spec['model']['type']} model is not supported, only BPE is")
    if types == ["ByteLevel"]:
        prefixes = [step.get("add_prefix_space", True) for step in before if step["type"] == "ByteLevel"]
        if not prefixes or any(prefixes):
            raise refused(path, "a byte-level tokenizer that adds spaces, or splits in no bytes, is not supported")
        return True, False
    spaces = [step for step in decoder if step["type"] == "Replace" and step["content"] == " "]
    if "Metaspace" in types or any(step["pattern"] == {"String": "▁"} for step in spaces):
        return False, any(_adds_space(step) for step in (*_steps(spec.get("normalizer")), *before))
    found = " and ".join(types) or "no decoder"
    raise refused(path, f"neither a byte-level nor a SentencePiece-like tokenizer: it has {found}")


def _check_template(spec: dict[str, Any], path: str) -> None:
    """The library panics over a template with a token that it does not define."""
    for step in _steps(spec.get("post_processor")):
        if step["type"] == "TemplateProcessing":
            names = {part["SpecialToken"]["id"] for part in step["single"] if "SpecialToken" in part}
            if missing := names - step["special_tokens"].keys():
                raise refused(path, f"its template names a token that it does not define, {short(min(missing))}")


def _adds_space(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Prepend", "prepend": "▁"}:
            return True
        case {"type": "Metaspace", "prepend_scheme": scheme}:
            return scheme != "never"
        case {"type": "Metaspace"}:
            return step.get("add_prefix_space", True)
    return False


def _without_prefix(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer without the space in front.

    `encode` adds it instead: a text may continue another, and Metaspace (unlike SentencePiece) would leave it
    out before a text that begins with a space, which then could not be told from the text without.
    """

    def change(component: dict[str, Any] | None) -> dict[str, Any] | None:
        if component is None:
            return None
        if component.get("type") == "Sequence":
            key = next(key for key in component if key != "type")
            return component | {key: [part for part in map(change, component[key]) if part is not None]}
        if not _adds_space(component):
            return component
        if component["type"] == "Prepend":
            return None
        return {key: value for key, value in component.items() if key != "add_prefix_space"} | {
            "prepend_scheme": "never"
        }

    return spec | {key: change(spec.get(key)) for key in ("normalizer", "pre_tokenizer")}


def _bos(tokenizer: Tokenizer, path: str) -> int | None:
    """What the file's template puts before a text, else what tokenizer_config.json says."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    if whole[: len(plain)] != plain:
        return whole[0]
    config_path = Path(path).parent / "tokenizer_config.json"
    if not config_path.is_file():
        return None
    config = read_object(config_path)
    name = config.get("bos_token")
    if isinstance(name, dict):
        name = name.get("content")
    if config.get("add_bos_token") is not True or name is None:
        return None
    token = tokenizer.token_to_id(name) if isinstance(name, str) else None
    if token is None:
        raise refused(config_path, f"the vocabulary has no bos_token {short(name)}")
    return token
