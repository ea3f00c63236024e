"""Tiny models of every supported family with Hugging Face's config keys, and random checkpoints for these models.

Each configuration is a whole `config.json`. Half use the spelling that most of the hub still has (`rope_theta`,
`rope_scaling` with `rope_type` or the older `type`, `torch_dtype`); half use that of transformers 5 (`rope_parameters`,
`dtype`). Widths and contexts are small; all switches are kept. This file imports nothing from this repository, so an
interpreter with transformers can write the same files: see `tests.goldens.make_logits`.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # names in a .safetensors file
CODES |= {"float8_e4m3fn": "F8_E4M3", "int8": "I8", "uint8": "U8", "int16": "I16", "int32": "I32"}  # if quantized
CODES |= {"int64": "I64", "uint32": "U32", "float8_e8m0fnu": "F8_E8M0"}

# Real models have eps of 1e-5 or 1e-6. With a tied (so larger) embedding, such a small eps would not change a golden,
# so tied families use 1e-3. The other embeddings are small enough for the real eps to matter.
FAMILIES: dict[str, dict] = {
    "llama-2": {  # its config.json names no theta: 10000 is the default
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 88,
        "max_position_embeddings": 128,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0",
        "use_cache": True,
        "vocab_size": 48,
    },
    "llama-3": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 44,
        "eos_token_id": 45,
        "hidden_act": "silu",
        "hidden_size": 48,
        "initializer_range": 0.02,
        "intermediate_size": 112,
        "max_position_embeddings": 128,
        "model_type": "llama",
        "num_attention_heads": 6,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0.dev0",
        "use_cache": True,
        "vocab_size": 48,
    },
    # RoPE has six pairs with wavelengths 6, 56, 500, ... The first is below 96 / 4 and unchanged, the second is
    # blended, and those from the third on are above 96 / 1 and stretched.
    "llama-3.1": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 44,
        "eos_token_id": [45, 46, 47],
        "hidden_act": "silu",
        "hidden_size": 48,
        "initializer_range": 0.02,
        "intermediate_size": 112,
        "max_position_embeddings": 768,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 96,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 48,
    },
    # RoPE has eight pairs with wavelengths 6, 32, 167, ...: unchanged, blended and stretched, as in llama-3.1.
    "llama-3.2": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 44,
        "dtype": "bfloat16",
        "eos_token_id": [45, 46, 47],
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 48,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": 0.001,
        "rope_parameters": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 500000.0,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": True,
        "transformers_version": "5.0.0",
        "use_cache": True,
        "vocab_size": 48,
    },
    "llama-linear": {  # Llama 2 with position interpolation; without num_key_value_heads, kv_heads = heads
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 88,
        "max_position_embeddings": 512,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 4.0, "type": "linear"},
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0",
        "use_cache": True,
        "vocab_size": 48,
    },
    "tinyllama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 88,
        "max_position_embeddings": 64,
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.35.0",
        "use_cache": True,
        "vocab_size": 48,
    },
    "smollm2": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 36,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 96,
        "is_llama_config": True,
        "max_position_embeddings": 512,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
        "pretraining_tp": 1,
        "rms_norm_eps": 0.001,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "vocab_size": 48,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 80,
        "max_position_embeddings": 512,
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 7,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0",
        "use_cache": True,
        "vocab_size": 48,
    },
    "qwen2": {  # as on the hub, sliding_window is set, but use_sliding_window is false
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 46,
        "eos_token_id": 46,
        "hidden_act": "silu",
        "hidden_size": 40,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "max_window_layers": 1,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 0.001,
        "rope_theta": 1000000.0,
        "sliding_window": 5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 48,
    },
    "qwen2-window": {  # the first max_window_layers layers have no window, the later layers have one
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 46,
        "eos_token_id": [47, 46],
        "hidden_act": "silu",
        "hidden_size": 40,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "max_window_layers": 2,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.37.2",
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": 48,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 46,
        "dtype": "bfloat16",
        "eos_token_id": 47,
        "head_dim": 12,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 512,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "rms_norm_eps": 0.001,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "transformers_version": "5.0.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 48,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": None,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "model_type": "mixtral",
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "pad_token_id": None,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.02,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "5.0.0",
        "use_cache": True,
        "vocab_size": 48,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 46,
        "decoder_sparse_step": 1,
        "eos_token_id": 47,
        "head_dim": 12,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "max_window_layers": 2,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 48,
    },
    # transformers 5 writes this config. The chosen experts keep the router's probabilities, and every layer has a
    # window.
    "qwen3-moe-window": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": 47,
        "head_dim": 10,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 512,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 24,
        "norm_topk_prob": False,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 4,
        "output_router_logits": False,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.001,
        "sliding_window": 7,
        "tie_word_embeddings": False,
        "transformers_version": "5.24.0",
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": 48,
    },
    "llama-bias": {  # all switches of LlamaConfig; the q and o projections are not square
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": 2,
        "head_dim": 10,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 72,
        "max_position_embeddings": 256,
        "mlp_bias": True,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "transformers_version": "5.0.0",
        "use_cache": True,
        "vocab_size": 48,
    },
}


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that Hugging Face files for `config` contain."""
    dim, ffn = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // heads
    q, kv = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    qwen2, qwen3 = config["model_type"] == "qwen2", config["model_type"].startswith("qwen3")
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], dim)}

    def linear(name: str, rows: int, cols: int, bias: bool = False):
        shapes[f"{name}.weight"] = (rows, cols)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (dim,)
        linear(f"{prefix}.self_attn.q_proj", q, dim, attention_bias or qwen2)
        linear(f"{prefix}.self_attn.k_proj", kv, dim, attention_bias or qwen2)
        linear(f"{prefix}.self_attn.v_proj", kv, dim, attention_bias or qwen2)
        if qwen3:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
        linear(f"{prefix}.self_attn.o_proj", dim, q, attention_bias)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (dim,)
        if config["model_type"] == "mixtral":
            linear(f"{prefix}.block_sparse_moe.gate", config["num_local_experts"], dim)
            for expert in range(config["num_local_experts"]):
                linear(f"{prefix}.block_sparse_moe.experts.{expert}.w1", ffn, dim)
                linear(f"{prefix}.block_sparse_moe.experts.{expert}.w2", dim, ffn)
                linear(f"{prefix}.block_sparse_moe.experts.{expert}.w3", ffn, dim)
        elif config["model_type"] == "qwen3_moe":
            experts, width = config.get("num_experts") or config["num_local_experts"], config["moe_intermediate_size"]
            linear(f"{prefix}.mlp.gate", experts, dim)
            for expert in range(experts):
                linear(f"{prefix}.mlp.experts.{expert}.gate_proj", width, dim)
                linear(f"{prefix}.mlp.experts.{expert}.up_proj", width, dim)
                linear(f"{prefix}.mlp.experts.{expert}.down_proj", dim, width)
        else:
            linear(f"{prefix}.mlp.gate_proj", ffn, dim, mlp_bias)
            linear(f"{prefix}.mlp.up_proj", ffn, dim, mlp_bias)
            linear(f"{prefix}.mlp.down_proj", dim, ffn, mlp_bias)
    shapes["model.norm.weight"] = (dim,)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], dim)
    return shapes


def is_matrix(name: str) -> bool:
    """Return whether `--quantize` quantizes the tensor `name`: a matrix that is no embedding, norm, bias or router."""
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", "lm_head.weight"))


def by_our_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename tensors to the names that a `Checkpoint` uses; experts and routers get Mixtral's names."""
    own_parts = {"mlp.experts.": "block_sparse_moe.experts.", "mlp.gate.": "block_sparse_moe.gate."}
    matrices = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def name(hf_name: str) -> str:
        for old, new in (own_parts | matrices if ".experts." in hf_name else own_parts).items():
            hf_name = hf_name.replace(old, new)
        return hf_name

    return {name(hf_name): array for hf_name, array in tensors.items()}


def random_tensors(config: dict, *, seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Draw weights that make every part of a model matter: peaked attention, uneven norms, large biases and logits."""
    # NumPy keeps RandomState's streams fixed, so goldens can be regenerated; default_rng's streams may change.
    random = np.random.RandomState(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = random.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = 1 + 0.25 * noise
        elif name.endswith(".bias"):
            values = 0.5 * noise
        elif name == "model.embed_tokens.weight":
            values = (0.5 if config["tie_word_embeddings"] else 0.03) * noise  # 0.03: small enough for eps to matter
        else:
            gain = 2.0 if name == "lm_head.weight" else 1.5  # ratio of the sizes of outputs and inputs
            values = gain / np.sqrt(shape[1]) * noise
        tensors[name] = values.astype(DTYPES[dtype])
    return tensors


def write_checkpoint(directory: Path, config: dict, *, seed: int = 0, dtype: str = "float32", shards: int = 1) -> None:
    """Write config.json and random weights as Hugging Face stores them: one file, or `shards` files with an index.

    The written config.json is `config` with its `dtype` or `torch_dtype` set to `dtype`.
    """
    directory = Path(directory)
    stated = {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    (directory / "config.json").write_text(json.dumps({**config, **stated}, indent=2) + "\n")

    tensors = random_tensors(config, seed=seed, dtype=dtype)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return
    weight_map = {}
    for shard, names in enumerate(np.array_split(list(tensors), shards), start=1):
        file = f"model-{shard:05}-of-{shards:05}.safetensors"
        write_safetensors(directory / file, {str(name): tensors[str(name)] for name in names})
        weight_map |= {str(name): file for name in names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a .safetensors file: the header's length in 8 bytes, a JSON header, then the data of all tensors.

    We format the file ourselves, because the library's NumPy API had no bfloat16 before version 0.8.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype.name], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
