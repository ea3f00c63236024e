"""Byte-level tokenizers in two files, vocab.json and merges.txt, as directories had before tokenizer.json.

The two files say neither how a text is cut nor which tokens are special. In transformers the tokenizer's class adds
this: the class that tokenizer_config.json names, or by default the class of the model's type. We make the
tokenizer.json that this class would write.

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

VOCAB, MERGES = "vocab.json", "merges.txt"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"


class TokenizerClass(NamedTuple):
    """The parts of a tokenizer that a class of transformers adds to a vocabulary."""

    normalizer: Part | None
    split: str | None  # a regular expression; None: GPT-2's, which the library has built in
    named: Mapping[str, str]  # the special tokens by key, where no file states them


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
    """Read a tokenizer from the bytes of a vocab.json; `path` leads to the merges.txt and other files next to it.

    Raises `CheckpointError`.
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
    """Return the class that tokenizer_config.json names, or the class of the model's type."""
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
    """Read the merges: two tokens on each line, the most frequent pair first. A line "#version ..." is a comment."""
    file = MappedFile(path)
    try:
        lines = file.bytes(0, file.size).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise refused(path, f"is not UTF-8: its byte {error.start} is {error.object[error.start]:#04x}") from None
    merges = []
    for number, line in enumerate(lines, 1):
        merge = line.removesuffix("\r")
        if not merge or merge.startswith("#version"):
            continue
        if len(merge.split(" ")) != 2:
            raise refused(path, f"line {number} is {short(merge)}, expected two tokens with a space between them")
        merges.append(merge)
    return merges
