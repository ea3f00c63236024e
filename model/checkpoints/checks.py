"""Checks of a model from a file of any format."""

import math

import numpy as np

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.reference.config import Config
from llamaspec.reference.rope import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

SMALLEST = 2.0**-126  # the smallest normal float32; its inverse is a float32, too
LARGEST = 2**31 - 1  # of a dimension; llama2.c stores dimensions in 32 bits
MOST_LAYERS = 10_000  # the deepest Llama has 126; a false header must not make us name billions of tensors
MOST_EXPERTS = 10_000

CHUNK = 1 << 16  # elements tested at once: the scratch array stays in a core's cache
EXPONENTS = {"float32": (np.uint32, 0x7F800000), "bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00)}


def check_model(path: str, config: Config, *, bos: int | None, stops: frozenset[int]) -> None:
    """Raise `CheckpointError` unless we can compute `config`, and its vocabulary has `bos` and `stops`."""

    def require(condition: bool, what: str):
        if not condition:
            raise refused(path, what)

    for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context"):
        size = getattr(config, name)
        require(1 <= size <= LARGEST, f"{name} is {_short(size)}, outside 1 to {LARGEST}")
    require(config.layers <= MOST_LAYERS, f"{config.layers} layers, more than {MOST_LAYERS}")
    require(config.heads % config.kv_heads == 0, f"{config.heads} heads do not share {config.kv_heads} kv heads evenly")
    require(config.head_dim % 2 == 0, f"head_dim is {config.head_dim}, but RoPE turns pairs")
    require(0 <= config.experts <= MOST_EXPERTS, f"{_short(config.experts)} experts, outside 0 to {MOST_EXPERTS}")
    if config.experts:
        chosen = config.experts_per_token
        require(1 <= chosen <= config.experts, f"{_short(chosen)} experts per token of {config.experts}")

    rotary = config.rotary_features
    require(2 <= rotary <= config.head_dim, f"RoPE turns {rotary} features of {config.head_dim}")
    require(rotary % 2 == 0, f"RoPE turns {rotary} features, but it turns pairs")
    require(0 <= config.shared_ffn <= LARGEST, f"the shared expert is {_short(config.shared_ffn)} wide")
    require(not config.shared_ffn or config.experts > 0, "a shared expert, but no experts")
    require(not config.shared_ffn or config.activation == "silu", "a shared expert with another activation than SiLU")
    joined = config.post_norms or not config.pre_norms or config.residual_scale != 1
    joined = joined or config.activation not in ("silu", "clamped_silu")
    joined = joined or config.layer_norm or not config.gated or config.parallel_residual
    require(config.experts > 0 or not config.expert_bias, "biases of experts, but no experts")
    require(not (config.experts and joined), "experts with the norms, scales or activation of another family")
    require(not (config.post_norms and config.layer_norm), "norms after each half of a block that are LayerNorms")
    require(config.layer_norm or not config.head_qk_norm, "norms of heads by RMSNorm, with weights for each head")
    mixed = (config.layer_norm and config.qk_norm) or (config.parallel_residual and not config.pre_norms)
    require(not mixed, "LayerNorm and norms of another family")
    known = config.activation in (("silu", "gelu_tanh", "clamped_silu") if config.gated else ("gelu_tanh", "relu2"))
    require(known, f"a feed-forward layer {'with' if config.gated else 'without'} a gate, of {config.activation}")
    layers = config.rotary_layers
    require(layers is None or len(layers) == config.layers, f"RoPE is named for other than {config.layers} layers")
    scales = ("embedding_scale", "residual_scale", "logit_divisor")
    optional = ("attention_scale", "attention_cap", "logit_cap", "local_theta")
    for name in (*scales, *(name for name in optional if getattr(config, name) is not None)):
        require(SMALLEST <= getattr(config, name) <= 1 / SMALLEST, f"{name} is {_short(getattr(config, name))}")
    for name in ("eps", "theta"):
        number = getattr(config, name)
        float32_holds = SMALLEST <= number <= 1 / SMALLEST
        require(float32_holds, f"{name} is {_short(number)}, not a positive number that float32 holds")
    match config.scaling:
        case LinearScaling(factor):
            require(_positive(factor), f"the RoPE factor is {_short(factor)}, not a positive number")
        case Llama3Scaling(factor, low, high, original):
            require(_positive(factor), f"the RoPE factor is {_short(factor)}, not a positive number")
            ordered = _positive(low) and _positive(high) and low < high
            require(ordered, f"RoPE's low_freq_factor {_short(low)} is not below high_freq_factor {_short(high)}")
            require(1 <= original <= LARGEST, f"RoPE's original context is {_short(original)}")
        case DynamicScaling(factor):
            require(_positive(factor), f"the RoPE factor is {_short(factor)}, not a positive number")
        case YarnScaling(factor, original, magnitude, fast, slow):
            for number in (factor, magnitude, fast, slow):
                require(SMALLEST <= number <= 1 / SMALLEST, f"YaRN has {_short(number)}, not a positive number")
            require(1 <= original <= LARGEST, f"RoPE's original context is {_short(original)}")
            require(config.theta > 1, f"YaRN with a theta of {_short(config.theta)}")
        case LongRopeScaling(few, many, original, magnitude):
            for factors in (few, many):
                what = f"LongRoPE has {len(factors)} factors for {rotary // 2} pairs"
                require(len(factors) == rotary // 2, what)
                usable = all(SMALLEST <= factor <= 1 / SMALLEST for factor in factors)
                require(usable, "LongRoPE has a factor that is not a positive number")
            require(_positive(magnitude), f"LongRoPE's attention_factor is {_short(magnitude)}")
            require(1 <= original <= LARGEST, f"RoPE's original context is {_short(original)}")
    if config.windows is not None:
        require(len(config.windows) == config.layers, f"{len(config.windows)} windows for {config.layers} layers")
        for window in set(config.windows):
            require(window is None or 1 <= window <= LARGEST, f"a window is {_short(window)}")

    for id in sorted(stops | ({bos} if bos is not None else set())):
        require(0 <= id < config.vocab, f"token {_short(id)} begins or ends a text, outside the {config.vocab} known")


def check_finite(name: str, array: np.ndarray, *, path: str = "checkpoint") -> None:
    """Raise `CheckpointError` if the float32, bfloat16 or float16 `array` holds a NaN or an infinity.

    We look for an exponent with all bits set, since NumPy's `isfinite` is slow for bfloat16. This takes about 300 KB of
    memory.
    """
    bits_type, exponent = EXPONENTS[array.dtype.name]
    bits = array.reshape(-1).view(bits_type)
    masked = np.empty(min(CHUNK, bits.size), bits_type)
    for begin in range(0, bits.size, CHUNK):
        chunk = bits[begin : begin + CHUNK]
        if np.bitwise_and(chunk, exponent, out=masked[: chunk.size]).max() == exponent:
            at = begin + int(np.argmax(masked[: chunk.size]))
            index = ", ".join(str(i) for i in np.unravel_index(at, array.shape))
            raise refused(path, f"{name}[{index}] is {array.reshape(-1)[at]}, not a finite number")


def _positive(number: float) -> bool:
    return math.isfinite(number) and number > 0


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
