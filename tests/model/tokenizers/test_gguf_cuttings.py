"""Byte-level tokenizers of GGUF files split a text by the pre-tokenizer that the file names, as llama.cpp does."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from llamaspec.model.tokenizers.gguf_cuttings import CUTTINGS
from llamaspec.model.tokenizers.load import load_tokenizer
from tests.support import gguf_files
from tests.support.gguf_files import STRING, U32, File

FRAGMENTS = [
    *("Once upon", " a time", "she", "'ll", "'LL", "'s", "’s", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n"),
    *(
        "1",
        "12",
        "123",
        "1234567",
        "3.14",
        "a1b2",
        "HELLO",
        "World",
        "camelCase",
        "été",
        "好",
        "世界",
        "カタカナ",
        "한국어",
    ),
    *(
        ".",
        ",",
        "!?",
        "...",
        "(x)",
        "[y]",
        "{z}",
        "<a>",
        "+",
        "=",
        "$5",
        "^",
        "~",
        "|",
        "`",
        "“q”",
        "。",
        "，",
        "、",
        "-",
    ),
    *("—", "_", "/", "//", "👋", "\u00a0", "हिन्दी", "ไทย", "٣٤", "½", "Ⅷ", "।"),
]
# Texts that llama.cpp splits differently: see the docstring of the module under test.
DIFFERENT_TEXTS = {
    "gpt-4o llama4 kanana2 minimax-m2 tekken": {"हिन्दी", "ไทย", "été"},
    "deepseek-llm deepseek-coder": {"\u3000"},
}
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=6)


@cache
def vocabulary() -> dict[str, Any]:
    """Train merges on unsplit texts, so that every way of splitting a text changes its ids."""
    corpus = [a + b + c for a in FRAGMENTS for b in FRAGMENTS for c in FRAGMENTS[::7]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    sizes: dict[str, Any] = {"vocab_size": 4000, "max_token_length": 12}
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False, **sizes))
    return json.loads(tokenizer.to_str()) | {"added_tokens": []}


def pieces(name: str, text: str) -> list[str]:
    """Split a text with the tokenizers library by the pre-tokenizer `name`."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in CUTTINGS[name].patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3", ["The", " fox", "\n\n", "123", "45", " don", "'t", " WE", "'LL", " x", "++"]),
        ("stablelm2", ["The", " fox", "\n\n", "1", "2", "3", "4", "5", " don", "'t", " WE", "'LL", " x", "++"]),
        ("exaone4", ["The", " fox", "\n", "\n", "12345", " don", "'t", " WE", "'", "LL", " x", "++"]),
        ("refact", ["The", " fox", "\n\n", "1", "2", "3", "4", "5", " don", "'t", " WE", "'", "LL", " x", "++"]),
        ("gpt-4o", ["The", " fox", "\n\n", "123", "45", " don't", " WE'LL", " x", "++"]),
        ("default", ["The", " fox", "\n", "\n", "123", "45", " don", "'", "t", " WE", "'", "LL", " x", "++"]),
        ("deepseek-coder", ["The", " fox", "\n", "\n", *"12345", " don", "'", "t", " WE", "'", "LL", " x", "++"]),
        ("falcon", ["The", " fox", "\n", "\n", "123", "45", " don", "'", "t", " WE", "'", "LL", " x", "++"]),
    ],
)
def test_a_text_is_cut_as_the_name_says(name, expected):
    assert pieces(name, "The fox\n\n12345 don't WE'LL x++") == expected


def test_the_first_of_names_with_the_same_patterns_is_written():
    first: dict[tuple[str, ...], str] = {}
    for name, cutting in CUTTINGS.items():
        first.setdefault(cutting.patterns, name)
    assert {"llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "gpt-4o", "default"} <= {*first.values()}


@pytest.mark.parametrize("name", CUTTINGS)
def test_a_file_of_each_name_is_read(tmp_path, name):
    text = "Once 1234 she'll, 世界!"
    tokenizer = load_tokenizer(write(tmp_path, name))
    assert b"".join(map(tokenizer.bytes_of, tokenizer.encode(text))).decode() == text


def write(folder: Path, name: str) -> Path:
    keys = {"general.architecture": (STRING, "llama"), "tokenizer.ggml.bos_token_id": (U32, 1)}
    return File(keys | gguf_files.byte_level_keys(vocabulary(), pre=name), {}).write(folder / "x.gguf")


@pytest.fixture(scope="module", params=CUTTINGS)
def file(request, tmp_path_factory) -> tuple[str, Path]:
    return request.param, write(tmp_path_factory.mktemp("gguf"), request.param)


@settings(max_examples=50)
@given(fragments=texts)
def test_ids_are_those_of_llama_cpp(llama_cpp, file, fragments):
    name, path = file
    also_known = next((known for names, known in DIFFERENT_TEXTS.items() if name in names.split()), set())
    text = "".join(fragment for fragment in fragments if fragment not in also_known)
    assert loaded(path).encode(text) == llama_cpp.llama_cpp(path, text)[0]


@cache
def loaded(path: Path) -> Any:
    return load_tokenizer(path)
