"""Reads the tokenizer inside a GGUF file. The key tokenizer.ggml.model names one of two supported types.

Type "llama" has the pieces and scores of a SentencePiece model; type "gpt2" has the merges of byte-level BPE. We
convert type "llama" to a SentencePiece model and type "gpt2" to a tokenizer.json. The code that opens such files then
opens the result. We follow the rules of llama.cpp (src/llama-vocab.cpp, commit 00ad355):

1. Text is not normalized. In "gpt2", tokenizer.ggml.pre names the rules that split it into pieces (`gguf_cuttings`).
2. We search for user-defined tokens in the unchanged text, before it is split: the longest first.
3. In "llama", we put a space in front of a whole text, and of each part after a user-defined or control token, unless
   tokenizer.ggml.add_space_prefix is false. Then merges may make pieces of every type. A user-defined token that is
   spelled with "▁" can only arise in this way: rule 2 does not find it, since the text still has spaces there.
4. We correct the types of tokens by their names (`model.checkpoints.gguf.control_tokens`). If a text contains the name
   of a control token, the name stays ordinary text. (llama.cpp with `parse_special` turns it into the token.)
5. If general.name contains "phi-3" or "phi3", all control tokens, user-defined tokens and `</s>` absorb the white
   space after them, except `<unk>`, `<s>` and `<|endoftext|>`. llama.cpp has more overrides by name: for embedding
   models (jina, nomic, ModernBERT), and for architectures that we do not read (Gemma 4).
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llamaspec.model.checkpoints.gguf.config import BOS, EOS, STOPS
from llamaspec.model.checkpoints.gguf.control_tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    corrected_types,
)
from llamaspec.model.checkpoints.gguf.file import Metadata, read_header, short
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.tokenizers.added_tokens import LongestFirst
from llamaspec.model.tokenizers.gguf_cuttings import CUTTINGS, Cutting
from llamaspec.model.tokenizers.limits import check_count
from llamaspec.model.tokenizers.tokenizer import Tokenizer, is_byte
from llamaspec.model.tokenizers.tokenizer_config import Added

SENTENCEPIECE_BOS = 1  # the id of BOS if no key states it
TYPE = "tokenizer.ggml.model"
TEMPLATE = "tokenizer.chat_template"  # the default template; other templates have this key with .NAME
TEMPLATE_NAMES = "tokenizer.chat_templates"


def read_gguf(file: MappedFile) -> Tokenizer | None:
    """Read the tokenizer of a GGUF file; None if the file has no tokenizer.

    Raises CheckpointError if the tokenizer is damaged or not supported.
    """
    metadata = read_header(file).metadata
    kind = metadata.string(TYPE, "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("llama", "gpt2"):
        raise metadata.refused(f"{TYPE} is {short(kind)}, which is not supported (only llama and gpt2)")
    tokens = metadata.strings("tokenizer.ggml.tokens")
    check_count(len(tokens), metadata.path)
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise metadata.refused(f"token {short(twice)} appears twice in tokenizer.ggml.tokens")
    types = _types(metadata, len(tokens))
    read = _sentencepiece if kind == "llama" else _byte_level
    return read(metadata, tokens, types)


def named_tokens(file: MappedFile) -> dict[str, str]:
    """Return the strings of bos_token and eos_token for chat templates; the keys of a GGUF file state their ids."""
    metadata, named = read_header(file).metadata, {}
    tokens = metadata.strings("tokenizer.ggml.tokens")
    for name in ("bos", "eos"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata and 0 <= (id := metadata.integer(key)) < len(tokens):
            named[f"{name}_token"] = tokens[id]
    return named


def read_templates(file: MappedFile) -> tuple[dict[str, str], dict[str, str]] | None:
    """Read the chat templates of a GGUF file by name, and the strings of bos_token and eos_token.

    Returns None if the file has no default template.
    """
    metadata = read_header(file).metadata
    if TEMPLATE not in metadata:
        return None
    named = named_tokens(file)
    more_names = metadata.strings(TEMPLATE_NAMES) if TEMPLATE_NAMES in metadata else []
    if odd := next((name for name in more_names if not re.fullmatch(r"\w{1,100}", name, re.ASCII)), None):
        # We use the names of templates as names of files.
        what = f"{TEMPLATE_NAMES} contains {short(odd)}, expected names of 1 to 100 letters, digits or underscores"
        raise metadata.refused(what)
    sources = {name: metadata.string(f"{TEMPLATE}.{name}") for name in more_names}
    return sources | {"default": metadata.string(TEMPLATE)}, named


def _types(metadata: Metadata, count: int) -> Sequence[int]:
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        return [NORMAL] * count
    types = metadata.numbers(key)
    if len(types) != count or types.dtype.kind not in "iu" or not np.all((types >= NORMAL) & (types <= BYTE)):
        raise metadata.refused(f"{key} is not a list of {count} integers from {NORMAL} to {BYTE}, one for each token")
    return types.tolist()


def _corrected(
    metadata: Metadata, tokens: Sequence[str], types: Sequence[int], *, merged: Collection[str]
) -> list[int]:
    named = [metadata.integer(key) for key in (BOS, *STOPS) if key in metadata]
    return corrected_types({token: id for id, token in enumerate(tokens)}, types, named=named, merged=merged)


def _takes_in_space(metadata: Metadata) -> Callable[[str], bool]:
    """Return a function that tells whether the token with a given name absorbs the white space after it (rule 5)."""
    model = metadata.string("general.name", "").lower()
    phi_3 = "phi-3" in model or "phi3" in model
    return lambda name: phi_3 and name not in ("<unk>", "<s>", "<|endoftext|>")


def _appended(metadata: Metadata, tokens: Sequence[str]) -> tuple[int, ...]:
    """Return the ids that the file's keys put after a text: EOS, or none."""
    if not metadata.boolean("tokenizer.ggml.add_eos_token", False):
        return ()
    if EOS not in metadata or not 0 <= (id := metadata.integer(EOS)) < len(tokens):
        raise metadata.refused(f"tokenizer.ggml.add_eos_token is true, but {EOS} names no token of the vocabulary")
    return (id,)


def _bos(metadata: Metadata, tokens: Sequence[str], *, default: bool, absent: int | None = None) -> int | None:
    """Return the id of the token that begins texts; None if texts begin without one.

    `default` says whether texts begin with BOS if the file has no key for this. `absent` is the id of BOS if no key
    states it.
    """
    if not metadata.boolean("tokenizer.ggml.add_bos_token", default):
        return None
    if BOS not in metadata:
        return absent
    if not 0 <= (id := metadata.integer(BOS)) < len(tokens):
        raise metadata.refused(f"{BOS} is {short(id)}, outside the vocabulary of {len(tokens)} tokens")
    return id


def _with_unknown(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> Sequence[int]:
    """Return `types` with the type UNKNOWN for the unknown token. llama.cpp's converter gives it the type CONTROL."""
    if UNKNOWN in types:
        return types
    key = "tokenizer.ggml.unknown_token_id"
    id = metadata.integer(key) if key in metadata else 0  # as in llama.cpp
    if not 0 <= id < len(tokens) or types[id] == BYTE or (key not in metadata and tokens[id] != "<unk>"):
        raise metadata.refused(f"has no unknown token: neither {key} nor a token of type {UNKNOWN} states it")
    return [*types[:id], UNKNOWN, *types[id + 1 :]]


def _sentencepiece(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

    from llamaspec.model.tokenizers.sentencepiece_model import from_proto

    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens) or scores.dtype.kind != "f" or not np.all(np.isfinite(scores)):
        what = f"tokenizer.ggml.scores is not a list of {len(tokens)} finite numbers, one for each token"
        raise metadata.refused(what)
    if BYTE not in types:
        types = [BYTE if is_byte(token) else kind for token, kind in zip(tokens, types, strict=True)]
    types = _with_unknown(metadata, tokens, _corrected(metadata, tokens, types, merged=()))
    takes_in_space = _takes_in_space(metadata)
    proto = ModelProto()
    for text, score, kind in zip(tokens, scores.tolist(), types, strict=True):
        proto.pieces.add(piece=text, score=score, type=NORMAL if kind == USER_DEFINED else kind)
    added = {
        text: Added(id, special=False, rstrip=takes_in_space(text))
        for id, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == USER_DEFINED
    }
    absent = SENTENCEPIECE_BOS if types[SENTENCEPIECE_BOS : SENTENCEPIECE_BOS + 1] == [CONTROL] else None
    bos, trainer = _bos(metadata, tokens, default=True, absent=absent), proto.trainer_spec
    trainer.model_type = trainer.BPE
    trainer.vocab_size = len(tokens)
    trainer.byte_fallback = BYTE in types
    trainer.unk_piece = tokens[types.index(UNKNOWN)]
    spaced = metadata.boolean("tokenizer.ggml.add_space_prefix", True)
    proto.normalizer_spec.add_dummy_prefix = spaced
    proto.normalizer_spec.remove_extra_whitespaces = False
    tokenizer = from_proto(
        proto,
        path=metadata.path,
        absorbs={
            text: (False, True)
            for text, kind in zip(tokens, types, strict=True)
            if kind == CONTROL and takes_in_space(text)
        },
        added=LongestFirst(added),
        after_added="space",
    )
    return replace(tokenizer, bos=bos, appended=_appended(metadata, tokens))


def _byte_level(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    from llamaspec.model.tokenizers.huggingface import read_huggingface

    name = metadata.string("tokenizer.ggml.pre", "default")
    if name not in CUTTINGS:
        what = f"tokenizer.ggml.pre is {short(name)}, which is not supported (only {', '.join(CUTTINGS)})"
        raise metadata.refused(what)
    cutting = CUTTINGS[name]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = metadata.strings("tokenizer.ggml.merges")
    for i, merge in enumerate(merges):
        first, _, second = merge.partition(" ")
        if first not in vocabulary or second not in vocabulary or first + second not in vocabulary:
            what = f"merge {i} is {short(merge)}, expected two tokens of the vocabulary that together spell a third"
            raise metadata.refused(what)
    bos = _bos(metadata, tokens, default=cutting.bos)
    types = _corrected(metadata, tokens, types, merged={merge.replace(" ", "", 1) for merge in merges})
    takes_in_space = _takes_in_space(metadata)
    added = [
        {"id": id, "content": token, "special": kind == CONTROL, "rstrip": takes_in_space(token)}
        | dict.fromkeys(("single_word", "lstrip", "normalized"), False)
        for id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    spec = _spec(vocabulary, merges, cutting) | {"added_tokens": added}
    # This path has no neighbors: a tokenizer_config.json next to the GGUF file belongs to another tokenizer.
    tokenizer = read_huggingface(json.dumps(spec).encode(), path=f"{metadata.path}/tokenizer")
    return replace(tokenizer.longest_first(), bos=bos, appended=_appended(metadata, tokens))


def _spec(vocabulary: dict[str, int], merges: list[str], cutting: Cutting) -> dict[str, Any]:
    """Build the contents of a tokenizer.json for a byte-level tokenizer, without added tokens."""
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cuts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in cutting.patterns
    ]
    return {
        "version": "1.0",
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, bytes_only]},
        "decoder": bytes_only,
        "model": {"type": "BPE", "ignore_merges": cutting.whole_words, "vocab": vocabulary, "merges": merges},
    }
