"""A `Config` as config.json: in a form that transformers 4, transformers 5 and `hf_config` read alike."""

from dataclasses import asdict
from typing import Any

from model.checkpoints.checkpoint import Checkpoint, refused
from model.checkpoints.huggingface.config import FAMILIES, read_config
from reference.config import Config
from reference.rope import LinearScaling, Llama3Scaling, Scaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def format_config(checkpoint: Checkpoint, *, dtype: str) -> dict[str, Any]:
    """The contents of config.json. Raises `CheckpointError` for a combination of switches that no family has."""
    config = checkpoint.config
    name = _family(config)
    values = _format(config, name) | {"torch_dtype": dtype} | format_tokens(checkpoint)
    written, again = asdict(config), asdict(read_config(values, checkpoint.path))
    if not any(config.windows or ()):
        written["windows"] = None  # said in another way
    if differing := [key for key, value in written.items() if again[key] != value]:
        what = f"no Hugging Face family is like this model: as {name} it would differ in {', '.join(differing)}"
        raise refused(checkpoint.path, what)
    return values


def format_tokens(checkpoint: Checkpoint) -> dict[str, Any]:
    """bos_token_id and eos_token_id, null where there is none: an absent key would mean the family's own."""
    stops: list[int] = sorted(checkpoint.stops)
    return {"bos_token_id": checkpoint.bos, "eos_token_id": stops[0] if len(stops) == 1 else stops or None}


def _family(config: Config) -> str:
    """The family that may have the switches of `config`."""
    if config.experts:
        return "mixtral"
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.o_bias:
        return "qwen2"
    return "mistral" if config.windows and any(config.windows) else "llama"


def _format(config: Config, name: str) -> dict[str, Any]:
    family = FAMILIES[name]
    scaling = _format_scaling(config.scaling)
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.eps,
        "rope_theta": config.theta,  # transformers 4 reads this and the next, 5 the one after
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.theta, **(scaling or {"rope_type": "default"})},
        "tie_word_embeddings": config.tied,
        "use_cache": True,
    }
    if family.attention_bias:
        values["attention_bias"] = config.o_bias
    if family.mlp_bias:
        values["mlp_bias"] = config.ffn_bias
    if family.moe:
        values |= {"num_local_experts": config.experts, "num_experts_per_tok": config.experts_per_token}
    return values | _format_windows(config, by_layer=family.layer_types)


def _format_scaling(scaling: Scaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearScaling(factor):
            return {"rope_type": "linear", "type": "linear", "factor": factor}  # `type`: transformers before 4.43
        case Llama3Scaling(factor, low, high, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }


def _format_windows(config: Config, *, by_layer: bool) -> dict[str, Any]:
    windows = config.windows or (None,) * config.layers
    sizes = [window for window in windows if window is not None]
    window = sizes[0] if sizes else None
    if not by_layer:
        return {"sliding_window": window}
    types = ["full_attention" if size is None else "sliding_attention" for size in windows]
    first = types.index("sliding_attention") if sizes else config.layers
    return {
        "use_sliding_window": bool(sizes),
        "sliding_window": window,
        "max_window_layers": first,  # layer_types in words that older versions know
        "layer_types": types,
    }
