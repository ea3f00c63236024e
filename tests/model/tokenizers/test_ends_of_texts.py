"""Tokens after a text: `add_eos_token` of tokenizer_config.json, post-processors, and conversions of both.

We compare with transformers and llama.cpp if LLAMASPEC_OTHER_PYTHON names a Python that has them.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamaspec.model.checkpoints import CheckpointError, open_checkpoint
from llamaspec.model.convert import convert
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tokenizer import encode_text
from llamaspec.reference.byte_bpe import LLAMA3
from tests.model.tokenizers.test_added_everywhere import two_files
from tests.model.tokenizers.test_gguf_tokenizers import trained_merges, trained_pieces
from tests.support import families

NAMES = ("<s>", "</s>", "<|im_end|>")
FLAGS = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
TEXT = "she saw"


def config_of(folder: Path, kind: str, **config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **config}))
    (folder / "config.json").write_text("{}")


def pieces(folder: Path, **config: Any) -> None:
    (folder / "tokenizer.model").write_bytes(trained_pieces())
    config_of(folder, "LlamaTokenizer", add_bos_token=True, **config)


def ranks(folder: Path, **config: Any) -> None:
    """Write a tokenizer.model with a rank for each byte, and its control tokens BOS and EOS."""
    lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "tokenizer.model").write_text("".join(lines))
    names = ("<|begin_of_text|>", "<|end_of_text|>")
    added = {str(256 + i): {"content": name, "special": True, **FLAGS} for i, name in enumerate(names)}
    stated = {"bos_token": names[0], "eos_token": names[1], "add_bos_token": True, "added_tokens_decoder": added}
    config_of(folder, "LlamaTokenizer", **stated | config)


def merges(folder: Path, **config: Any) -> None:
    two_files(folder, "Qwen2Tokenizer", **config)
    (folder / "config.json").write_text("{}")


def one_file(folder: Path, before: tuple[str, ...] = (), after: tuple[str, ...] = (), **config: Any) -> None:
    """Write a tokenizer.json with a post_processor that puts tokens before and after a text."""
    spec = json.loads(trained_merges(LLAMA3))
    ids = {name: len(spec["model"]["vocab"]) + i for i, name in enumerate(NAMES)}
    spec["added_tokens"] = [{"id": id, "content": name, "special": True, **FLAGS} for name, id in ids.items()]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    begin, end = ([{"SpecialToken": {"id": name, "type_id": 0}} for name in names] for names in (before, after))
    both = [*begin, text, {"Sequence": {"id": "B", "type_id": 1}}, *end]
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*begin, text, *end],
        "pair": both,
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in {*before, *after}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    config_of(folder, "PreTrainedTokenizerFast", **{"bos_token": "<s>", "eos_token": "</s>"} | config)


BOTH = {"before": ("<s>",), "after": ("</s>",)}
# how to write a folder, and the names of the tokens that follow a text
FOLDERS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "pieces": (lambda folder: pieces(folder, add_eos_token=True), ["</s>"]),
    "pieces, another end": (lambda folder: pieces(folder, add_eos_token=True, eos_token="<unk>"), ["<unk>"]),
    "pieces, false": (lambda folder: pieces(folder, add_eos_token=False), []),
    "pieces, null": (lambda folder: pieces(folder, add_eos_token=None), []),
    "pieces, no end": (lambda folder: pieces(folder, add_eos_token=True, eos_token=None), []),
    "ranks": (lambda folder: ranks(folder, add_eos_token=True), ["<|end_of_text|>"]),
    "ranks, absent": (ranks, []),
    "merges": (lambda folder: merges(folder, add_eos_token=True), ["<control>"]),
    "merges, absent": (merges, []),
    "one file": (lambda folder: one_file(folder, **BOTH), ["</s>"]),
    "one file, false": (lambda folder: one_file(folder, **BOTH, add_eos_token=False), ["</s>"]),
    "one file, another token": (lambda folder: one_file(folder, after=("<|im_end|>",)), ["<|im_end|>"]),
}
# transformers ignores add_eos_token next to a tokenizer.json; llama.cpp's converter does not.
STATED_ONLY = {"before": ("<s>",), "add_eos_token": True}


def ends(folder: Path) -> list[str]:
    tokenizer = load_tokenizer(folder)
    return [tokenizer.piece(id) for id in tokenizer.appended]


@pytest.mark.parametrize("kind", FOLDERS)
def test_files_state_what_follows_a_text(tmp_path, kind):
    write, expected = FOLDERS[kind]
    write(tmp_path)
    assert ends(tmp_path) == expected


@pytest.mark.parametrize("kind", FOLDERS)
def test_ids_of_whole_texts_equal_those_of_transformers(tmp_path, transformers, kind):
    FOLDERS[kind][0](tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    expected = transformers.transformers(tmp_path, TEXT, ends=True)[0]
    assert [*encode_text(tokenizer, TEXT), *tokenizer.appended] == expected


def test_the_key_counts_next_to_a_post_processor_that_appends_nothing(tmp_path):
    one_file(tmp_path, **STATED_ONLY)
    assert ends(tmp_path) == ["</s>"]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"add_eos_token": "yes"}, 'add_eos_token is "yes", expected true or false'),
        ({"add_eos_token": True, "eos_token": "<x>"}, r'the vocabulary has no token "<x>" \(eos_token\)'),
    ],
)
def test_an_end_that_cannot_be_used_is_refused(tmp_path, config, what):
    pieces(tmp_path, **config)
    with pytest.raises(CheckpointError, match=what):
        load_tokenizer(tmp_path)


CONVERTED: dict[str, Callable[[Path], None]] = {
    "pieces": lambda folder: pieces(folder, add_eos_token=True),
    "ranks": lambda folder: ranks(folder, add_eos_token=True),
    "one file": lambda folder: one_file(folder, **BOTH),
    "one file, stated only": lambda folder: one_file(folder, **STATED_ONLY),
    "one file, another token": lambda folder: one_file(folder, after=("<|im_end|>",)),
    "nothing": lambda folder: one_file(folder, before=("<s>",)),
}


def there_and_back(folder: Path, kind: str) -> tuple[Path, Path, Path]:
    """Write a model with a tokenizer, convert it to GGUF, and convert the GGUF file to a folder; return all paths."""
    paths = source, file, back = folder / "x", folder / "x.gguf", folder / "back"
    source.mkdir()
    CONVERTED[kind](source)
    tokenizer = load_tokenizer(source)
    config = {**families.FAMILIES["llama-3.1"], "vocab_size": tokenizer.vocab, "eos_token_id": tokenizer.eos}
    families.write_checkpoint(source, config)
    convert(open_checkpoint(source), file, to="gguf")
    convert(open_checkpoint(file), back, to="safetensors")
    return paths


@pytest.mark.parametrize("kind", CONVERTED)
def test_what_follows_a_text_stays_in_both_directions(tmp_path, kind):
    """The token after a text becomes GGUF's EOS, as in llama.cpp's converter."""
    first, file, back = there_and_back(tmp_path, kind)
    before = load_tokenizer(first)
    for path in (file, back):
        assert load_tokenizer(path).appended == before.appended
        assert open_checkpoint(path).stops >= open_checkpoint(first).stops | {*before.appended}


@pytest.mark.parametrize("kind", CONVERTED)
def test_others_append_the_same_token_to_converted_files(tmp_path, transformers, llama_cpp, kind):
    first, file, back = there_and_back(tmp_path, kind)
    before = load_tokenizer(first)
    expected = [*encode_text(before, TEXT), *before.appended]
    assert llama_cpp.llama_cpp(file, TEXT, ends=True)[0] == expected
    assert transformers.transformers(back, TEXT, ends=True)[0] == expected
