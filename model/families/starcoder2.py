"""Starcoder 2: LayerNorm, biases in all linear layers, and feed-forward layers of two matrices with GELU in between.

See https://arxiv.org/abs/2402.19173.
"""

from llamaspec.model.family import DEFAULTS, GGUF_KEYS, KEYS, Architecture, Family
from llamaspec.model.tensors import NAMES

SWITCHES = {"activation": "gelu_tanh", "gated": False, "layer_norm": True}
BIASES = ("qkv_bias", "o_bias", "ffn_bias")

FAMILY = Family(
    "starcoder2",
    model="Starcoder2ForCausalLM",
    gguf=Architecture(
        "starcoder2",
        keys=GGUF_KEYS | {"eps": "attention.layer_norm_epsilon"},
        square=True,
        switches=SWITCHES | dict.fromkeys(BIASES, True),  # llama.cpp does not use attention windows in this family
    ),
    keys=KEYS | {"eps": ("norm_epsilon",)} | dict.fromkeys(BIASES, ("use_bias",)),
    names={**NAMES, "up": "model.layers.{layer}.mlp.c_fc", "down": "model.layers.{layer}.mlp.c_proj"},
    defaults=DEFAULTS | {"context": 4096, "kv_heads": 2, "eps": 1e-5, "tied": True} | dict.fromkeys(BIASES, True),
    switches=SWITCHES,
    understood={"hidden_act": ("gelu_pytorch_tanh",), "norm_type": ("layer_norm",), "mlp_type": ("default",)},
    windows="every layer",
    bos=50256,
    stop=50256,
)
