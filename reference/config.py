"""The hyperparameters of a Llama: every number that is chosen, not learned.

Llama 2, 3, 3.1 and 3.2, TinyLlama, SmolLM2, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE are one
architecture with these numbers and switches set differently.
"""

from dataclasses import dataclass

from reference.rope import Scaling


@dataclass(frozen=True)
class Config:
    """A Llama-like decoder. It is hashable, so that it can be a static argument of a compiled function."""

    dim: int  # width of the residual stream
    layers: int
    heads: int  # query heads
    kv_heads: int  # key and value heads, each shared by heads / kv_heads query heads
    head_dim: int  # often dim / heads, but not in Qwen3
    ffn: int  # hidden width of the feed-forward layer, or of each expert
    vocab: int
    context: int  # positions the model was trained on

    eps: float  # inside the root of every RMSNorm
    theta: float  # base of the RoPE frequencies
    scaling: Scaling | None = None  # how RoPE is stretched to a longer context
    windows: tuple[int | None, ...] | None = None  # per layer, how many last positions it sees; None: all (Mistral)

    experts: int = 0  # feed-forward layers to choose from in each block; 0: one, always used (Mixtral)
    experts_per_token: int = 0
    renormalize_experts: bool = True  # the chosen experts' weights are divided by their sum (not in every Qwen3-MoE)

    tied: bool = False  # the output projection is the embedding table (Llama 3.2, Qwen)
    qkv_bias: bool = False  # Qwen2
    o_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every q and k head before RoPE (Qwen3)

    def window(self, layer: int) -> int | None:
        """Return how many last positions `layer` sees, its own included; None: all."""
        return self.windows[layer] if self.windows else None
