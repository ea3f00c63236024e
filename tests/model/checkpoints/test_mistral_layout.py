"""Mistral's own layout gives bit for bit the same model as Hugging Face's layout of the same weights."""

import json
from pathlib import Path

import numpy as np
import pytest

from llamaspec.model.checkpoints import CheckpointError, open_checkpoint
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from tests.support import families
from tests.support.refusals import mentions

# Module names in Mistral's layout and in transformers.
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.N.attention_norm": "model.layers.N.input_layernorm",
    "layers.N.attention.wq": "model.layers.N.self_attn.q_proj",
    "layers.N.attention.wk": "model.layers.N.self_attn.k_proj",
    "layers.N.attention.wv": "model.layers.N.self_attn.v_proj",
    "layers.N.attention.wo": "model.layers.N.self_attn.o_proj",
    "layers.N.ffn_norm": "model.layers.N.post_attention_layernorm",
    "layers.N.feed_forward.w1": "model.layers.N.mlp.gate_proj",
    "layers.N.feed_forward.w2": "model.layers.N.mlp.down_proj",
    "layers.N.feed_forward.w3": "model.layers.N.mlp.up_proj",
    "layers.N.feed_forward.gate": "model.layers.N.block_sparse_moe.gate",
    "layers.N.feed_forward.experts.M.w1": "model.layers.N.block_sparse_moe.experts.M.w1",
    "layers.N.feed_forward.experts.M.w2": "model.layers.N.block_sparse_moe.experts.M.w2",
    "layers.N.feed_forward.experts.M.w3": "model.layers.N.block_sparse_moe.experts.M.w3",
    "norm": "model.norm",
    "output": "lm_head",
}
# Tensor names in transformers and in Mistral's layout.
OWN = {
    f"{mistral_name}.weight".replace("N", str(layer)).replace("M", str(expert)): f"{name}.weight".replace(
        "N", str(layer)
    ).replace("M", str(expert))
    for name, mistral_name in NAMES.items()
    for layer in range(4)
    for expert in range(4)
}
PLAIN = {
    "dim": 32,
    "n_layers": 4,
    "head_dim": 16,
    "hidden_dim": 48,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-05,
    "vocab_size": 48,
    "max_seq_len": 512,
}
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "vocab_size": 48,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MISTRAL = COMMON | {"model_type": "mistral"}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
BETAS = {"beta_fast": 16.0, "beta_slow": 2.0}
# Keys of params.json, and the whole config.json of the same model.
CASES: dict[str, tuple[dict, dict]] = {
    "Mistral 7B v0.1": ({"sliding_window": 7}, MISTRAL | {"sliding_window": 7, "rope_theta": 10_000.0}),
    "Mistral 7B v0.3": ({"rope_theta": 1e6}, MISTRAL | {"rope_theta": 1e6}),
    "no theta": ({"rope_theta": None, "moe": None}, MISTRAL | {"rope_theta": 1e6}),
    "Mixtral": (
        {"moe": {"num_experts": 4, "num_experts_per_tok": 2}},
        COMMON
        | {"model_type": "mixtral", "rope_theta": 1e6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "tied": ({"rope_theta": 1e4, "tied_embeddings": True}, MISTRAL | {"rope_theta": 1e4, "tie_word_embeddings": True}),
    "YaRN": (
        {"rope_theta": 1e4, "yarn": YARN | {"beta": 16, "alpha": 2, "apply_scale": False}},
        MISTRAL | {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "attention_factor": 1.0, **YARN, **BETAS}},
    ),
    "YaRN that scales": (
        {"rope_theta": 1e4, "yarn": YARN},
        MISTRAL | {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", **YARN}},
    ),
}  # fmt: skip


def neighbors(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows so that the two rows of each RoPE pair, i and i + head_dim / 2 of a head, are neighbors."""
    size = len(matrix) // heads
    order = [head * size + i + half for head in range(heads) for i in range(size // 2) for half in (0, size // 2)]
    return matrix[order]


def own_tensors(config: dict, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return {
        OWN[name]: next((neighbors(tensor, n) for part, n in heads.items() if part in name), tensor)
        for name, tensor in families.random_tensors(config, dtype=dtype).items()
    }


def write(folder: Path, changes: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(PLAIN | changes))
    families.write_safetensors(folder / "consolidated.safetensors", tensors)
    return folder


def assert_equal(actual: Checkpoint, expected: Checkpoint) -> None:
    assert (actual.config, actual.bos, actual.stops) == (expected.config, expected.bos, expected.stops)
    assert list(actual.tensors) == list(expected.tensors)
    for name, tensor in actual.tensors.items():
        value, two = tensor.read(), expected.tensors[name].read()
        assert (tensor.shape, tensor.dtype) == (value.shape, value.dtype) == (two.shape, two.dtype), name
        assert value.tobytes() == two.tobytes(), name


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_of_hugging_faces_layout_bit_for_bit(case, tmp_path):
    changes, config = CASES[case]
    (tmp_path / "other").mkdir()
    families.write_checkpoint(tmp_path / "other", config, dtype="bfloat16")
    own = write(tmp_path / "own", changes, own_tensors(config))
    actual = open_checkpoint(own)
    assert actual.format == "mistral"
    assert_equal(actual, open_checkpoint(tmp_path / "other"))
    assert_equal(open_checkpoint(own / "consolidated.safetensors"), actual)  # opened by its own path


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return own_tensors(MISTRAL)


def test_windows_may_be_a_list_that_is_repeated(tensors, tmp_path):
    folder = write(tmp_path / "ministral", {"_sliding_window": [None, 7]}, tensors)
    assert open_checkpoint(folder).config.windows == (None, 7, None, 7)


def test_weights_may_be_in_shards_and_beside_those_of_an_encoder_of_images(tensors, tmp_path):
    folder = write(tmp_path / "pixtral", {"vision_encoder": {"hidden_size": 8}}, {})
    tensors = tensors | {"vision_encoder.ln_pre.weight": np.ones(8, np.float32)}
    index = {}
    for number, names in enumerate(np.array_split(list(tensors), 2), start=1):
        file = f"consolidated-{number:05}-of-00002.safetensors"
        families.write_safetensors(folder / file, {str(name): tensors[str(name)] for name in names})
        index |= {str(name): file for name in names}
    (folder / "consolidated.safetensors").unlink()
    (folder / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert open_checkpoint(folder).tensors.keys() == families.tensor_shapes(MISTRAL).keys()


def test_hugging_faces_layout_counts_where_both_are_there_whole(tensors, tmp_path):
    folder = write(tmp_path / "both", {}, tensors)
    (folder / "config.json").write_text(json.dumps(MISTRAL))
    assert open_checkpoint(folder).format == "mistral"  # there are no other weights
    families.write_checkpoint(folder, MISTRAL)
    assert open_checkpoint(folder).format == "safetensors"


BAD: dict[str, tuple[dict, str]] = {
    "quantized": ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantization object not supported"),
    "Mamba": ({"model_type": "mamba"}, 'model_type "mamba" transformer'),
    "Ministral 3": ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling object not supported"),
    "shared experts": ({"moe": {"num_shared_experts": 1}}, "moe.num_shared_experts not supported"),
    "no norm_eps": ({"norm_eps": None}, "lacks key norm_eps"),
    "layers": ({"n_layers": 10**12}, "n_layers 1000000000000 outside 1"),
    "windows": ({"sliding_window": [7, 8]}, "sliding_window one list one null"),
    "no window": ({"sliding_window": [None]}, "sliding_window one list one null"),
    "parts": ({"sliding_window": [7, None, 7]}, "sliding_window 3 4 layers"),
    "a text": ({"sliding_window": "7"}, 'sliding_window "7" integer'),
    "heads": ({"n_heads": 8}, "layers.0.attention.wq.weight shape [64 32] params.json [128 32]"),
    "moe": ({"moe": [4]}, "moe list object"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_what_params_json_says_otherwise_is_refused_by_name(kind, tensors, tmp_path):
    changes, what = BAD[kind]
    folder = write(tmp_path / "bad", changes, tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert mentions(str(caught.value), what) and str(folder) in str(caught.value)


def test_without_params_json_the_line_says_so(tensors, tmp_path):
    folder = write(tmp_path / "alone", {}, tensors)
    (folder / "params.json").unlink()
    with pytest.raises(CheckpointError, match=r"params\.json: No such file"):
        open_checkpoint(folder / "consolidated.safetensors")
