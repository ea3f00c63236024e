"""Unusual folders that transformers loads, and the hints in errors about folders that do not load."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from llamaspec.model.checkpoints import open_checkpoint
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.llama import load, load_backend
from llamaspec.model.options import RunOptions
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.of_model import fitted_if_any, tokenizer_of
from llamaspec.model.tokenizers.tokenizer import Tokenizer, decode
from tests.reference import test_sentencepiece_bpe
from tests.support import families, processes, tiny_tokenizers

CONFIG = families.FAMILIES["llama-3.1"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    families.write_checkpoint(tmp_path, CONFIG)
    return tmp_path


def logits(folder: Path) -> np.ndarray:
    return load_backend(open_checkpoint(folder), RunOptions(backend="reference")).logits([5, 7, 9, 11])


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_json_may_have_a_byte_order_mark_and_a_key_twice(folder):
    expected = logits(folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + text.replace("{", '{"vocab_size": 7,', 1).encode())
    (folder / "generation_config.json").write_bytes(b'\xef\xbb\xbf{"eos_token_id": 3, "eos_token_id": 4}')
    np.testing.assert_array_equal(logits(folder), expected)
    assert open_checkpoint(folder).stops == {4}


@pytest.mark.parametrize(("ids", "stops"), [(99999, set()), ([7, 99999], {7}), (-1, set())])
def test_an_end_that_the_model_cannot_write_does_not_count(folder, ids, stops):
    change(folder, eos_token_id=ids)
    assert open_checkpoint(folder).stops == stops


def test_a_whole_number_may_be_written_as_a_float(folder):
    expected = logits(folder)
    key = next(key for key in ("rope_scaling", "rope_parameters") if key in CONFIG)
    original = CONFIG[key]["original_max_position_embeddings"]
    change(folder, **{key: CONFIG[key] | {"original_max_position_embeddings": float(original)}})
    np.testing.assert_array_equal(logits(folder), expected)
    change(folder, **{key: CONFIG[key] | {"original_max_position_embeddings": original + 0.5}})
    with pytest.raises(CheckpointError, match=r"original_max_position_embeddings is .*expected an integer"):
        open_checkpoint(folder)


@pytest.mark.parametrize("family", ["llama-3.1", "qwen3"])
def test_float64_is_rounded_to_float32(tmp_path, monkeypatch, family):
    config = families.FAMILIES[family]
    families.write_checkpoint(tmp_path, config)
    expected = logits(tmp_path)
    tensors = families.random_tensors(config)
    monkeypatch.setitem(families.CODES, "float64", "F64")
    doubled = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    families.write_safetensors(tmp_path / "model.safetensors", doubled)
    np.testing.assert_array_equal(logits(tmp_path), expected)
    largest = {name: np.full_like(tensor, 1e300) for name, tensor in doubled.items()}
    families.write_safetensors(tmp_path / "model.safetensors", largest)
    with pytest.raises(CheckpointError, match=r"not finite|infinite|inf"):
        logits(tmp_path)


EXTRA = {
    "a value head": ["v_head.summary.weight", "v_head.summary.bias"],
    "another layer": ["model.layers.2.input_layernorm.weight", "model.layers.2.mlp.up_proj.weight"],
    "frequencies of RoPE": ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"],
    "a table of RoPE": ["model.layers.1.self_attn.rotary_emb.cos_cached"],
    "masks": ["model.layers.0.attn.bias", "model.layers.1.self_attn.masked_bias"],
    "many": [f"other.{i}" for i in range(5)],
    "an odd name": ["../../etc/passwd\n"],
}


@pytest.mark.parametrize("names", EXTRA.values(), ids=EXTRA)
def test_tensors_that_the_model_does_not_have_are_left_out_and_named(folder, names):
    """Extra tensors are left out, as in transformers, and one line names up to three of them."""
    expected = logits(folder)
    extra = {name: np.ones(4, np.float32) for name in names}
    families.write_safetensors(folder / "model.safetensors", families.random_tensors(CONFIG) | extra)
    np.testing.assert_array_equal(logits(folder), expected)
    (note,) = open_checkpoint(folder).notes
    assert note.startswith(f"{folder}: {len(names)} tensor") and note.isprintable()
    listed = sorted(names)[:3] if len(names) > 3 else names
    assert all(repr(name) in note for name in listed)
    assert (f" and {len(names) - 3} more" in note) == (len(names) > 3)


def test_fewer_layers_than_the_files_have(folder):
    change(folder, num_hidden_layers=1)
    (note,) = open_checkpoint(folder).notes
    assert "9 tensors are ignored" in note and "'model.layers.1.input_layernorm.weight'" in note


def test_a_command_prints_one_line_about_the_tensors_it_leaves_out(folder):
    extra = {"v_head.weight": np.ones(4, np.float32)}
    families.write_safetensors(folder / "model.safetensors", families.random_tensors(CONFIG) | extra)
    written = processes.run_llamaspec(
        "logits", "--tokens", "5,7", "--out", str(folder / "x.npy"), "--model", str(folder)
    )
    assert [line for line in written.err.splitlines() if "v_head" in line] == [*open_checkpoint(folder).notes]


@pytest.mark.parametrize(
    ("tied", "name"), [(False, "lm_head"), (False, "model.embed_tokens"), (True, "model.embed_tokens")]
)
def test_rows_that_no_token_uses_may_hold_anything(tmp_path, tied, name):
    """Rows of the embedding or the head beyond the tokenizer's tokens may hold a NaN.

    We read the NaN as 0, and a note says so.
    """
    config = CONFIG | {"vocab_size": 260, "bos_token_id": None, "eos_token_id": 257, "tie_word_embeddings": tied}
    tensors = families.random_tensors(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=("<|endoftext|>", "<|im_end|>")))

    def write(row: int, number: float) -> None:
        matrix = tensors[f"{name}.weight"].copy()
        matrix[row, 3] = number
        families.write_safetensors(tmp_path / "model.safetensors", tensors | {f"{name}.weight": matrix})

    def run() -> tuple[np.ndarray, tuple[str, ...]]:
        checkpoint = fitted_if_any(open_checkpoint(tmp_path), None)
        return load_backend(checkpoint, RunOptions(backend="reference")).logits([5, 7, 9, 11]), checkpoint.notes

    write(0, float(tensors[f"{name}.weight"][0, 3]))
    expected, no_notes = run()
    assert no_notes == ()
    write(259, float("nan"))
    actual, (note,) = run()
    np.testing.assert_array_equal(actual[:, :258], expected[:, :258])
    assert f"1 row that no token uses of {name}.weight, from row 259 on" in note
    write(257, float("inf"))
    with pytest.raises(CheckpointError, match=r"\[257, 3\].*inf"):
        run()


ENDS: dict[str, tuple[dict[str, Any], set[int]]] = {
    "another token": ({"eos_token": "<|im_end|>"}, {256, 257}),
    "the same token": ({"eos_token": "<|endoftext|>"}, {256}),
    "no token": ({"eos_token": None}, {256}),
    "a token beyond the model's rows": ({"eos_token": "<|im_start|>"}, {256}),
    "no file": ({}, {256}),
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_text_also_ends_at_the_tokenizers_own_end(tmp_path, kind):
    """`generate` stops at the eos_token of the tokenizer's files, even if config.json names only a different id."""
    config, expected = ENDS[kind]
    families.write_checkpoint(tmp_path, CONFIG | {"vocab_size": 258, "bos_token_id": None, "eos_token_id": 256})
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(("<|endoftext|>", "<|im_end|>", "<|im_start|>")))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load(tmp_path, backend="reference").stops == expected


def test_a_tokenizer_model_has_its_own_end(tmp_path):
    families.write_checkpoint(tmp_path, CONFIG | {"vocab_size": 450, "bos_token_id": 1, "eos_token_id": 7})
    (tmp_path / "tokenizer.model").write_bytes(test_sentencepiece_bpe.train())
    assert load(tmp_path, backend="reference").stops == {2, 7}


TWO_FILES = {
    "GPT2Tokenizer": ({"tokenizer_class": "GPT2Tokenizer"}, {}),
    "Qwen2Tokenizer": ({"tokenizer_class": "Qwen2TokenizerFast"}, {}),
    "GPTNeoXTokenizer": ({"tokenizer_class": "GPTNeoXTokenizer"}, {}),
    "by the model's type": ({}, {"model_type": "qwen3"}),
    "with a prefix": ({"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}, {}),
}


@pytest.mark.parametrize("kind", TWO_FILES)
def test_a_tokenizer_may_be_a_vocab_and_merges(tmp_path, kind):
    """vocab.json and merges.txt give the same ids as the tokenizer class of the model.

    tokenizer_config.json names the class; otherwise the model's type decides.
    """
    config, model = TWO_FILES[kind]
    tokenizer = write_two_files(tmp_path, config, model)
    text = "she's 12 Cafe\u0301  \n<|endoftext|>"
    cut = {"GPT2Tokenizer": "Ġ12", "GPTNeoXTokenizer": "Ġ12", "with a prefix": "Ġ12"}.get(kind, "1")
    pieces = [tokenizer.piece(id) for id in tokenizer.encode(text)]
    assert cut in pieces and ("Ã©" in "".join(pieces)) == (kind not in ("GPT2Tokenizer", "with a prefix"))
    assert tokenizer.special["<|endoftext|>"] not in tokenizer.encode(text)
    assert tokenizer.bos is None and tokenizer.eos == tokenizer.special["<|endoftext|>"]
    begins = decode(tokenizer, tokenizer.encode("she"))
    assert begins == (" she" if kind == "with a prefix" else "she")


def write_two_files(folder: Path, config: dict[str, Any], model: dict[str, Any]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "Ġ 12", "Ã ©", "s h", "sh e"]
    names = [*alphabet, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({name: id for id, name in enumerate(names)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(model))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("merges.txt", b"1 2\n1 2 3\n", 'merges.txt: line 2 is "1 2 3", expected two tokens'),
        ("merges.txt", b"1 2\n\xff 3\n", "is not valid UTF-8: byte 4 is 0xff"),
        ("merges.txt", b"1 3\n", r'a merge in model\.merges makes "13", which is not in'),
        ("vocab.json", b'{"a": 0, "a": 1}', 'the key "a" appears twice'),
        ("vocab.json", b"{", "is not JSON"),
        ("tokenizer_config.json", b"{}", "config.json: has no tokenizer_class, expected one of GPT2Tokenizer,"),
        ("tokenizer_config.json", b'{"tokenizer_class": "XTokenizer"}', 'has tokenizer_class "XTokenizer", expected'),
    ],
)
def test_a_vocab_and_merges_that_cannot_be_used(tmp_path, name, content, what):
    write_two_files(tmp_path, {"tokenizer_class": "GPT2Tokenizer"}, {})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=what) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).isprintable() and str(caught.value).startswith(str(tmp_path))


def test_errors_say_what_is_likely(folder):
    tensors = families.random_tensors(CONFIG)

    def message() -> str:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(folder)
        return str(caught.value)

    headless = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    families.write_safetensors(folder / "model.safetensors", headless)
    assert "lacks the tensor lm_head.weight; if the embedding is also the output matrix, " in message()
    for prefix, program in (("_orig_mod.", "torch.compile"), ("module.", "DistributedDataParallel")):
        renamed = {prefix + name: tensor for name, tensor in tensors.items()}
        families.write_safetensors(folder / "model.safetensors", renamed)
        assert f"have the prefix '{prefix}', which {program} adds" in message()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert (
        "has shards, such as model-00001-of-00002.safetensors, but not their index, model.safetensors.index.json"
        in message()
    )


def test_a_tokenizer_may_have_a_few_tokens_more_than_the_model_has_rows(tmp_path):
    config = CONFIG | {"vocab_size": 258, "bos_token_id": None, "eos_token_id": 257}
    families.write_checkpoint(tmp_path, config)
    special = ("<|endoftext|>", "<|im_end|>", *(f"<image_{i}>" for i in range(16)))
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=special))
    assert tokenizer_of(open_checkpoint(tmp_path), None).vocab == 274
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=(*special, "<image_16>")))
    with pytest.raises(CheckpointError, match=r"tokenizer.*\b275\b.*\b258\b"):
        tokenizer_of(open_checkpoint(tmp_path), None)
