"""GGUF files that we write are read back as the same model, and equal the files of an independent writer."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaspec.model.chat.template import find_template
from llamaspec.model.checkpoints import Checkpoint, CheckpointError, Tensor, open_checkpoint
from llamaspec.model.checkpoints.gguf.file import read_header
from llamaspec.model.checkpoints.gguf.mixtures import MIXTURES, wanted_type
from llamaspec.model.checkpoints.gguf.write import write_gguf
from llamaspec.model.checkpoints.mapped import MappedFile
from llamaspec.model.tokenizers.gguf_writer import vocabulary_keys
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.tokenizer import Tokenizer
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers import ggml
from llamaspec.reference.rope import LinearScaling, Llama3Scaling
from tests.model.checkpoints.gguf.test_gguf import READABLE
from tests.model.tokenizers.test_gguf_tokenizers import texts
from tests.model.tokenizers.test_tokenizers import folder  # noqa: F401  the fixture: a tokenizer of each kind
from tests.support import families, gguf_files
from tests.support.random_models import SMALL, random_checkpoint

WIDE = replace(SMALL, dim=64, ffn=96, head_dim=16)


def source(directory: Path, family: str, dtype: str = "float32") -> Checkpoint:
    directory.mkdir(exist_ok=True)
    families.write_checkpoint(directory, families.FAMILIES[family], dtype=dtype)
    return open_checkpoint(directory)


def raw_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    file = MappedFile(path)
    entries = read_header(file).tensors
    return {
        name: (entry.shape, entry.type, file.bytes(entry.offset, entry.offset + entry.bytes))
        for name, entry in entries.items()
    }


@pytest.mark.sampled(18)  # 36 cases, 2 s
@pytest.mark.parametrize("dtype", families.DTYPES)
@pytest.mark.parametrize("family", READABLE)
def test_a_model_goes_there_and_back(tmp_path, family, dtype):
    first = source(tmp_path / "hf", family, dtype)
    assert write_gguf(first, tmp_path / "x.gguf", vocabulary=vocabulary_keys(first, None)) == ({}, [])
    second = open_checkpoint(tmp_path / "x.gguf")
    assert (second.config, second.bos, second.stops) == (first.config, first.bos, first.stops)
    for name, tensor in first.tensors.items():
        stored = families.DTYPES[dtype] if len(tensor.shape) > 1 and ".gate.weight" not in name else np.float32
        assert second.tensors[name].dtype == np.dtype(stored)
        np.testing.assert_array_equal(second.tensors[name].read(), tensor.read().astype(stored), err_msg=name)


@pytest.mark.parametrize("family", READABLE)
def test_the_tensors_are_those_of_another_writer(tmp_path, family):
    checkpoint = source(tmp_path / "hf", family)
    write_gguf(checkpoint, tmp_path / "ours.gguf")
    tensors = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    gguf_files.file_of(families.FAMILIES[family], tensors).write(tmp_path / "theirs.gguf")
    actual, expected = raw_tensors(tmp_path / "ours.gguf"), raw_tensors(tmp_path / "theirs.gguf")
    for raw in (actual, expected):  # we compute these in float64, the other writer in float32
        raw.pop("rope_freqs.weight", None)
    assert actual == expected


def written(checkpoint: Checkpoint, path: Path, to: str) -> dict[str, str]:
    """Write a GGUF file with matrices in the format `to`; return the types of the written tensors by name.

    The result also has the key `left`: the names of the matrices that do not divide into blocks of `to`, in one string.
    """
    leftover = write_gguf(checkpoint, path, to=to).other_types
    types = {name: kind for name, (_, kind, _) in raw_tensors(path).items()}
    return types | {"left": " ".join(leftover)}


KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "mxfp4": "MXFP4"}


@pytest.mark.parametrize(("to", "kind"), KINDS.items())
@pytest.mark.parametrize("tied", [False, True])
def test_matrices_become_what_was_asked_for(tmp_path, to, kind, tied):
    checkpoint = random_checkpoint(replace(WIDE, tied=tied), seed=0)
    types = written(checkpoint, tmp_path / "x.gguf", to)
    head = "token_embd.weight" if tied else "output.weight"
    assert types.pop(head) == ("Q8_0" if kind in ("Q4_0", "MXFP4") else kind)
    assert types.pop("left") == ""
    for name, actual in types.items():
        assert actual == ("F32" if "norm" in name else kind), name
    up, stored = "model.layers.1.mlp.up_proj.weight", open_checkpoint(tmp_path / "x.gguf").tensors
    weights = checkpoint.tensors[up].read()
    if kind in ggml.TYPES:
        expected = ggml.decode(ggml.encode(weights, kind), kind).astype(np.float32)
    else:
        expected = weights.astype(gguf_files.DTYPES[kind])
    np.testing.assert_array_equal(stored[up].read(), expected)


def test_a_matrix_of_no_whole_blocks_stays_as_it_is(tmp_path):
    checkpoint = random_checkpoint(replace(WIDE, ffn=72), seed=0)
    types = written(checkpoint, tmp_path / "x.gguf", "q8_0")
    assert types["left"] == "blk.0.ffn_down.weight blk.1.ffn_down.weight"
    assert types["blk.1.ffn_down.weight"] == "F32"
    assert types["blk.1.ffn_up.weight"] == "Q8_0"


def test_experts_share_a_tensor_and_routers_stay_float32(tmp_path):
    checkpoint = random_checkpoint(replace(WIDE, experts=4, experts_per_token=2), seed=0)
    types = written(checkpoint, tmp_path / "x.gguf", "q4_0")
    assert types["blk.0.ffn_gate_inp.weight"] == "F32"
    assert types["blk.0.ffn_gate_exps.weight"] == "Q4_0"
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    expected = ggml.decode(ggml.encode(checkpoint.tensors[name].read(), "Q4_0"), "Q4_0").astype(np.float32)
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "x.gguf").tensors[name].read(), expected)


MIXED = replace(SMALL, dim=256, ffn=256, layers=9, heads=4, kv_heads=1, head_dim=64, vocab=32)


@pytest.mark.parametrize("to", MIXTURES)
def test_mixtures_have_their_types_and_bytes(tmp_path, to):
    checkpoint = random_checkpoint(MIXED, seed=0)
    assert write_gguf(checkpoint, tmp_path / "x.gguf", to=to) == ({}, [])
    metadata = read_header(MappedFile(tmp_path / "x.gguf")).metadata
    assert metadata.integer("general.file_type") == MIXTURES[to].file_type
    stored, tensors = raw_tensors(tmp_path / "x.gguf"), open_checkpoint(tmp_path / "x.gguf").tensors
    facts = {"mixture": MIXTURES[to], "architecture": "llama", "config": MIXED}
    for name, own in (("blk.0.ffn_down", "layers.0.mlp.down_proj"), ("blk.4.attn_v", "layers.4.self_attn.v_proj")):
        w, kind = checkpoint.tensors[f"model.{own}.weight"].read(), wanted_type(f"{name}.weight", **facts)
        assert stored[f"{name}.weight"] == (w.shape, kind, ggml.encode(w, kind).tobytes())
        np.testing.assert_array_equal(tensors[f"model.{own}.weight"].read(), ggml.decode(ggml.encode(w, kind), kind))


def test_rows_of_other_lengths_get_other_types(tmp_path):
    checkpoint = random_checkpoint(replace(MIXED, layers=1, dim=96, ffn=72), seed=0)
    other_types = write_gguf(checkpoint, tmp_path / "x.gguf", to="q4_k_m").other_types
    assert other_types["output.weight"] == "Q8_0" and other_types["blk.0.attn_q.weight"] == "Q5_0"
    assert other_types["blk.0.ffn_down.weight"] == "F16"
    types = {name: kind for name, (_, kind, _) in raw_tensors(tmp_path / "x.gguf").items() if kind != "F32"}
    assert types == other_types | {"blk.0.attn_output.weight": "Q4_K"}


def test_rows_are_encoded_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("llamaspec.model.checkpoints.gguf.write.AT_ONCE", 1500)
    test_matrices_become_what_was_asked_for(tmp_path, "q4_0", "Q4_0", False)


def test_progress_adds_up(tmp_path):
    checkpoint = random_checkpoint(replace(WIDE, experts=2, experts_per_token=1), seed=0)
    reported: dict[str, int] = {}
    write_gguf(checkpoint, tmp_path / "x.gguf", to="q8_0", progress=reported.__setitem__)
    assert reported == {name: tensor.bytes for name, tensor in checkpoint.tensors.items()}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (replace(SMALL, windows=(3, None)), "llama does not support sliding windows"),
        (replace(SMALL, qk_norm=True, qkv_bias=True), "qwen2 does not support norms of q and k"),
        (replace(SMALL, qk_norm=True, qkv_bias=True, o_bias=True), "qwen3 does not support biases"),
        (replace(SMALL, qkv_bias=True, ffn_bias=True), "qwen2 does not support biases"),
        (replace(SMALL, qk_norm=True, qkv_bias=True, o_bias=True, experts=2, experts_per_token=1), "qwen3moe does not"),
        (
            replace(SMALL, qk_norm=True, experts=2, experts_per_token=1, renormalize_experts=False),
            "qwen3moe does not support experts with weights that do not sum to 1",
        ),
        (replace(SMALL, qkv_bias=True, scaling=Llama3Scaling(8.0, 1.0, 4.0, 16)), "qwen2 does not support Llama 3's"),
    ],
)
def test_what_llama_cpp_does_not_know_is_refused(tmp_path, config, what):
    with pytest.raises(CheckpointError, match=what):
        write_gguf(random_checkpoint(config, seed=0), tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "value", "what"),
    [("float16", 1e5, "100000.0, .* F16"), ("bfloat16", 3.4e38, "for BF16"), ("q8_0", 1e8, "as Q8_0")],
)
def test_weights_beyond_a_type_are_refused(tmp_path, to, value, what):
    checkpoint = random_checkpoint(WIDE, seed=0)
    name = "model.layers.1.mlp.up_proj.weight"
    array = checkpoint.tensors[name].read().copy()
    array[3, 5] = value
    changed = replace(checkpoint, tensors={**checkpoint.tensors, name: Tensor(array.shape, array.dtype, lambda: array)})
    with pytest.raises(CheckpointError, match=what):
        write_gguf(changed, tmp_path / "x.gguf", to=to)
    assert not list(tmp_path.iterdir())


def test_a_type_that_there_is_not(tmp_path):
    with pytest.raises(ValueError, match=r"type 'q3' is unknown.*float32"):
        write_gguf(random_checkpoint(SMALL, seed=0), tmp_path / "x.gguf", to="q3")


def with_tokenizer(path: Path, tokenizer: Tokenizer, *, more: int = 0, **changes) -> Path:
    """Write a small model with the tokenizer's vocabulary, and with `more` rows of the embedding that have no token.

    `changes` replace fields of the checkpoint.
    """
    config: Config = replace(SMALL, dim=8, layers=1, heads=1, kv_heads=1, ffn=4, vocab=tokenizer.vocab + more)
    checkpoint = replace(random_checkpoint(config, seed=0), **changes)
    templates = {"default": "{{ messages }}", "tool-use": "{{ tools }}"}
    write_gguf(checkpoint, path, vocabulary=vocabulary_keys(checkpoint, tokenizer, templates))
    return path


TOKENIZERS = ["sentencepiece", "llama2c", "prepend", "metaspace", "llama3", "byte-level", "byte-level-bos"]


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer_pair(request, folder, tmp_path_factory) -> tuple[Tokenizer, Tokenizer]:  # noqa: F811
    before = load_tokenizer(folder / request.param)
    path = with_tokenizer(tmp_path_factory.mktemp("written") / "x.gguf", before, more=3)
    return before, load_tokenizer(path)


@given(text=texts, start=st.booleans())
def test_a_tokenizer_goes_there_and_back(tokenizer_pair, text, start):
    before, after = tokenizer_pair
    if start and before.encode(" a") == before.encode("a"):  # Metaspace merges these spaces, which GGUF cannot express
        text = text.lstrip(" ")
    assert after.encode(text, start=start) == before.encode(text, start=start)


def test_its_tokens_do_too(tokenizer_pair):
    before, after = tokenizer_pair
    assert (after.vocab, after.special, after.bos) == (before.vocab + 3, before.special, before.bos)
    assert after.dummy_prefix == before.dummy_prefix
    for token in range(before.vocab):
        if before.piece(token) == "<unk>":  # SentencePiece prints it, the tokenizers library does not
            continue
        assert after.bytes_of(token) == before.bytes_of(token)  # `piece` may spell the token in other characters


def stored_ids(path: Path) -> dict[str, int]:
    metadata = read_header(MappedFile(path)).metadata
    keys = {name: f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom")}
    return {name: metadata.integer(key) for name, key in keys.items() if key in metadata}


def test_what_ends_a_text_keeps_its_name(tmp_path, folder):  # noqa: F811
    llama3, llama2 = load_tokenizer(folder / "llama3"), load_tokenizer(folder / "sentencepiece")
    ends = {name: llama3.special[f"<|{name}|>"] for name in ("end_of_text", "eom_id", "eot_id")}
    path = with_tokenizer(tmp_path / "3.gguf", llama3, stops=frozenset(ends.values()))
    expected = {"bos": 450, "eos": ends["end_of_text"], "eot": ends["eot_id"], "eom": ends["eom_id"]}
    assert stored_ids(path) == expected
    path = with_tokenizer(tmp_path / "chat.gguf", llama3, stops=frozenset({ends["eot_id"]}))
    assert stored_ids(path) == {"bos": 450, "eos": ends["eot_id"]}
    # In a llama2.c text, BOS is also an end.
    path = with_tokenizer(tmp_path / "2.gguf", llama2, stops=frozenset({1, 2}))
    assert stored_ids(path) == {"bos": 1, "eos": 2, "eot": 1}
    # llama.cpp knows no end of a text by the names of 3 to 6, so the keys would have to name all four.
    with pytest.raises(CheckpointError, match="random: the model has 4 end tokens, but GGUF"):
        with_tokenizer(tmp_path / "4.gguf", llama2, stops=frozenset({3, 4, 5, 6}))


def test_a_template_and_the_rescaling_come_along(tmp_path, folder):  # noqa: F811
    tokenizer = load_tokenizer(folder / "llama3")
    path = with_tokenizer(tmp_path / "x.gguf", tokenizer)
    metadata = read_header(MappedFile(path)).metadata
    assert metadata.string("tokenizer.chat_template") == "{{ messages }}"
    assert metadata.string("tokenizer.chat_template.tool_use") == "{{ tools }}"
    template = find_template(tokenizer, path)
    assert (template.source, template.named) == ("{{ messages }}", {"tool_use": "{{ tools }}"})
    for scaling in (LinearScaling(4.0), Llama3Scaling(8.0, 1.0, 4.0, 64)):
        checkpoint = random_checkpoint(replace(SMALL, head_dim=16, scaling=scaling), seed=0)
        write_gguf(checkpoint, tmp_path / f"{scaling.factor}.gguf")
        assert open_checkpoint(tmp_path / f"{scaling.factor}.gguf").config.scaling == scaling


def test_a_split_that_has_no_name_is_refused(tmp_path, folder):  # noqa: F811
    spec = json.loads((folder / "byte-level" / "tokenizer.json").read_text())
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "x|y"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match=r"random: llama\.cpp has no tokenizer\.ggml\.pre for"):
        with_tokenizer(tmp_path / "x.gguf", load_tokenizer(tmp_path))
