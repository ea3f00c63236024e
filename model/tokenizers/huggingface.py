"""Hugging Face's `tokenizer.json`, run by the library that defines it (https://github.com/huggingface/tokenizers).

Ids and text equal the library's. A file with a part that this module cannot follow is refused, and the error names
the part. `dropout` is ignored: it makes random ids, which help only in training.
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
from llamaspec.model.tokenizers.added_tokens import LongestFirst
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
from llamaspec.model.tokenizers.limits import check_count, check_special
from llamaspec.model.tokenizers.markers import MARKERS
from llamaspec.model.tokenizers.rust_library import library_errors
from llamaspec.model.tokenizers.tokenizer import check_text
from llamaspec.model.tokenizers.tokenizer_config import Added, prefix_scheme, stated_bos, stated_eos, stated_prefix

EMPTY = {"type": "BPE", "vocab": {}, "merges": []}  # a model of no tokens
MOST_BRACKETS = 700_000  # One list holds each merge: Llama 3 has 280,000 merges, Gemma 1 and 2 have 581,000.
MOST_VALUES = 3_000_000  # Gemma 3 has 1.3 million values.
MOST_SCORE = 1e30  # of a piece; sums of them stay finite
MOST_NAMES = 1_000_000  # Gemma 3 has 307,000 names of values, which are tokens for the most part.


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """See `model.tokenizers.tokenizer.Tokenizer`."""

    vocab: int
    bos: int | None
    eos: int | None
    special: Mapping[str, int]
    dummy_prefix: bool
    absorbs: Mapping[str, tuple[bool, bool]]
    _path: str = field(repr=False)  # for messages
    _spelling: Spelling = field(repr=False)
    _silent: frozenset[int] = field(repr=False)  # control tokens, and the one for what is unknown: they add no text
    _spelled_out: frozenset[int] = field(repr=False)  # added tokens of a byte-level vocabulary: text, not bytes
    _start: Tokenizer = field(repr=False)  # for the start of a text
    _after_special: Tokenizer = field(repr=False)  # for text after a control token
    _next: Tokenizer = field(repr=False)  # for text that continues other text
    _may_panic: bool = field(repr=False)  # whether the library may panic over a text
    _added: LongestFirst | None = field(default=None, repr=False)  # None: the library finds added tokens

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
        """Replace each id of a control token by the ids of the characters in its name.

        Encoded text must not have control tokens. The library leaves their names in a text to its model, and a Unigram
        model has pieces with these names.
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
        """Return a copy that finds added tokens as llama.cpp does.

        This is only for tokenizers that put no space in front of texts.
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
        """Tell whether pieces are spelled in bytes; otherwise they are SentencePiece's."""
        return self._spelling.byte_level

    def spec(self) -> dict[str, Any]:
        """The contents of the tokenizer.json."""
        return json.loads(self._start.to_str())

    def piece(self, token: int) -> str:
        return (self._start.id_to_token(token) or "") if 0 <= token < self.vocab else ""


def read_huggingface(
    data: bytes, *, path: str, named: Mapping[str, str] = MappingProxyType({})
) -> HuggingFaceTokenizer:
    """Read a tokenizer from the bytes of a `tokenizer.json`; a `tokenizer_config.json` next to `path` may name its BOS.

    `named` are special tokens by key, such as eos_token, for the keys that no file next to `path` states. Raises
    `CheckpointError` for a file that the library refuses, and for a part that this module cannot follow.
    """
    spec = parse(data, path)
    vocab = _check_model(spec, path)
    check_patterns_and_tables(spec, path)
    unknown = _unknown_of_unigram(spec, path)
    del spec  # The vocabulary need not be in memory twice.
    with library_errors(path, "not a usable tokenizer.json"):
        tokenizer = Tokenizer.from_buffer(data.removeprefix(codecs.BOM_UTF8))
    model = tokenizer.model
    if not isinstance(model, models.BPE | models.Unigram):  # The library guesses the kind where no file names it.
        kind = short(type(model).__name__)
        raise refused(path, f"a model of type {kind} is not supported, only BPE and Unigram are")
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
    for token in added.values():
        if token.special and token.single_word:
            raise refused(path, f"added token {short(token.content)} has single_word, which is not supported")
    vocab = max(vocab, max(added, default=-1) + 1)
    if not vocab:
        raise refused(path, "the vocabulary is empty")
    spelling = read_decoder(_state(tokenizer.decoder), before, path=path)
    places = places_of(normalizer, before)
    start, after_special, following = (
        tokenizer if place == places[0] else _variant(tokenizer, *place, path=path) for place in places
    )
    bos = _bos(tokenizer, path)
    if bos is not None and bos >= vocab:
        raise refused(path, f"its post_processor begins texts with id {bos}, outside a vocabulary of {vocab}")
    for variant in (start, after_special, following):
        variant.encode_special_tokens = True  # The names of control tokens in a text are text.
    return HuggingFaceTokenizer(
        vocab=vocab,
        bos=bos,
        eos=stated_eos(Path(path).parent, tokenizer.token_to_id, default=named.get("eos_token")),
        special=special,
        dummy_prefix=places[0] != places[2],
        absorbs={t.content: (t.lstrip, t.rstrip) for t in added.values() if t.special and (t.lstrip or t.rstrip)},
        _path=path,
        _spelling=spelling,
        _silent=frozenset(id for id, token in added.items() if token.special),
        # In the name of an added token, the library decodes "ö" to one byte. We keep the text, as llama.cpp does.
        _spelled_out=frozenset(id for id, token in added.items() if spelling.byte_level and not token.special),
        _start=start,
        _after_special=after_special,
        _next=following,
        _may_panic=may_panic([*steps(normalizer), *steps(before)]),
    )


def parse(data: bytes, path: str) -> dict[str, Any]:
    """Parse the file's JSON object, which may be far larger than `strict_json` allows."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(values := dict(pairs)) < len(pairs):
            seen = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise refused(path, f"{short(twice)} is there twice")
        return values

    if data.count(b"[") + data.count(b"{") > MOST_BRACKETS:
        raise refused(path, f"more than {MOST_BRACKETS:,} lists and objects")
    if data.count(b",") > MOST_VALUES:
        raise refused(path, f"more than {MOST_VALUES:,} values")
    if data.count(b":") > MOST_NAMES:  # Colons within strings count, too, but they are few.
        raise refused(path, f"more than {MOST_NAMES:,} tokens and other names")
    try:
        spec = json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise refused(path, f"is not JSON: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise refused(path, f"is not JSON, or cut short: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise refused(path, "is not usable JSON: nested too deeply") from None
    except CheckpointError:
        raise
    except ValueError as error:  # A number of thousands of digits.
        raise refused(path, f"is not usable JSON: {error}") from None
    if not isinstance(spec, dict):
        raise refused(path, "is not a JSON object")
    return spec


def _check_model(spec: dict[str, Any], path: str) -> int:
    """Refuse a model that is neither BPE nor Unigram, or that the library would panic over.

    Returns one more than the largest id.
    """
    model = spec.get("model")
    pieces = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict):
        raise refused(path, "not a usable tokenizer.json: it has no model")
    if (kind := model.get("type", "BPE")) not in ("BPE", "Unigram"):
        raise refused(path, f"a model of type {short(kind)} is not supported, only BPE and Unigram are")
    if kind == "Unigram":
        return _check_unigram(pieces, path)
    if not isinstance(pieces, dict):
        raise refused(path, "not a usable tokenizer.json: its model has no vocab")
    if model.get("continuing_subword_prefix"):
        raise refused(path, "model.continuing_subword_prefix is not supported")
    check_count(len(pieces), path)
    ids = set(pieces.values()) if all(type(id) is int and id >= 0 for id in pieces.values()) else None
    if ids is None:
        raise refused(path, "not a usable tokenizer.json: an id in its vocab is not a whole number from 0 up")
    if len(ids) < len(pieces):
        raise refused(path, "two tokens of the vocabulary have the same id")
    _check_merges(model.get("merges"), pieces, path)
    return max(ids, default=-1) + 1


def _check_unigram(pieces: Any, path: str) -> int:
    """Refuse a vocabulary that is not a list of different pieces, each with a finite score."""
    if not isinstance(pieces, list):
        raise refused(path, "not a usable tokenizer.json: its model has no vocab")
    check_count(len(pieces), path)
    names = set()
    for piece in pieces:
        match piece:
            case [str(name), int() | float() as score] if -MOST_SCORE < score < MOST_SCORE:
                names.add(name)
            case _:
                raise refused(path, f"a token of its vocab is {short(piece)}, not a text with a number")
    if len(names) < len(pieces):
        raise refused(path, "a token of the vocabulary is there twice")
    return len(pieces)


def _unknown_of_unigram(spec: Mapping[str, Any], path: str) -> str | None:
    """Return the unknown token of a Unigram model; None if it has none."""
    model = spec["model"]
    if model.get("type") != "Unigram" or model.get("unk_id") is None:
        return None
    id, vocab = model["unk_id"], model["vocab"]
    if type(id) is not int or not 0 <= id < len(vocab):
        raise refused(path, f"model.unk_id is {short(id)}, outside a vocabulary of {len(vocab)}")
    return vocab[id][0]


def _check_merges(merges: Any, pieces: Mapping[str, int], path: str) -> None:
    """Refuse a merge that makes no token, since the library panics over some of these.

    The library itself names the other faults that merges can have.
    """
    if not isinstance(merges, list) or not merges:
        return
    if str(merges[0]).startswith("#version"):  # a line of merges.txt, which the library skips
        merges = merges[1:]
    try:  # half a million pairs at a start, so without a loop
        merged = map(str.replace, merges, repeat(" "), repeat("")) if type(merges[-1]) is str else map("".join, merges)
        unknown = next(filterfalse(pieces.__contains__, merged), None)
    except (IndexError, TypeError):
        return
    if unknown is not None:
        raise refused(path, f"a merge makes {short(unknown)}, which is not in the vocabulary")


def _state(component: Any) -> Part | None:
    """Return a normalizer, pre-tokenizer, decoder or post-processor as the JSON object that it was read from."""
    if component is None:
        return None
    state = component.__getstate__()
    return json.loads(state)


def _set_prefix(tokenizer: Tokenizer, folder: Path) -> None:
    """Let texts begin with a space or without one, if the tokenizer_config.json in `folder` says so."""
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
    """Make a tokenizer with another normalizer and pre-tokenizer, which shares the vocabulary without a copy."""
    spec = {"version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": before, "model": EMPTY}
    with library_errors(path, "not a usable tokenizer.json"):
        variant = Tokenizer.from_str(json.dumps(spec))
        variant.model = tokenizer.model
        added = tokenizer.get_added_tokens_decoder()
        variant.add_tokens([_copy(added[id]) for id in sorted(added)])
    if {id: token.content for id, token in variant.get_added_tokens_decoder().items()} != {
        id: token.content for id, token in added.items()
    }:
        raise refused(path, "added_tokens have ids that do not follow the vocabulary's, which is not supported")
    return variant


def _copy(token: AddedToken) -> AddedToken:
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(token.content, **flags)


def _bos(tokenizer: Tokenizer, path: str) -> int | None:
    """Find the id that begins texts: the file's post_processor puts it before a text, or tokenizer_config.json names
    it.

    We ignore ids that the post_processor puts after a text, such as EOS, since the model will continue the text.
    """
    with library_errors(path, "not a usable tokenizer.json"):
        plain = tokenizer.encode("a", add_special_tokens=False).ids
        sample = tokenizer.encode("a", add_special_tokens=True).ids
    if sample[: len(plain)] != plain:
        if sample[1 : 1 + len(plain)] != plain:
            what = "its post_processor puts other ids before a text than one"
            raise refused(path, f"{what}, which is not supported: {plain} becomes {sample}"[:300])
        return sample[0]
    return stated_bos(Path(path).parent, tokenizer.token_to_id, begins=False, default=None)
