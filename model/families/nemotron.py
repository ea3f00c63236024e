"""Nemotron-4 and Minitron: LayerNorm, squared ReLU, and RoPE for half of the features of each head.

Files store the weights of norms minus 1. See https://arxiv.org/abs/2402.16819 and https://arxiv.org/abs/2407.14679.
"""

from llamaspec.model.family import DEFAULTS, GGUF_KEYS, KEYS, Architecture, Family, RopeKeys

SWITCHES = {"activation": "relu2", "gated": False, "layer_norm": True}

FAMILY = Family(
    "nemotron",
    model="NemotronForCausalLM",
    gguf=Architecture(
        "nemotron",
        keys=GGUF_KEYS | {"eps": "attention.layer_norm_epsilon"},
        square=True,
        has=("qkv_bias", "o_bias", "ffn_bias", "rotary_dim"),
        switches=SWITCHES | {"tied": False},
    ),
    keys=KEYS
    | {
        "eps": ("norm_eps",),
        "qkv_bias": ("attention_bias",),
        "o_bias": ("attention_bias",),
        "ffn_bias": ("mlp_bias",),
    },
    defaults=DEFAULTS
    | {"context": 4096, "kv_heads": None, "eps": 1e-5}
    | {"qkv_bias": False, "o_bias": False, "ffn_bias": False},
    switches=SWITCHES,
    understood={"hidden_act": ("relu2",)},
    rope=RopeKeys(partial=True, fraction=0.5),
    norm_offset=1.0,
    bos=2,
    stop=3,
)
