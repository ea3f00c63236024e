"""The hyperparameters of a Llama: the numbers that are chosen, not learned.

Llama 2, 3, 3.1 and 3.2, TinyLlama, SmolLM2, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE are one architecture with
different settings of these numbers and switches. Gemma, Phi-3, OLMo 2, Granite and others also use the switches in the
last part of `Config`, which are off in a Llama.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np

from llamaspec.reference.rope import LongRopeScaling, Rotation, Scaling, frequencies, magnitude

# The function of gate and up: SwiGLU (Llama), GeGLU (Gemma) or clamped SwiGLU (gpt-oss). Without a gate, the function
# of up: GELU by tanh (Starcoder 2) or squared ReLU (Nemotron).
Activation = Literal["silu", "gelu_tanh", "relu2", "clamped_silu"]


@dataclass(frozen=True)
class Config:
    """Hyperparameters of a Llama-like decoder.

    A `Config` is hashable, so it can be a static argument of a compiled function.
    """

    dim: int  # width of the residual stream
    layers: int
    heads: int  # query heads
    kv_heads: int  # key and value heads, each shared by heads / kv_heads query heads
    head_dim: int  # usually dim / heads, but not in Qwen3
    ffn: int  # hidden width of the feed-forward layer, or of each expert
    vocab: int
    context: int  # the number of positions that the model was trained on

    eps: float  # inside the root of every RMSNorm
    theta: float  # base of the RoPE frequencies
    scaling: Scaling | None = None  # how RoPE is adapted to a longer context
    windows: tuple[int | None, ...] | None = None  # per layer: it sees this many last positions; None: all (Mistral)

    experts: int = 0  # feed-forward layers to choose from in each block (Mixtral); 0: a single one
    experts_per_token: int = 0
    renormalize_experts: bool = True  # divide the chosen experts' weights by their sum (not in every Qwen3-MoE)

    tied: bool = False  # the output projection is the embedding table (Llama 3.2, Qwen)
    qkv_bias: bool = False  # Qwen2
    o_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every q and k head before RoPE (Qwen3)

    # Features that no Llama model has; `beyond_llama` lists the ones that a config turns on.
    activation: Activation = "silu"
    gated: bool = True  # a feed-forward layer has a gate besides up and down (not in Starcoder 2, Nemotron)
    layer_norm: bool = False  # LayerNorm with a bias instead of RMSNorm (Starcoder 2)
    parallel_residual: bool = False  # one norm feeds both halves of a block (StableLM 2 12B)
    head_qk_norm: bool = False  # LayerNorm of q and k heads, with separate weights for each head (StableLM 2 12B)
    pre_norms: bool = True  # RMSNorm before attention and before the feed-forward layer (not in OLMo 2)
    post_norms: bool = False  # RMSNorm of the output of each half of a block, before it is added (Gemma 2, OLMo 2)
    wide_qk_norm: bool = False  # `qk_norm` is one RMSNorm over all heads (OLMo 2)
    rotary_dim: int | None = None  # RoPE turns only the first features of a head, this many; None: all (Phi-4-mini)
    rotary_layers: tuple[bool, ...] | None = None  # which layers turn q and k; None: all (SmolLM3)
    local_theta: float | None = None  # theta of layers with a window, whose RoPE is not rescaled (Gemma 3)
    attention_scale: float | None = None  # factor of the scores; None: 1 / sqrt(head_dim) (Gemma 2)
    attention_cap: float | None = None  # scores s become cap tanh(s / cap) (Gemma 2)
    logit_cap: float | None = None  # logits l become cap tanh(l / cap) (Gemma 2)
    embedding_scale: float = 1.0  # factor of a token's embedding (Gemma, Granite)
    residual_scale: float = 1.0  # factor of the output of each half of a block (Granite)
    logit_divisor: float = 1.0  # divisor of the logits (Granite)
    shared_ffn: int = 0  # hidden width of an expert that every token uses, with its own gate (Qwen2-MoE)
    sinks: bool = False  # each head has a learned score in addition to the keys' scores (gpt-oss)
    expert_bias: bool = False  # biases of the router and of the experts' matrices (gpt-oss)

    def window(self, layer: int) -> int | None:
        """Return how many positions a query sees in `layer`: its own and the positions before it. None means all."""
        return self.windows[layer] if self.windows else None

    def uses_rope(self, layer: int) -> bool:
        """Return whether `layer` applies RoPE to q and k."""
        return self.rotary_layers is None or self.rotary_layers[layer]

    def is_local(self, layer: int) -> bool:
        """Return whether RoPE in `layer` uses the base `local_theta` in place of `theta`."""
        return self.local_theta is not None and self.window(layer) is not None

    def rotation(self, layer: int | None = None) -> Rotation:
        """Return the rotation that RoPE applies to q and k in `layer`. A layer without RoPE has frequencies of 0.

        If `layer` is None, return the rotation of the layers that use `theta`.

        >>> config = Config(8, 2, 2, 1, 4, 9, vocab=9, context=5, eps=0.0, theta=1e4, rotary_layers=(True, False))
        >>> [config.rotation(i).frequencies.tolist() for i in range(2)]
        [[1.0, 0.01], [0.0, 0.0]]
        """
        features = self.rotary_features
        if layer is not None and not self.uses_rope(layer):
            return Rotation(np.zeros(features // 2))
        if self.local_theta is not None and layer is not None and self.is_local(layer):
            return Rotation(frequencies(features, theta=self.local_theta))
        return Rotation(frequencies(features, theta=self.theta, scaling=self.scaling), magnitude(self.scaling))

    @property
    def rotary_features(self) -> int:
        """Return the number of features of a head that RoPE rotates."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def two_norms(self) -> bool:
        """Return whether each half of a block has its own norm before it."""
        return self.pre_norms and not self.parallel_residual

    def check_llama(self, what: str, *, known: Collection[str] = ()) -> None:
        """Raise ValueError if this config turns on a feature that no Llama model has and that is not in `known`.

        `what` is a plural noun for the message, such as "adapters".
        """
        if names := [name for name in self.beyond_llama() if name not in known]:
            raise ValueError(f"{what} do not support {', '.join(name.replace('_', ' ') for name in names)} yet")

    def beyond_llama(self) -> tuple[str, ...]:
        """List the features of this config that no Llama model has, for code that supports none of them.

        >>> config = Config(8, 2, 4, 2, 2, 9, vocab=9, context=5, eps=0.0, theta=1.0, qk_norm=True, logit_cap=30.0)
        >>> config.beyond_llama()
        ('logit_cap',)
        """
        names = [field.name for field in fields(self)]
        return tuple(
            field.name
            for field in fields(self)[names.index("activation") :]
            if getattr(self, field.name) != field.default
        )


def for_sequences(config: Config, context: int) -> Config:
    """Choose short or long factors of LongRoPE for sequences of up to `context` tokens.

    A configuration without LongRoPE is returned unchanged.

    >>> scaling = LongRopeScaling((1.0,), (9.0,), original_context=4096, magnitude=1.0, is_long=True)
    >>> long = Config(8, 2, 4, 2, 2, 9, vocab=9, context=8192, eps=0.0, theta=1.0, scaling=scaling)
    >>> [for_sequences(long, tokens).scaling.is_long for tokens in (4096, 4097)]
    [False, True]
    """
    if not isinstance(config.scaling, LongRopeScaling):
        return config
    return replace(config, scaling=replace(config.scaling, is_long=context > config.scaling.original_context))
