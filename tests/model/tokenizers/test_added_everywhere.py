"""Added tokens of every kind in texts with all of Unicode: at the start, in the middle, doubled, next to white space.

We compare ids with transformers and llama.cpp. Both run if LLAMASPEC_OTHER_PYTHON names a Python that has them.
"""

import json
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from llamaspec.model.chat.template import SpecialTokens
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.reference.byte_bpe import GPT2, LLAMA3
from tests.model.tokenizers.test_added_tokens import CONTROLS, GGUF, NAMES, gguf
from tests.model.tokenizers.test_gguf_tokenizers import trained_merges, trained_pieces
from tests.model.tokenizers.test_tokenizer_json import LLAMAS, file_of, metaspace
from tests.reference import test_byte_bpe
from tests.support.strategies import share_of

FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")
ADDED: dict[str, tuple[str, ...]] = {
    "<tool>": (),
    "<normal>": ("normalized",),
    "<left>": ("lstrip",),
    "<right>": ("rstrip",),
    "<word>": ("single_word",),
    "<control>": ("special",),
    "<control_left>": ("special", "lstrip"),
    "<control_right>": ("special", "rstrip"),
    "<control_both>": ("special", "lstrip", "rstrip"),
    "\n\n": (),
    "    ": (),
    "\t\t": (),
    "ö好": (),
    "total income": (),
}
MARKERS = ("<|im_start|>", "<|im_end|>")
FIRST_PRIVATE_PLANE = 0xF0000


def flags_of(name: str) -> dict[str, bool]:
    return {flag: flag in ADDED[name] for flag in FLAGS}


def decoder(first: int, names: Iterable[str] = ADDED) -> dict[str, dict[str, Any]]:
    """Format tokens of `ADDED` as tokenizer_config.json does, with ids from `first` on."""
    return {str(first + i): {"content": name, **flags_of(name)} for i, name in enumerate(names)}


def two_files(folder: Path, kind: str, **config: Any) -> None:
    """Write vocab.json, merges.txt and a tokenizer_config.json that names the class `kind`."""
    model = json.loads(trained_merges(GPT2))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]))
    added = decoder(len(model["vocab"]))
    ends = {key: "<control>" for key in ("unk_token", "bos_token", "eos_token", "pad_token")}
    stated = {"tokenizer_class": kind, "added_tokens_decoder": added, **ends, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))


def one_file(folder: Path, data: str) -> None:
    """Write a tokenizer.json with the tokens of `ADDED`."""
    spec = json.loads(data)
    first = len(spec["model"]["vocab"])
    listed = [token for token in spec["added_tokens"] if token["id"] < first]
    spec["added_tokens"] = listed + [{"id": int(id), **token} for id, token in decoder(first).items()]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def tokenizer_model(folder: Path, **config: Any) -> None:
    """Write a tokenizer.model with user-defined chat markers inside, and a tokenizer_config.json with added tokens."""
    proto = ModelProto()
    proto.ParseFromString(trained_pieces())
    for name in MARKERS:
        proto.pieces.add(piece=name, score=0.0, type=proto.SentencePiece.USER_DEFINED)
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    # transformers' class replaces each space by "▁" before it finds normalized tokens, unlike other programs.
    added = decoder(len(proto.pieces), [name for name, flags in ADDED.items() if "normalized" not in flags])
    stated = {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": added, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))


FOLDERS: dict[str, Callable[[Path], None]] = {
    "GPT2Tokenizer": lambda folder: two_files(folder, "GPT2Tokenizer"),
    "GPT2Tokenizer, prefix": lambda folder: two_files(folder, "GPT2Tokenizer", add_prefix_space=True),
    "Qwen2Tokenizer": lambda folder: two_files(folder, "Qwen2Tokenizer"),
    "Qwen2Tokenizer, prefix": lambda folder: two_files(folder, "Qwen2Tokenizer", add_prefix_space=True),
    "GPTNeoXTokenizer": lambda folder: two_files(folder, "GPTNeoXTokenizer"),
    "byte-level": lambda folder: one_file(folder, trained_merges(LLAMA3)),
    "Metaspace": lambda folder: one_file(folder, file_of(LLAMAS, before=[metaspace("first", split=False)]).decode()),
    "tokenizer.model": lambda folder: tokenizer_model(folder, legacy=False),
    "tokenizer.model, legacy": lambda folder: tokenizer_model(folder, legacy=True),
}


def texts_of(names: list[str]) -> st.SearchStrategy[str]:
    """Draw texts that mix names, doubled names, white space, controls, and characters of all of Unicode."""
    name = st.sampled_from(names)
    control = st.sampled_from(["\r\n", "\r", "\0", "\x1c", "\x7f", "\x85", "\u200b", "\ufeff", "▁", "▁▁", "\v", "\f"])
    white = st.sampled_from([" ", "  ", "\n", "\n\n\n", "\t", "\xa0", "\u3000", "\u2028"])
    other = st.text(test_byte_bpe.characters, min_size=1, max_size=3) | st.sampled_from(["a", "she saw", "Größe", "<"])
    return st.lists(name | name.map(lambda name: name * 2) | white | control | other, max_size=8).map("".join)


@cache
def blocks() -> list[str]:
    """List all assigned characters of Unicode in texts of up to 1,024 characters."""
    points = [chr(i) for i in range(FIRST_PRIVATE_PLANE) if unicodedata.category(chr(i)) not in ("Cs", "Cn")]
    return ["".join(points[i : i + 1024]) for i in range(0, len(points), 1024)]


def all_of_unicode(names: list[str]) -> list[str]:
    """Put names into the texts of `blocks`: at the start, doubled in the middle, and at the end after a space."""
    triples = [[names[(i + j) % len(names)] for j in range(3)] for i in range(len(blocks()))]
    return [
        f"{first}{block[:500]}{middle}{middle}{block[500:]} {last}"
        for block, (first, middle, last) in zip(blocks(), triples, strict=True)
    ]


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    FOLDERS[request.param](folder)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module", params=GGUF)
def file(request, tmp_path_factory) -> Path:
    return gguf(tmp_path_factory.mktemp("gguf"), GGUF[request.param])


# A tokenizer.model puts a space in front of a text that begins with one; transformers 5 does not.
starts = st.sampled_from(["a", *MARKERS, "<control>"])


@settings(max_examples=share_of(150), deadline=None)
@given(start=starts, text=texts_of([*ADDED, *MARKERS]))
@example("<control>", "<control_right>\n\na")
@example("a", "<right>    <left>\t\t<control_left>")
@example("a", "²<word>½ <word>\u0301")
@example("<|im_start|>", "<|im_start|> she<|im_end|>\n")
def test_ids_equal_those_of_transformers(transformers, folder, start, text):
    ids = SpecialTokens(load_tokenizer(folder)).encode(start + text)
    assert ids == transformers.transformers(folder, start + text)[0]


def test_ids_of_all_characters_equal_those_of_transformers(transformers, folder):
    special = SpecialTokens(load_tokenizer(folder))
    texts = all_of_unicode(list(ADDED))
    expected = transformers.transformers(folder, *texts)
    assert [i for i, text in enumerate(texts) if special.encode(text) != expected[i]] == []


@settings(max_examples=share_of(150), deadline=None)
@given(text=texts_of([*NAMES, *CONTROLS]))
@example("<|user|>\n\na")
@example("<tool> \n red<|user|>\t\t")
@example("a▁b sawn")
def test_ids_equal_those_of_llama_cpp(llama_cpp, file, text):
    ids = SpecialTokens(load_tokenizer(file)).encode(text)
    assert ids == llama_cpp.llama_cpp(file, text, special=True)[0]


def test_ids_of_all_characters_equal_those_of_llama_cpp(llama_cpp, file):
    special = SpecialTokens(load_tokenizer(file))
    texts = all_of_unicode([*NAMES, *CONTROLS])
    expected = llama_cpp.llama_cpp(file, *texts, special=True)
    assert [i for i, text in enumerate(texts) if special.encode(text) != expected[i]] == []
