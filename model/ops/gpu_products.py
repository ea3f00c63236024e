"""Products on a Hopper GPU: in a step of decoding, by kernels or by XLA, and for a prompt.

The tables of plain ops with these products are here, too. `model.ops.gpu` adds fused kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from llamaspec.model.ops.products import dot
from llamaspec.model.ops.xla import plain
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.forms.fp8 import FP8
from llamaspec.model.weights.forms.integers import Int8, Int8Min
from llamaspec.model.weights.forms.table import LEVELS, WORDS
from llamaspec.model.weights.gpu_codes import Stacked
from llamaspec.model.weights.params import Matrix
from llamaspec.pallas_kernels.coded_gemm import coded_gemm, geometry_of
from llamaspec.pallas_kernels.gemv import gemv
from llamaspec.pallas_kernels.parts import int4
from llamaspec.pallas_kernels.parts.matrix import MatrixOperand, ScaledCodes, ScaledE4M3, product_of
from llamaspec.pallas_kernels.unsupported import Unsupported

# Kernels take this many sequences at once if weights are floats: for four, XLA's tensor cores are faster
# (docs/lessons-gpu.md).
MOST_SEQUENCES = 2
# For more sequences than these, codes that `coded_gemm` takes are multiplied by all of them at once.
MOST_ONE_BY_ONE = 2

Shaped = Array | jax.ShapeDtypeStruct


def step_product(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """A product of a step of decoding, in float32: by a kernel that takes the matrix and these vectors, or by XLA."""
    if isinstance(weight, Stacked):
        return jnp.concatenate([step_product(x, part) for part in weight.parts], axis=-1)
    vectors = x.reshape(-1, x.shape[-1])
    if uses_coded_gemm(weight, x):
        y = coded_gemm(_coded(weight), vectors)
    elif _one_by_one(weight, x):
        y = gemv(multiplied(weight, vectors), vectors, out=jnp.float32)
    else:
        return dot(x, weight)
    return y.reshape(*x.shape[:-1], -1)


# Plain except for their products: ops for a cache in pages, for several vectors at once, and for what kernels refuse.
STEPS = plain(step_product)


def uses_coded_gemm(weight: Matrix, x: Float[Array, "*batch cols"]) -> bool:
    """Tell whether one kernel multiplies these codes by several vectors, and the rest of an op is left to XLA."""
    if isinstance(weight, Stacked):
        return all(uses_coded_gemm(part, x) for part in weight.parts)
    vectors, cols = x.size // x.shape[-1], x.shape[-1]
    if not isinstance(weight, QuantizedMatrix) or vectors <= MOST_ONE_BY_ONE or weight.cols != cols:
        return False
    try:
        geometry_of(_coded(weight), abstract(vectors, cols, dtype=x.dtype))
    except Unsupported:
        return False
    return True


def _coded(weight: Matrix) -> ScaledCodes:
    w = operand(weight)
    if not isinstance(w, ScaledCodes):
        raise Unsupported("coded_gemm takes codes with scales")
    return w


def _one_by_one(weight: Matrix, x: Float[Array, "*batch cols"]) -> bool:
    """Tell whether `gemv` multiplies a matrix by these few vectors faster than XLA."""
    try:
        check_one_by_one(weight, x)
    except Unsupported:
        return False
    return True


def check_one_by_one(weight: Matrix, x: Float[Array, "*batch cols"]) -> None:
    """Raise Unsupported unless `_one_by_one`."""
    vectors = abstract(x.size // x.shape[-1], x.shape[-1], dtype=x.dtype)
    for part in weight.parts if isinstance(weight, Stacked) else (weight,):
        product_of("gemv", multiplied(part, vectors), vectors, normed=False)


def multiplied_apart(weight: Matrix, x: Shaped) -> MatrixOperand | tuple[MatrixOperand, ...]:
    """`multiplied`, for a kernel that takes matrices of several forms, one below the other."""
    if isinstance(weight, Stacked):
        return tuple(multiplied(part, x) for part in weight.parts)
    return multiplied(weight, x)


def multiplied(weight: Matrix, x: Shaped) -> MatrixOperand:
    """`operand`, for vectors [batch, 1, cols] or [batch, cols] that kernels multiply it by faster than XLA."""
    assert not isinstance(weight, Stacked)
    if not isinstance(weight, QuantizedMatrix):
        if len(x) > MOST_SEQUENCES:
            raise Unsupported(f"kernels multiply floats by up to {MOST_SEQUENCES} vectors, XLA is faster for {len(x)}")
    elif weight.cols != x.shape[-1]:
        raise Unsupported(f"kernels multiply by codes in whole groups, {x.shape[-1]} columns are not")
    return operand(weight)


def operand(weight: Matrix) -> MatrixOperand:
    """A matrix as kernels take it; nothing is moved. Raises Unsupported for codes that no kernel reads."""
    assert not isinstance(weight, Stacked)  # only q, k and v are
    if not isinstance(weight, QuantizedMatrix):
        return weight
    if isinstance(weight, FP8):
        if weight.scales.shape[1] > 1:
            raise Unsupported(
                f"kernels multiply by fp8 weights with a scale for each row, not for {weight.group} columns"
            )
        return ScaledE4M3(weight.codes, weight.scales[:, 0])
    if isinstance(weight, tuple(WORDS.values())) or (isinstance(weight, Int8 | Int8Min) and weight.zeros is None):
        one_a_row = isinstance(weight, Int8) and weight.scales.shape[1] == 1
        scales = weight.scales[:, 0] if one_a_row else weight.scales
        return ScaledCodes(weight.codes, scales, weight.minima, LEVELS.get(weight.form), weight.low_bits)
    raise Unsupported(
        f"kernels read {weight.form} weights as model/weights/gpu_codes.py arranges them, with columns in multiples of "
        f"{int4.BLOCK}, got {weight.cols}, and with zero points of groups"
    )


def prompt_product(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """A product for the many tokens of a prompt, in float32 from what the tensor cores multiply.

    Where x is bfloat16, quantized weights are decoded to bfloat16 and each is rounded once, as in a model that is
    stored so. In float32 the product would take ten times as long.
    """
    if isinstance(weight, Stacked):
        return jnp.concatenate([prompt_product(x, part) for part in weight.parts], axis=-1)
    if not isinstance(weight, QuantizedMatrix) or x.dtype != jnp.bfloat16:
        return dot(x, weight)
    # The barrier ties the codes to x. Without it XLA might decode the matrices of all layers before the first product.
    x, codes = lax.optimization_barrier((x, weight))
    assert isinstance(codes, QuantizedMatrix)
    return dot(x, codes.weights()[:, : x.shape[-1]].astype(x.dtype))


PROMPTS = plain(prompt_product)


def abstract(*sizes: int, dtype: np.dtype) -> Any:
    """Give the shape and dtype of an array, in its place."""
    return jax.ShapeDtypeStruct(sizes, dtype)
