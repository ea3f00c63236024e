"""Sizes of published models, and draws a little beyond them.

A matrix of such a model is too large to judge in a second, so we draw one dimension in full and keep the others small:
131,072 tokens of 8 features, or 3 tokens of 73,728 features. That is enough to reveal a kernel with too small a buffer
or a grid that ends early. In two of its three dimensions, the grid of a CUDA kernel has at most 65,535 blocks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llamaspec.verify.contract import Contract, Use, beyond
from llamaspec.verify.draws.domain import domain
from llamaspec.verify.draws.reach import reaches

GRID = 65_536  # one more than a grid's dimension may have

TOKENS = Use(131_072, "a prompt as long as Llama 3.1's context")
FEATURES = Use(18_432, "Nemotron-4 340B")
HIDDEN = Use(73_728, "the feed-forward layers of Nemotron-4 340B")
VOCABULARY = Use(262_144, "the vocabulary of Gemma 3")
HEADS = Use(232, "the query heads of Falcon 180B", grid=False)

# Uses by dimension, for all ops; `BY_OP` has other meanings of a dimension.
BY_DIMENSION: Mapping[str, Use] = {
    **dict.fromkeys(
        ("rows", "tokens", "batch", "seq", "queries", "keys", "count", "spare", "lengths", "offsets", "positions"),
        TOKENS,
    ),
    "dim": FEATURES,
    "ffn": HIDDEN,
    "cols": HIDDEN,
    "n": VOCABULARY,
    "vocab": VOCABULARY,
    "experts": Use(2_048, "Switch-C", grid=False),
    "answers": Use(64, "the answers to a question in DeepSeekMath", grid=False),
    "heads": HEADS,
    "group": HEADS,
    "kv_heads": HEADS,
}
OF_A_MATRIX = {"rows": VOCABULARY}
OF_BLOCKS = {**OF_A_MATRIX, "blocks": Use(HIDDEN.size // 32, f"{HIDDEN.of}, in blocks of 32 columns", grid=False)}
OF_PAIRS = {**OF_A_MATRIX, "pairs": Use(HIDDEN.size // 2, f"{HIDDEN.of}, two columns in a byte")}
OF_ADAPTERS = {"rows": HIDDEN, "rank": Use(2_048, "the largest rank in the paper of rsLoRA", grid=False)}
AFTER_A_NORM = {**OF_A_MATRIX, "cols": FEATURES}
BY_OP: Mapping[str, Mapping[str, Use]] = {
    **dict.fromkeys(
        (
            *("linear", "gemm", "gemv", "linear_add", "linear_backward", "quantize", "dequantize"),
            *("gemv_quantized", "gemm_quantized", "gemv_fixed_point"),
        ),
        OF_A_MATRIX,
    ),
    **dict.fromkeys(("norm_linear", "norm_gate_up", "norm_qkv"), AFTER_A_NORM),
    **dict.fromkeys(("lora", "lora_backward"), OF_ADAPTERS),
    **dict.fromkeys(("pack", "unpack"), OF_PAIRS),
    **dict.fromkeys(("ggml_encode", "ggml_decode"), OF_BLOCKS),
}


def with_uses(contract: Contract) -> Contract:
    """Add the largest published use of each dimension to a contract, and a larger draw if the contract has none."""
    uses, widest = {}, {}
    known = {**BY_DIMENSION, **BY_OP.get(contract.name, {})}
    for reach in reaches(contract):
        if reach.why or reach.dimension not in known:
            continue
        use = uses[reach.dimension] = known[reach.dimension]
        least = max(use.size, GRID if use.grid else 0)
        if reach.most <= least:
            (size,) = beyond(least)
            widest[reach.dimension] = _value(contract, reach.dimension, size)
    return replace(contract, large=replace(contract.large, uses=uses, widest=widest))


def _value(contract: Contract, name: str, size: int) -> Any:
    """Make a value of the draw `name`: a size, or a list of one size."""
    return (size,) if domain(contract.draws[name]).lists else size
