"""Reads a `tokenizer.json` with Hugging Face's tokenizers library (https://github.com/huggingface/tokenizers).

Ids and text are the same as in the library. If a file has a part that we do not support, we refuse the file, and the
error names the part. We ignore `dropout`, which makes ids random and is only useful for training.
"""

import codecs
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import filterfalse, repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from llamaspec.model.checkpoints.checkpoint import CheckpointError, refused
from llamaspec.model.checkpoints.strict_json import short
from llamaspec.model.tokenizers.added_tokens import SPACES, Leftmost, LongestFirst
from llamaspec.model.tokenizers.huggingface_added import add_tokens_beside
from llamaspec.model.tokenizers.huggingface_decoder import Spelling, read_decoder
from llamaspec.model.tokenizers.huggingface_parts import (
    Part,
    check_growth,
    check_patterns_and_tables,
    check_post_processor,
    may_panic,
    places_of,
    steps,
    with_byte_level_prefix,
    with_prefix,
)
from llamaspec.model.tokenizers.limits import check_count, check_single_word, check_special
from llamaspec.model.tokenizers.markers import MARKERS
from llamaspec.model.tokenizers.rust_library import library_errors
from llamaspec.model.tokenizers.tokenizer import check_text
from llamaspec.model.tokenizers.tokenizer_config import (
    Added,
    prefix_scheme,
    stated_bos,
    stated_end,
    stated_eos,
    stated_prefix,
)

EMPTY = {"type": "BPE", "vocab": {}, "merges": []}  # a model without tokens
MOST_BRACKETS = 700_000  # A file has one list per merge: Llama 3 has 280,000 merges, Gemma 1 and 2 have 581,000.
MOST_VALUES = 3_000_000  # Gemma 3 has 1.3 million values.
MOST_SCORE = 1e30  # largest score of a piece; sums of such scores stay finite
SIDES = ("lstrip", "rstrip", "single_word")
MOST_NAMES = 1_000_000  # Gemma 3 has 307,000 keys, most of which are tokens.


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A tokenizer from a `tokenizer.json`; the protocol `model.tokenizers.tokenizer.Tokenizer` explains the methods."""

    vocab: int
    bos: int | None
    eos: int | None
    special: Mapping[str, int]
    dummy_prefix: bool
    absorbs: Mapping[str, tuple[bool, bool]]
    _path: str = field(repr=False)  # for error messages
    _spelling: Spelling = field(repr=False)
    _silent: frozenset[int] = field(repr=False)  # tokens that add no text: control tokens and the unknown token
    _spelled_out: frozenset[int] = field(repr=False)  # added tokens of a byte-level vocabulary; their names are text
    _start: Tokenizer = field(repr=False)  # for the start of a text
    _after_special: Tokenizer = field(repr=False)  # for text after a control token
    _next: Tokenizer = field(repr=False)  # for text that continues other text
    _may_panic: bool = field(repr=False)  # whether the library may panic over a text
    # for each kind of control token (normalized or not), the added tokens that the library finds no later than these
    _no_later: Mapping[bool, Leftmost] = field(repr=False)
    _normalized: frozenset[str] = field(repr=False)  # control tokens that the library finds in the normalized text
    _added: LongestFirst | None = field(default=None, repr=False)  # None: the library finds added tokens
    appended: tuple[int, ...] = ()

    def trimmed(self, text: str, *, after: str | None, before: str | None) -> str:
        if self._added:
            return self._added.trimmed(text, after=after, before=before)
        if after is not None:
            text = self._no_later[after in self._normalized].trimmed(text, after=after, before=None)
        if before is not None:
            text = self._no_later[before in self._normalized].trimmed(text, after=None, before=before)
        return text

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        return self._ids(self._start if start else self._next, text)

    def encode_after_special(self, text: str) -> list[int]:
        return self._ids(self._after_special, text)

    def _ids(self, tokenizer: Tokenizer, text: str) -> list[int]:
        check_text(text)
        ids: list[int] = []
        for part in self._added.split(text) if self._added else [text]:
            if isinstance(part, int):
                ids.append(part)
                continue
            with library_errors(self._path, "cannot encode this text", may_panic=self._may_panic):
                ids += tokenizer.encode(part, add_special_tokens=False).ids
        return self._spelled(ids)

    def _spelled(self, ids: list[int]) -> list[int]:
        """Replace each id of a control token with the ids of the characters in the token's name.

        Encoding a text must not return ids of control tokens. But the library gives the whole text to its model, and a
        Unigram model may have pieces that are names of control tokens.
        """
        controls = set(self.special.values())
        if controls.isdisjoint(ids):
            return ids
        spelled: list[int] = []
        for id in ids:
            if id not in controls:
                spelled.append(id)
                continue
            for character in self.piece(id):
                spelled += self._next.encode(character, add_special_tokens=False).ids
        return [id for id in spelled if id not in controls]

    def longest_first(self) -> "HuggingFaceTokenizer":
        """Return a copy that finds added tokens as llama.cpp does (see `added_tokens.LongestFirst`).

        Use this only for tokenizers that do not put a space in front of texts.
        """
        tokens = self._start.get_added_tokens_decoder().items()
        added = {t.content: Added(id, False, rstrip=t.rstrip) for id, t in tokens if not t.special}
        return replace(self, _added=LongestFirst(added))

    def bytes_of(self, token: int) -> bytes:
        if token in self._spelled_out:
            return self.piece(token).encode()
        return b"" if token in self._silent else self._spelling.bytes_of(self.piece(token))

    def first_bytes_of(self, token: int) -> bytes:
        if token in self._spelled_out:
            return self.piece(token).encode()
        return b"" if token in self._silent else self._spelling.first_bytes_of(self.piece(token))

    @property
    def byte_level(self) -> bool:
        """True if each character of a piece represents a byte; False if pieces are text as in SentencePiece."""
        return self._spelling.byte_level

    def spec(self) -> dict[str, Any]:
        """Return the contents of the tokenizer.json as a parsed JSON object."""
        return json.loads(self._start.to_str())

    def piece(self, token: int) -> str:
        return (self._start.id_to_token(token) or "") if 0 <= token < self.vocab else ""


def read_huggingface(
    data: bytes, *, path: str, named: Mapping[str, str] = MappingProxyType({})
) -> HuggingFaceTokenizer:
    """Read a tokenizer from `data`, the bytes of a `tokenizer.json`; a `tokenizer_config.json` next to it may name BOS.

    `named` has special tokens by key, such as eos_token. We use an entry if no file next to `path` states its key.
    Raises `CheckpointError` if the library refuses the file, or if the file has a part that we do not support.
    """
    spec = parse(data, path)
    vocab = _check_model(spec, path)
    check_patterns_and_tables(spec, path)
    unknown = _unknown_of_unigram(spec, path)
    del spec  # Free memory: the library's tokenizer has its own copy of the vocabulary.
    with library_errors(path, "not a usable tokenizer.json"):
        tokenizer = Tokenizer.from_buffer(data.removeprefix(codecs.BOM_UTF8))
    model = tokenizer.model
    if not isinstance(model, models.BPE | models.Unigram):  # If the file states no type, the library guesses it.
        kind = short(type(model).__name__)
        raise refused(path, f"model.type is {kind}, which is not supported (only BPE and Unigram)")
    if isinstance(model, models.BPE):
        model.dropout, unknown = None, model.unk_token
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with library_errors(path, "not a usable tokenizer.json"):
        add_tokens_beside(tokenizer, Path(path).parent, markers=MARKERS, default=named)
        _set_prefix(tokenizer, Path(path).parent)
    normalizer, before, after = map(_state, (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor))
    check_growth(steps(normalizer), "normalizer", path)
    check_post_processor(after, path)

    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: id for id, token in added.items() if token.special and token.content != unknown}
    check_special(special, path)
    check_single_word((t.content for t in added.values() if t.special and t.single_word), path)
    vocab = max(vocab, max(added, default=-1) + 1)
    if not vocab:
        raise refused(path, "the vocabulary is empty")
    spelling = read_decoder(_state(tokenizer.decoder), before, path=path)
    places = places_of(normalizer, before)
    start, after_special, following = (
        tokenizer if place == places[0] else _variant(tokenizer, *place, path=path) for place in places
    )
    bos, appended = _ids_around(tokenizer, path)
    eos = stated_eos(Path(path).parent, tokenizer.token_to_id, default=named.get("eos_token"))
    if bos is not None and bos >= vocab:
        what = f"post_processor puts id {bos} before texts, which is outside the vocabulary of {vocab} tokens"
        raise refused(path, what)
    for variant in (start, after_special, following):
        variant.encode_special_tokens = True  # Treat the names of control tokens in a text as ordinary text.
    return HuggingFaceTokenizer(
        vocab=vocab,
        bos=bos,
        eos=eos,
        special=special,
        dummy_prefix=places[0] != places[2],
        absorbs={t.content: (t.lstrip, t.rstrip) for t in added.values() if t.special and (t.lstrip or t.rstrip)},
        _path=path,
        _spelling=spelling,
        _silent=frozenset(id for id, token in added.items() if token.special),
        # The library decodes "ö" in the name of an added token to one byte. Like llama.cpp, we keep the name as text.
        _spelled_out=frozenset(id for id, token in added.items() if spelling.byte_level and not token.special),
        _start=start,
        _after_special=after_special,
        _next=following,
        _no_later={normalized: Leftmost(_ordinary(added, normalized=normalized)) for normalized in (False, True)},
        _normalized=frozenset(token.content for token in added.values() if token.special and token.normalized),
        # The library panics if a token with rstrip has absorbed a token of white space that has lstrip.
        _may_panic=may_panic([*steps(normalizer), *steps(before)])
        or any(token.lstrip and not token.content.strip(SPACES) for token in added.values()),
        # transformers 5.24 reads add_eos_token only if there is no tokenizer.json. We also read it if the file's
        # post_processor appends nothing, as llama.cpp's converter does (gguf/vocab.py).
        appended=appended or stated_end(Path(path).parent, eos),
    )


def _ordinary(added: Mapping[int, AddedToken], *, normalized: bool) -> dict[str, Added]:
    """Select the added tokens that are not special; without `normalized`, only those found in the unchanged text."""
    return {
        token.content: Added(id, special=False, **{flag: getattr(token, flag) for flag in SIDES})
        for id, token in added.items()
        if not token.special and (normalized or not token.normalized)
    }


def parse(data: bytes, path: str) -> dict[str, Any]:
    """Parse a JSON object from a tokenizer's file, which may be far larger than `strict_json` allows.

    Raises `CheckpointError` if the file is not JSON, is too large, or repeats a key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(values := dict(pairs)) < len(pairs):
            seen = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise refused(path, f"the key {short(twice)} appears twice")
        return values

    if data.count(b"[") + data.count(b"{") > MOST_BRACKETS:
        raise refused(path, f"the file has more than {MOST_BRACKETS:,} lists and objects")
    if data.count(b",") > MOST_VALUES:
        raise refused(path, f"the file has more than {MOST_VALUES:,} values")
    if data.count(b":") > MOST_NAMES:  # We also count colons within strings, but such colons are rare.
        raise refused(path, f"the file has more than {MOST_NAMES:,} tokens and other keys")
    try:
        spec = json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise refused(path, f"is not JSON: byte {error.start} is not valid UTF-8") from None
    except json.JSONDecodeError as error:
        raise refused(path, f"is not JSON, or is truncated: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise refused(path, "is not usable JSON: it is nested too deeply") from None
    except CheckpointError:
        raise
    except ValueError as error:  # for example, a number with thousands of digits
        raise refused(path, f"is not usable JSON: {error}") from None
    if not isinstance(spec, dict):
        raise refused(path, "is not a JSON object")
    return spec


def _check_model(spec: dict[str, Any], path: str) -> int:
    """Check the key "model" of a tokenizer.json, and return the largest id plus 1.

    Raises `CheckpointError` if the model is neither BPE nor Unigram, or if the library would panic on the file.
    """
    model = spec.get("model")
    pieces = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict):
        raise refused(path, "not a usable tokenizer.json: the key model is missing, or is not an object")
    if (kind := model.get("type", "BPE")) not in ("BPE", "Unigram"):
        raise refused(path, f"model.type is {short(kind)}, which is not supported (only BPE and Unigram)")
    if kind == "Unigram":
        return _check_unigram(pieces, path)
    if not isinstance(pieces, dict):
        raise refused(path, "not a usable tokenizer.json: model.vocab is missing, or is not an object")
    if model.get("continuing_subword_prefix"):
        raise refused(path, "model.continuing_subword_prefix is not supported")
    check_count(len(pieces), path)
    ids = set(pieces.values()) if all(type(id) is int and id >= 0 for id in pieces.values()) else None
    if ids is None:
        raise refused(path, "not a usable tokenizer.json: an id in model.vocab is not a nonnegative integer")
    if len(ids) < len(pieces):
        raise refused(path, "two tokens in model.vocab have the same id")
    _check_merges(model.get("merges"), pieces, path)
    return max(ids, default=-1) + 1


def _check_unigram(pieces: Any, path: str) -> int:
    """Check the vocabulary of a Unigram model, and return its number of pieces.

    Raises `CheckpointError` if `pieces` is not a list of different pieces, each with a finite score.
    """
    if not isinstance(pieces, list):
        raise refused(path, "not a usable tokenizer.json: model.vocab is missing, or is not a list")
    check_count(len(pieces), path)
    names = set()
    for piece in pieces:
        match piece:
            case [str(name), int() | float() as score] if -MOST_SCORE < score < MOST_SCORE:
                names.add(name)
            case _:
                what = "expected pairs of a string and a finite score"
                raise refused(path, f"model.vocab contains {short(piece)}, {what}")
    if len(names) < len(pieces):
        raise refused(path, "a token appears twice in model.vocab")
    return len(pieces)


def _unknown_of_unigram(spec: Mapping[str, Any], path: str) -> str | None:
    """Return the unknown token of a Unigram model; None if the model is not Unigram, or has no unknown token."""
    model = spec["model"]
    if model.get("type") != "Unigram" or model.get("unk_id") is None:
        return None
    id, vocab = model["unk_id"], model["vocab"]
    if type(id) is not int or not 0 <= id < len(vocab):
        raise refused(path, f"model.unk_id is {short(id)}, outside the vocabulary of {len(vocab)} tokens")
    return vocab[id][0]


def _check_merges(merges: Any, pieces: Mapping[str, int], path: str) -> None:
    """Raise `CheckpointError` if a merge makes a string that is not a token, since the library may panic on it.

    The library reports other faults in merges itself.
    """
    if not isinstance(merges, list) or not merges:
        return
    if str(merges[0]).startswith("#version"):  # a line of merges.txt, which the library skips
        merges = merges[1:]
    try:  # We avoid a Python loop, since a file may have half a million merges.
        merged = map(str.replace, merges, repeat(" "), repeat("")) if type(merges[-1]) is str else map("".join, merges)
        unknown = next(filterfalse(pieces.__contains__, merged), None)
    except (IndexError, TypeError):
        return
    if unknown is not None:
        raise refused(path, f"a merge in model.merges makes {short(unknown)}, which is not in model.vocab")


def _state(component: Any) -> Part | None:
    """Return the JSON object that describes a normalizer, pre-tokenizer, decoder or post-processor."""
    if component is None:
        return None
    state = component.__getstate__()
    return json.loads(state)


def _set_prefix(tokenizer: Tokenizer, folder: Path) -> None:
    """Change whether the tokenizer puts a space in front of texts, if tokenizer_config.json in `folder` says so."""
    before, decoder = _state(tokenizer.pre_tokenizer), _state(tokenizer.decoder)
    byte_level = any(part["type"] == "ByteLevel" for part in (*steps(before), *steps(decoder)))
    prefix = stated_prefix(folder, byte_level=byte_level)
    if prefix is None:
        return
    normalizer = _state(tokenizer.normalizer)
    if byte_level:
        before = with_byte_level_prefix(before, prefix=prefix)
    else:
        normalizer, before, decoder = with_prefix(normalizer, before, decoder, scheme=prefix_scheme(folder, prefix))
    spec = {"normalizer": normalizer, "pre_tokenizer": before, "decoder": decoder, "model": EMPTY}
    changed = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **spec}))
    tokenizer.normalizer = changed.normalizer  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = changed.pre_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = changed.decoder  # pyright: ignore[reportAttributeAccessIssue]


def _variant(tokenizer: Tokenizer, normalizer: Part | None, before: Part | None, *, path: str) -> Tokenizer:
    """Copy `tokenizer` with a different normalizer and pre-tokenizer; both tokenizers share the vocabulary."""
    spec = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": before, "model": EMPTY}
    with library_errors(path, "not a usable tokenizer.json"):
        variant = Tokenizer.from_str(json.dumps(spec))
        variant.model = tokenizer.model
        added = tokenizer.get_added_tokens_decoder()
        variant.add_tokens([_copy(added[id]) for id in sorted(added)])
    if {id: token.content for id, token in variant.get_added_tokens_decoder().items()} != {
        id: token.content for id, token in added.items()
    }:
        raise refused(path, "the ids of added_tokens do not continue the ids of model.vocab, which is not supported")
    return variant


def _copy(token: AddedToken) -> AddedToken:
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(token.content, **flags)


def _ids_around(tokenizer: Tokenizer, path: str) -> tuple[int | None, tuple[int, ...]]:
    """Find the id of the token that begins texts (None if texts begin without one), and the ids after a text.

    Either the file's post_processor puts the first id before a text, or tokenizer_config.json states the token.
    """
    with library_errors(path, "not a usable tokenizer.json"):
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        sample = tokenizer.encode("a", add_special_tokens=True).ids
    if sample[: len(plain)] != plain:
        if sample[1 : 1 + len(plain)] != plain:
            what = "post_processor must put one id before a text, and must not change the text's ids"
            raise refused(path, f"{what}: it turns {plain} into {sample}"[:300])
        return sample[0], tuple(sample[1 + len(plain) :])
    bos = stated_bos(Path(path).parent, tokenizer.token_to_id, begins=False, default=None)
    return bos, tuple(sample[len(plain) :])
