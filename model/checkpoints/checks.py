"""Checks of hyperparameters, special token ids and weights; readers of all checkpoint formats use them."""

import math

import numpy as np

from llamaspec.model.checkpoints.checkpoint import refused
from llamaspec.reference.config import Config
from llamaspec.reference.rope import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

SMALLEST = 2.0**-126  # the smallest normal float32; float32 also holds its inverse
LARGEST = 2**31 - 1  # the largest dimension that we accept; llama2.c stores dimensions in 32 bits
MOST_LAYERS = 10_000  # the deepest Llama has 126; a false header must not make us list billions of tensor names
MOST_EXPERTS = 10_000

CHUNK = 1 << 16  # elements tested at once: the scratch array stays in a core's cache
EXPONENTS = {"float32": (np.uint32, 0x7F800000), "bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00)}


def check_model(path: str, config: Config, *, bos: int | None, stops: frozenset[int]) -> None:
    """Raise `CheckpointError` for a value in `config` that we do not support, or if `bos` or a stop token is no id."""

    def require(condition: bool, what: str):
        if not condition:
            raise refused(path, what)

    for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context"):
        size = getattr(config, name)
        require(1 <= size <= LARGEST, f"{name} is {_short(size)}, outside 1 to {LARGEST}")
    require(config.layers <= MOST_LAYERS, f"the model has {config.layers} layers, expected at most {MOST_LAYERS}")
    heads, kv_heads = config.heads, config.kv_heads
    require(heads % kv_heads == 0, f"the number of heads, {heads}, is not a multiple of the {kv_heads} kv heads")
    require(config.head_dim % 2 == 0, f"head_dim is {config.head_dim}, expected an even number (RoPE rotates pairs)")
    require(0 <= config.experts <= MOST_EXPERTS, f"experts is {_short(config.experts)}, outside 0 to {MOST_EXPERTS}")
    if config.experts:
        chosen = config.experts_per_token
        require(1 <= chosen <= config.experts, f"experts_per_token is {_short(chosen)}, outside 1 to {config.experts}")

    rotary = config.rotary_features
    require(2 <= rotary <= config.head_dim, f"RoPE rotates {rotary} features, expected 2 to {config.head_dim}")
    require(rotary % 2 == 0, f"RoPE rotates {rotary} features, expected an even number")
    what = f"the shared expert's width is {_short(config.shared_ffn)}, outside 0 to {LARGEST}"
    require(0 <= config.shared_ffn <= LARGEST, what)
    require(not config.shared_ffn or config.experts > 0, "the model has a shared expert, but no other experts")
    what = f"activation {config.activation} is not supported with a shared expert (only silu)"
    require(not config.shared_ffn or config.activation == "silu", what)
    joined = config.post_norms or not config.pre_norms or config.residual_scale != 1
    joined = joined or config.activation not in ("silu", "clamped_silu")
    joined = joined or config.layer_norm or not config.gated or config.parallel_residual
    require(config.experts > 0 or not config.expert_bias, "the model has biases of experts, but no experts")
    what = "experts are not supported with the norms, scales or activation of this model"
    require(not (config.experts and joined), what)
    what = "LayerNorm is not supported for norms after attention and after the feed-forward layer (only RMSNorm is)"
    require(not (config.post_norms and config.layer_norm), what)
    what = "norms of q and k with weights for each head are supported only as LayerNorm, not as RMSNorm"
    require(config.layer_norm or not config.head_qk_norm, what)
    mixed = (config.layer_norm and config.qk_norm) or (config.parallel_residual and not config.pre_norms)
    require(not mixed, "this combination of LayerNorm, q and k norms and parallel blocks is not supported")
    known = config.activation in (("silu", "gelu_tanh", "clamped_silu") if config.gated else ("gelu_tanh", "relu2"))
    gate = "with" if config.gated else "without"
    require(known, f"activation {config.activation} is not supported in a feed-forward layer {gate} a gate")
    layers = config.rotary_layers
    what = f"the list of layers with RoPE has {len(layers or ())} entries, expected {config.layers}"
    require(layers is None or len(layers) == config.layers, what)
    scales = ("embedding_scale", "residual_scale", "logit_divisor")
    optional = ("attention_scale", "attention_cap", "logit_cap", "local_theta")
    for name in (*scales, *(name for name in optional if getattr(config, name) is not None)):
        number = getattr(config, name)
        what = f"{name} is {_short(number)}, expected a positive number that float32 holds"
        require(SMALLEST <= number <= 1 / SMALLEST, what)
    for name in ("eps", "theta"):
        number = getattr(config, name)
        float32_holds = SMALLEST <= number <= 1 / SMALLEST
        require(float32_holds, f"{name} is {_short(number)}, expected a positive number that float32 holds")
    match config.scaling:
        case LinearScaling(factor):
            require(_positive(factor), f"the RoPE factor is {_short(factor)}, not a positive number")
        case Llama3Scaling(factor, low, high, original):
            require(_positive(factor), f"the RoPE factor is {_short(factor)}, not a positive number")
            ordered = _positive(low) and _positive(high) and low < high
            what = f"expected 0 < low_freq_factor < high_freq_factor, got {_short(low)} and {_short(high)}"
            require(ordered, what)
            require(1 <= original <= LARGEST, f"RoPE's original context is {_short(original)}, outside 1 to {LARGEST}")
        case DynamicScaling(factor):
            require(_positive(factor), f"the RoPE factor is {_short(factor)}, not a positive number")
        case YarnScaling(factor, original, magnitude, fast, slow):
            for number in (factor, magnitude, fast, slow):
                what = f"a parameter of YaRN is {_short(number)}, expected a positive number that float32 holds"
                require(SMALLEST <= number <= 1 / SMALLEST, what)
            require(1 <= original <= LARGEST, f"RoPE's original context is {_short(original)}, outside 1 to {LARGEST}")
            require(config.theta > 1, f"YaRN needs a theta above 1, got {_short(config.theta)}")
        case LongRopeScaling(few, many, original, magnitude):
            for factors in (few, many):
                what = f"LongRoPE has {len(factors)} factors, expected {rotary // 2}: one for each pair of features"
                require(len(factors) == rotary // 2, what)
                usable = all(SMALLEST <= factor <= 1 / SMALLEST for factor in factors)
                require(usable, "LongRoPE has a factor that is not a positive number")
            what = f"LongRoPE's attention_factor is {_short(magnitude)}, expected a positive number"
            require(_positive(magnitude), what)
            require(1 <= original <= LARGEST, f"RoPE's original context is {_short(original)}, outside 1 to {LARGEST}")
    if config.windows is not None:
        what = f"{len(config.windows)} attention windows are given, expected {config.layers}: one for each layer"
        require(len(config.windows) == config.layers, what)
        for window in set(config.windows):
            what = f"an attention window is {_short(window)}, outside 1 to {LARGEST}"
            require(window is None or 1 <= window <= LARGEST, what)

    for id in sorted(stops | ({bos} if bos is not None else set())):
        what = f"the begin or end token {_short(id)} is outside the vocabulary of {config.vocab} tokens"
        require(0 <= id < config.vocab, what)


def check_finite(name: str, array: np.ndarray, *, path: str = "checkpoint") -> None:
    """Raise `CheckpointError` if the tensor `array` (float32, bfloat16 or float16) contains a NaN or an infinity.

    The error says which element of the tensor `name` is not finite. We look for an exponent with all bits set, since
    NumPy's `isfinite` is slow for bfloat16. The test needs about 300 KB of memory.
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
