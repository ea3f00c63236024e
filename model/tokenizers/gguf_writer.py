"""Converts a tokenizer to keys of a GGUF file, which `model.tokenizers.gguf` and llama.cpp read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from llamaspec.model.checkpoints.checkpoint import Checkpoint, CheckpointError, refused
from llamaspec.model.checkpoints.gguf.config import BOS, EOS, STOPS
from llamaspec.model.checkpoints.gguf.control_tokens import (
    BYTE,
    CONTROL,
    ENDS,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from llamaspec.model.checkpoints.gguf.file import Value
from llamaspec.model.tokenizers.gguf import TEMPLATE, TEMPLATE_NAMES, TYPE
from llamaspec.model.tokenizers.gguf_cuttings import CUTTINGS
from llamaspec.model.tokenizers.huggingface import HuggingFaceTokenizer
from llamaspec.model.tokenizers.huggingface_decoder import byte_characters
from llamaspec.model.tokenizers.sentencepiece_model import SentencePieceTokenizer
from llamaspec.model.tokenizers.tiktoken_ranks import TiktokenTokenizer
from llamaspec.model.tokenizers.tokenizer import Tokenizer, is_byte
from llamaspec.reference.byte_bpe import GPT2

END_OF_TURN, END_OF_MESSAGE = ("<|eot_id|>", "<|im_end|>"), ("<|eom_id|>",)
ADD_EOS = "tokenizer.ggml.add_eos_token"
LAST_SCORE = -1000.0  # score of tokens that no merge should make


class VocabularyToken(NamedTuple):
    """A token of a GGUF file: its text, its type and its score."""

    text: str
    kind: int = NORMAL
    score: float = 0.0


def vocabulary_keys(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    templates: Mapping[str, str] | None = None,
    *,
    named: Mapping[str, str | None] | None = None,
) -> dict[str, Value]:
    """Return the GGUF keys for a tokenizer and chat templates; without a tokenizer, only the ids of special tokens.

    `templates` has the sources of the chat templates by name; the template "default" is for most conversations. `named`
    has the strings of bos_token and eos_token that templates use. If the tokenizer puts one token after a text, this
    token becomes GGUF's EOS, as in llama.cpp's converter. Raises `CheckpointError` if GGUF or llama.cpp cannot express
    the tokenizer.
    """
    keys: dict[str, Value] = {TYPE: "none"} if tokenizer is None else _tokenizer_keys(checkpoint, tokenizer)
    ids = _named_ids(tokenizer, named or {})
    bos = tokenizer.bos if tokenizer is not None and tokenizer.bos is not None else ids.get("bos_token", checkpoint.bos)
    if bos is not None:
        keys[BOS] = bos
    eos = ids.get("eos_token")
    match tokenizer.appended if tokenizer else ():
        case (last,) if last < checkpoint.config.vocab:
            eos, checkpoint = last, replace(checkpoint, stops=checkpoint.stops | {last})
    keys |= _stop_keys(checkpoint, tokenizer, bos, eos=eos)
    if tokenizer:
        keys[ADD_EOS] = tokenizer.appended == (keys.get(EOS),)
    return keys | _template_keys(templates or {})


def unkept(tokenizer: Tokenizer, keys: Mapping[str, Value]) -> list[str]:
    """List, one per line, the changes that the tokenizer makes to a text but a GGUF file with `keys` cannot express."""
    lines = []
    if tokenizer.appended and not keys[ADD_EOS]:
        names = " ".join(tokenizer.piece(id) for id in tokenizer.appended)
        what = f"the tokenizer puts {names} after a text, which this GGUF file cannot express"
        lines.append(f"{what}: with the GGUF file, embeddings lack it")
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return lines
    spec = tokenizer.proto().normalizer_spec
    if spec.remove_extra_whitespaces:
        what = "the tokenizer replaces several spaces with one, which a GGUF file cannot express"
        lines.append(f"{what}: with the GGUF file, all spaces are kept")
    if spec.precompiled_charsmap:
        how = spec.name or "by a table"
        what = f"the tokenizer normalizes text ({how}), which a GGUF file cannot express"
        lines.append(f"{what}: with the GGUF file, text is not normalized")
    return lines


def _template_keys(templates: Mapping[str, str]) -> dict[str, Value]:
    # Like llama.cpp, we replace characters that are not letters or digits with underscores.
    named = {re.sub(r"[^A-Za-z0-9]", "_", name): source for name, source in templates.items()}
    keys: dict[str, Value] = {
        TEMPLATE if name == "default" else f"{TEMPLATE}.{name}": source for name, source in named.items()
    }
    other_names = [name for name in named if name != "default"]
    return keys | {TEMPLATE_NAMES: other_names} if other_names else keys


def _named_ids(tokenizer: Tokenizer | None, named: Mapping[str, str | None]) -> dict[str, int]:
    """Return the ids of control tokens by key, such as bos_token; `named` has their names by key."""
    special = tokenizer.special if tokenizer else {}
    return {key: special[name] for key, name in named.items() if name is not None and name in special}


def _stop_keys(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, bos: int | None, *, eos: int | None
) -> dict[str, Value]:
    """Assign the stop ids to GGUF's three keys: the end of a text, of a turn and of a message.

    If `eos` (the id of eos_token) is a stop id, it gets the first key, since templates read eos_token from this key.
    """
    if len(checkpoint.stops) > len(STOPS) and tokenizer:
        checkpoint = replace(checkpoint, stops=_stops_for_keys(checkpoint.stops, tokenizer, eos))
    if len(checkpoint.stops) > len(STOPS):
        what = f"the model has {len(checkpoint.stops)} end tokens, but GGUF has keys for only {len(STOPS)}"
        raise refused(checkpoint.path, what)
    special = tokenizer.special if tokenizer else {}
    text, turn, message = STOPS
    keys: dict[str, Value] = {}
    leftover = sorted(
        checkpoint.stops, key=lambda id: (id == bos, id)
    )  # BOS, which is an end token of llama2.c's models, comes last.
    if eos in leftover:
        keys[text] = eos
        leftover.remove(eos)
    for key, names in ((turn, END_OF_TURN), (message, END_OF_MESSAGE)):
        ids = [special[name] for name in names if special.get(name) in leftover]
        if ids and (len(leftover) > 1 or text in keys):
            keys[key] = ids[0]
            leftover.remove(ids[0])
    free = [key for key in (text, turn, message) if key not in keys]
    return keys | dict(zip(free, leftover, strict=False))


def _stops_for_keys(stops: frozenset[int], tokenizer: Tokenizer, eos: int | None) -> frozenset[int]:
    """Choose the stop ids for which we write keys.

    llama.cpp recognizes some end tokens by name, without a key. We first choose all ids that it does not recognize. If
    keys are left, we also choose ids that it recognizes, first `eos`.
    """
    names = {id: tokenizer.piece(id) for id in stops}
    turns = (*END_OF_TURN, *END_OF_MESSAGE)
    known = sorted((id != eos, name not in turns, id) for id, name in names.items() if name in ENDS)
    unknown = {id for id, name in names.items() if name not in ENDS}
    return frozenset({*unknown, *(id for *_, id in known[: max(0, len(STOPS) - len(unknown))])})


def _tokenizer_keys(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, Value]:
    match tokenizer:
        case SentencePieceTokenizer():
            tokens, keys = _sentencepiece(checkpoint, tokenizer)
        case TiktokenTokenizer():
            tokens, keys = _ranks(checkpoint, tokenizer)
        case HuggingFaceTokenizer():
            tokens, keys = _huggingface(checkpoint, tokenizer)
        case _:
            raise TypeError(f"a tokenizer of type {type(tokenizer).__name__} cannot be written to a GGUF file")
    # llama.cpp requires one token for each row of the embedding, which may have more or fewer rows than we have tokens.
    del tokens[checkpoint.config.vocab :]
    tokens += [VocabularyToken(f"[PAD{id}]", UNUSED, LAST_SCORE) for id in range(len(tokens), checkpoint.config.vocab)]
    keys |= {
        "tokenizer.ggml.tokens": [token.text for token in tokens],
        "tokenizer.ggml.token_type": np.array([token.kind for token in tokens], np.int32),
        "tokenizer.ggml.add_bos_token": tokenizer.bos is not None,
        ADD_EOS: False,  # `vocabulary_keys` decides it when the end tokens are known
    }
    if keys[TYPE] == "llama":
        keys["tokenizer.ggml.scores"] = np.array([token.score for token in tokens], np.float32)
        keys["tokenizer.ggml.add_space_prefix"] = tokenizer.dummy_prefix
        unknown = next((id for id, token in enumerate(tokens) if token.kind == UNKNOWN), None)
        if unknown is None:
            raise refused(checkpoint.path, "its tokenizer has no unknown token, which llama.cpp needs")
        keys["tokenizer.ggml.unknown_token_id"] = unknown
    return keys


def _sentencepiece(
    checkpoint: Checkpoint, tokenizer: SentencePieceTokenizer
) -> tuple[list[VocabularyToken], dict[str, Value]]:
    """Convert the pieces of a SentencePiece model to tokens, and return them with the keys for this kind of tokenizer.

    In user-defined pieces, spaces replace "▁", since llama.cpp searches for these pieces in the unchanged text.
    """
    proto, added = tokenizer.proto(), tokenizer.added
    if (kind := proto.trainer_spec.model_type) != proto.trainer_spec.BPE:
        raise _not_bpe(checkpoint, proto.trainer_spec.ModelType.Name(kind).capitalize())
    pieces = proto.pieces
    names = {piece.piece for piece in pieces}

    def token(piece: Any) -> VocabularyToken:
        if piece.piece not in added and piece.type != USER_DEFINED:
            return VocabularyToken(piece.piece, piece.type, piece.score)
        spaced = piece.piece if piece.piece in added else piece.piece.replace("▁", " ")
        return VocabularyToken(piece.piece if spaced in names else spaced, USER_DEFINED, piece.score)

    return [token(piece) for piece in pieces], {TYPE: "llama", "tokenizer.ggml.pre": "default"}


def _ranks(checkpoint: Checkpoint, tokenizer: TiktokenTokenizer) -> tuple[list[VocabularyToken], dict[str, Value]]:
    """Convert a tokenizer with ranks (Llama 3 or Mistral) to tokens and keys; we derive the merges from the ranks."""
    characters = {byte: character for character, byte in byte_characters().items()}

    def spelled(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    names = {id: name for name, id in tokenizer.special.items()}
    ranks = {tokenizer.bytes_of(id): id for id in range(tokenizer.vocab) if id not in names}
    tokens = [
        VocabularyToken(names[id], CONTROL) if id in names else VocabularyToken(spelled(tokenizer.bytes_of(id)))
        for id in range(tokenizer.vocab)
    ]
    merges = [f"{spelled(first)} {spelled(second)}" for first, second in _merges(ranks)]
    name = _name_of(checkpoint, (tokenizer.pattern,))
    return tokens, {TYPE: "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": merges}


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield for each token the two tokens that byte-pair encoding joins to make it, in the order of ranks.

    Tokens that no merge makes are left out.

    >>> list(_merges({b"a": 0, b"b": 1, b"ab": 2, b"abab": 3, b"xyz": 4}))
    [(b'a', b'b'), (b'ab', b'ab')]
    """
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joint = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            best = min(range(len(joint)), key=joint.__getitem__)
            if joint[best] >= rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2 and all(part in ranks for part in parts):
            yield parts[0], parts[1]


def _huggingface(
    checkpoint: Checkpoint, tokenizer: HuggingFaceTokenizer
) -> tuple[list[VocabularyToken], dict[str, Value]]:
    spec = tokenizer.spec()
    model = spec["model"]
    if model["type"] != "BPE":
        raise _not_bpe(checkpoint, model["type"])
    merges: list[tuple[str, str]] = [tuple(merge) for merge in model["merges"]]
    added = {entry["id"]: entry for entry in spec["added_tokens"]}
    scores = {
        a + b: -float(i) for i, (a, b) in reversed(list(enumerate(merges)))
    }  # If several merges make a token, the first of them determines the score.

    def token(id: int) -> VocabularyToken:
        piece = tokenizer.piece(id)
        if not piece:
            return VocabularyToken(f"[PAD{id}]", UNUSED, LAST_SCORE)
        if piece == model.get("unk_token"):
            return VocabularyToken(piece, UNKNOWN)
        if id in added:
            return VocabularyToken(piece, CONTROL if added[id]["special"] else USER_DEFINED)
        byte = not tokenizer.byte_level and is_byte(piece)
        return VocabularyToken(piece, BYTE if byte else NORMAL, 0.0 if byte else scores.get(piece, LAST_SCORE))

    tokens = [token(id) for id in range(tokenizer.vocab)]
    if not tokenizer.byte_level:
        return tokens, {TYPE: "llama", "tokenizer.ggml.pre": "default"}
    if tokenizer.dummy_prefix:
        what = "its tokenizer puts a space in front of texts (add_prefix_space), but llama.cpp would not"
        raise refused(checkpoint.path, f"{what}; use --to safetensors, which keeps the tokenizer")
    name = _name_of_patterns(checkpoint, spec["pre_tokenizer"])
    pairs = [f"{a} {b}" for a, b in merges]
    return tokens, {TYPE: "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": pairs}


def _not_bpe(checkpoint: Checkpoint, kind: str) -> CheckpointError:
    what = f"its tokenizer has type {kind}, but readers of the GGUF file would use BPE and get other ids"
    return refused(checkpoint.path, f"{what}; use --to safetensors, which keeps the tokenizer")


def _name_of_patterns(checkpoint: Checkpoint, before: Mapping[str, Any]) -> str:
    """Find llama.cpp's name (tokenizer.ggml.pre) for the pre-tokenizer `before` of a tokenizer.json."""
    steps: Sequence[Mapping[str, Any]] = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    patterns: list[str] = []
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case {"type": "ByteLevel", "use_regex": True}:
                patterns.append(GPT2)
            case {"type": "ByteLevel"}:
                pass
            case _:
                patterns.append(step["type"])
    return _name_of(checkpoint, tuple(patterns))


def _name_of(checkpoint: Checkpoint, patterns: tuple[str, ...]) -> str:
    for name, cutting in CUTTINGS.items():
        if cutting.patterns == patterns:
            return name
    what = f"llama.cpp has no tokenizer.ggml.pre for the patterns that its tokenizer uses to split a text: {patterns}"
    raise refused(checkpoint.path, what[:400])
