"""Unusual folders that transformers loads, and the hints in errors about folders that do not load."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamaspec.model.checkpoints import open_checkpoint
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions
from llamaspec.model.tokenizers.of_model import tokenizer_of
from tests.support import families, tiny_tokenizers

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
    with pytest.raises(CheckpointError, match=r"original_max_position_embeddings is .*, not an integer"):
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


def test_errors_say_what_is_likely(folder):
    tensors = families.random_tensors(CONFIG)

    def message() -> str:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(folder)
        return str(caught.value)

    headless = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    families.write_safetensors(folder / "model.safetensors", headless)
    assert (
        'lacks tensor lm_head.weight; if the model shares it with the embedding, config.json needs "tie_' in message()
    )
    for prefix, program in (("_orig_mod.", "torch.compile"), ("module.", "DistributedDataParallel")):
        renamed = {prefix + name: tensor for name, tensor in tensors.items()}
        families.write_safetensors(folder / "model.safetensors", renamed)
        assert f"the names begin with '{prefix}', as {program} saves them" in message()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert (
        "shards are here, such as model-00001-of-00002.safetensors, but not model.safetensors.index.json" in message()
    )


def test_a_tokenizer_may_have_a_few_tokens_more_than_the_model_has_rows(tmp_path):
    config = CONFIG | {"vocab_size": 258, "bos_token_id": None, "eos_token_id": 257}
    families.write_checkpoint(tmp_path, config)
    special = ("<|endoftext|>", "<|im_end|>", *(f"<image_{i}>" for i in range(16)))
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=special))
    assert tokenizer_of(open_checkpoint(tmp_path), None).vocab == 274
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.chatml(special=(*special, "<image_16>")))
    with pytest.raises(CheckpointError, match=r"a vocabulary of 275 tokens, but the model .* has 258"):
        tokenizer_of(open_checkpoint(tmp_path), None)
