"""The tokenizer inside a GGUF file: SentencePiece's pieces and scores ("llama"), or byte-level BPE's merges ("gpt2").

This module converts the tokenizer to a SentencePiece model or a tokenizer.json for the libraries, so that one
implementation serves all files. The rules are llama.cpp's (src/llama-vocab.cpp, commit 00ad355):

1. Text is not normalized. In "gpt2", tokenizer.ggml.pre names how it is cut (`gguf_cuttings`).
2. User-defined tokens are found in the text as it is, spaces and all, before it is cut: the longest first.
3. In "llama", the start of a text and each text after a user-defined or control token get a space in front, unless
   tokenizer.ggml.add_space_prefix is false. Merges may then make pieces of every type. This is how a user-defined token
   spelled with "▁" is made: rule 2 does not find it, since the text still has spaces.
4. Types of tokens are corrected by name (`model.checkpoints.gguf.control_tokens`). If a text spells the name of a
   control token, the name stays text. (llama.cpp with `parse_special` makes it the token.)
5. If general.name contains "phi-3" or "phi3", all control tokens, user-defined tokens and `</s>` absorb the white
   space after them, except `<unk>`, `<s>` and `<|endoftext|>`. Other overrides by name are for embeddings
   (jina, nomic, ModernBERT) and for architectures that are not read (Gemma 4).
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llamaspec.model.checkpoints.gguf.config import BOS, STOPS
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

SENTENCEPIECE_BOS = 1  # the id of BOS where no key names it
TYPE = "tokenizer.ggml.model"
TEMPLATE = "tokenizer.chat_template"  # and with .NAME, for each of the names in the list
TEMPLATE_NAMES = "tokenizer.chat_templates"


def read_gguf(file: MappedFile) -> Tokenizer | None:
    """Read the tokenizer of a GGUF file; None where it has none. Raises CheckpointError for one that cannot be used."""
    metadata = read_header(file).metadata
    kind = metadata.string(TYPE, "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("llama", "gpt2"):
        raise metadata.refused(f"{TYPE} {short(kind)} is not supported (only llama and gpt2)")
    tokens = metadata.strings("tokenizer.ggml.tokens")
    check_count(len(tokens), metadata.path)
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise metadata.refused(f"token {short(twice)} is there twice")
    types = _types(metadata, len(tokens))
    read = _sentencepiece if kind == "llama" else _byte_level
    return read(metadata, tokens, types)


def named_tokens(file: MappedFile) -> dict[str, str]:
    """Return the names of the tokens bos_token and eos_token by a GGUF file's keys, as variables for a template."""
    metadata, named = read_header(file).metadata, {}
    tokens = metadata.strings("tokenizer.ggml.tokens")
    for name in ("bos", "eos"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata and 0 <= (id := metadata.integer(key)) < len(tokens):
            named[f"{name}_token"] = tokens[id]
    return named


def read_templates(file: MappedFile) -> tuple[dict[str, str], dict[str, str]] | None:
    """Read the chat templates of a GGUF file by name, and the names of the tokens bos_token and eos_token.

    Returns None if the file has no default template.
    """
    metadata = read_header(file).metadata
    if TEMPLATE not in metadata:
        return None
    named = named_tokens(file)
    more_names = metadata.strings(TEMPLATE_NAMES) if TEMPLATE_NAMES in metadata else []
    if odd := next((name for name in more_names if not re.fullmatch(r"\w{1,100}", name, re.ASCII)), None):
        # Names become names of files.
        raise metadata.refused(f"the name of a chat template, {short(odd)}, is not of letters and digits")
    sources = {name: metadata.string(f"{TEMPLATE}.{name}") for name in more_names}
    return sources | {"default": metadata.string(TEMPLATE)}, named


def _types(metadata: Metadata, count: int) -> Sequence[int]:
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        return [NORMAL] * count
    types = metadata.numbers(key)
    if len(types) != count or types.dtype.kind not in "iu" or not np.all((types >= NORMAL) & (types <= BYTE)):
        raise metadata.refused(f"{key} is not a list of {count} numbers from {NORMAL} to {BYTE}")
    return types.tolist()


def _corrected(
    metadata: Metadata, tokens: Sequence[str], types: Sequence[int], *, merged: Collection[str]
) -> list[int]:
    named = [metadata.integer(key) for key in (BOS, *STOPS) if key in metadata]
    return corrected_types({token: id for id, token in enumerate(tokens)}, types, named=named, merged=merged)


def _takes_in_space(metadata: Metadata) -> Callable[[str], bool]:
    """Make a function that tells, by a token's name, whether the token absorbs the white space after it."""
    model = metadata.string("general.name", "").lower()
    phi_3 = "phi-3" in model or "phi3" in model
    return lambda name: phi_3 and name not in ("<unk>", "<s>", "<|endoftext|>")


def _bos(metadata: Metadata, tokens: Sequence[str], *, default: bool, absent: int | None = None) -> int | None:
    """Return the id that begins texts, or None. If no key names it, return `absent`, as in llama.cpp."""
    if not metadata.boolean("tokenizer.ggml.add_bos_token", default):
        return None
    if BOS not in metadata:
        return absent
    if not 0 <= (id := metadata.integer(BOS)) < len(tokens):
        raise metadata.refused(f"{BOS} is {short(id)}, outside a vocabulary of {len(tokens)}")
    return id


def _with_unknown(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> Sequence[int]:
    """Mark the unknown token in `types`: llama.cpp's converter writes it as a control token."""
    if UNKNOWN in types:
        return types
    key = "tokenizer.ggml.unknown_token_id"
    id = metadata.integer(key) if key in metadata else 0  # as in llama.cpp
    if not 0 <= id < len(tokens) or types[id] == BYTE or (key not in metadata and tokens[id] != "<unk>"):
        raise metadata.refused("no token stands for what is unknown")
    return [*types[:id], UNKNOWN, *types[id + 1 :]]


def _sentencepiece(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

    from llamaspec.model.tokenizers.sentencepiece_model import from_proto

    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens) or scores.dtype.kind != "f" or not np.all(np.isfinite(scores)):
        raise metadata.refused(f"tokenizer.ggml.scores is not a list of {len(tokens)} finite numbers")
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
    return replace(tokenizer, bos=bos)


def _byte_level(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    from llamaspec.model.tokenizers.huggingface import read_huggingface

    name = metadata.string("tokenizer.ggml.pre", "default")
    if name not in CUTTINGS:
        raise metadata.refused(f"tokenizer.ggml.pre {short(name)} is not supported (only {', '.join(CUTTINGS)})")
    cutting = CUTTINGS[name]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = metadata.strings("tokenizer.ggml.merges")
    for i, merge in enumerate(merges):
        first, _, second = merge.partition(" ")
        if first not in vocabulary or second not in vocabulary or first + second not in vocabulary:
            raise metadata.refused(f"merge {i}, {short(merge)}, is not of two tokens that make a third")
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
    return replace(tokenizer.longest_first(), bos=bos)


def _spec(vocabulary: dict[str, int], merges: list[str], cutting: Cutting) -> dict[str, Any]:
    """Make the tokenizer.json of a byte-level tokenizer, without its added tokens."""
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
