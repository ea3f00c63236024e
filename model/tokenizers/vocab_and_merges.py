"""Reads byte-level tokenizers from two files, vocab.json and merges.txt, which older directories have.

The two files do not say how to split a text into pieces, or which tokens are special. In transformers, this is in the
code of the tokenizer's class. The class is the one that tokenizer_config.json names, or else the default for the
model's type. We build the tokenizer.json that this class would write.

Source: transformers 5.24, `GPT2Tokenizer`, `Qwen2Tokenizer` and `GPTNeoXTokenizer` in models/*/tokenization_*.py, and
`TOKENIZER_MAPPING_NAMES` in models/auto/tokenization_auto.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.checkpoints.strict_json import read_object, short
from llamaspec.model.tokenizers.huggingface import HuggingFaceTokenizer, parse, read_huggingface
from llamaspec.model.tokenizers.huggingface_parts import Part
from llamaspec.model.tokenizers.tokenizer_config import read_config, stated_prefix
from llamaspec.reference.byte_bpe import QWEN2

VOCAB, MERGES = "vocab.json", "merges.txt"
END = "<|endoftext|>"


class TokenizerClass(NamedTuple):
    """The parts of a tokenizer that a tokenizer class of transformers adds to the vocabulary and the merges."""

    normalizer: Part | None
    split: str | None  # the regular expression that splits a text; None: GPT-2's, which the library knows
    named: Mapping[str, str]  # special tokens by key, for keys that no file states


CLASSES = {
    "GPT2Tokenizer": TokenizerClass(None, None, dict.fromkeys(("unk_token", "bos_token", "eos_token"), END)),
    "Qwen2Tokenizer": TokenizerClass(
        {"type": "NFC"}, QWEN2, dict.fromkeys(("unk_token", "eos_token", "pad_token"), END)
    ),
    "GPTNeoXTokenizer": TokenizerClass(
        {"type": "NFC"},
        None,
        {**dict.fromkeys(("unk_token", "bos_token", "eos_token"), END), "pad_token": "<|padding|>"},
    ),
}
CLASS_OF_MODEL = dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer") | {
    "starcoder2": "GPT2Tokenizer"
}


def read_vocab_and_merges(data: bytes, *, path: str) -> HuggingFaceTokenizer:
    """Read a tokenizer from `data`, the bytes of the vocab.json at `path`, and from merges.txt next to it.

    Raises `CheckpointError` if a file cannot be used.
    """
    folder = Path(path).parent
    kind = _class_of(folder)
    level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": kind.split is None}
    level["add_prefix_space"] = bool(stated_prefix(folder, byte_level=True))
    cuts: list[Part] = [level]
    if kind.split is not None:
        cuts = [{"type": "Split", "pattern": {"Regex": kind.split}, "behavior": "Isolated", "invert": False}, level]
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": kind.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "decoder": level,
        "model": {"type": "BPE", "vocab": parse(data, path), "merges": _merges(folder / MERGES)},
    }
    return read_huggingface(json.dumps(spec).encode(), path=path, named=kind.named)


def _class_of(folder: Path) -> TokenizerClass:
    """Return the tokenizer class that tokenizer_config.json names, or else the class for the model_type in config.json.

    Raises `CheckpointError` if the class is not in `CLASSES`.
    """
    path, config = folder / "tokenizer_config.json", read_config(folder)
    name: Any = config.get("tokenizer_class")
    if name is None:
        path = folder / "config.json"
        values = read_object(path) if path.is_file() else {}
        name = values.get("tokenizer_class") or CLASS_OF_MODEL.get(str(values.get("model_type")))
    kind = CLASSES.get(name.removesuffix("Fast")) if isinstance(name, str) else None
    if kind is None:
        stated = "no tokenizer_class" if name is None else f"tokenizer_class {short(name)}"
        what = f"has {stated}, expected one of {', '.join(CLASSES)} to read {VOCAB} and {MERGES}"
        raise refused(path, what)
    return kind


def _merges(path: Path) -> list[str]:
    """Read merges.txt: each line has two tokens, the most frequent pair first. A line "#version ..." is a comment."""
    file = MappedFile(path)
    try:
        lines = file.bytes(0, file.size).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        what = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise refused(path, f"is not valid UTF-8: {what}") from None
    merges = []
    for number, line in enumerate(lines, 1):
        merge = line.removesuffix("\r")
        if not merge or merge.startswith("#version"):
            continue
        if len(merge.split(" ")) != 2:
            raise refused(path, f"line {number} is {short(merge)}, expected two tokens with a space between them")
        merges.append(merge)
    return merges
