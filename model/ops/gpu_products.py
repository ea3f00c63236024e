"""Products on a Hopper GPU: a decoding step uses kernels or XLA, and a prompt uses XLA.

`STEPS` and `PROMPTS` are tables of ops in plain JAX with these products. `model.ops.gpu` adds fused kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from llamaspec.model.ops.products import adapted_product, dot
from llamaspec.model.ops.xla import plain
from llamaspec.model.weights.adapted import Adapted
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

# If the weights are floats, we use kernels for at most this number of sequences. For four sequences, XLA is faster,
# because it uses the tensor cores (docs/lessons-gpu.md).
MOST_SEQUENCES = 2
# For more than this number of sequences, `coded_gemm` multiplies codes (if it supports them) by all vectors at once.
MOST_ONE_BY_ONE = 2

Shaped = Array | jax.ShapeDtypeStruct


def step_product(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """Multiply in a decoding step: with a kernel if a kernel supports this matrix and these vectors, else with XLA."""
    if isinstance(weight, Adapted):
        return adapted_product(x, weight, step_product)
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


# Ops in plain JAX with `step_product`. We use these for a cache in pages, for several vectors at once, and for calls
# that the fused kernels refuse.
STEPS = plain(step_product)


def uses_coded_gemm(weight: Matrix, x: Float[Array, "*batch cols"]) -> bool:
    """Tell whether `coded_gemm` can multiply the codes of `weight` by the vectors `x`.

    The kernel needs more than `MOST_ONE_BY_ONE` vectors. It computes only the product: XLA computes the rest of an op,
    such as the norm.
    """
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
        raise Unsupported(f"coded_gemm needs codes with scales, got {type(w).__name__}")
    return w


def _one_by_one(weight: Matrix, x: Float[Array, "*batch cols"]) -> bool:
    """Tell whether `gemv` can multiply a matrix by the vectors `x`, and is faster than XLA."""
    try:
        check_one_by_one(weight, x)
    except Unsupported:
        return False
    return True


def check_one_by_one(weight: Matrix, x: Float[Array, "*batch cols"]) -> None:
    """Raise Unsupported if `gemv` cannot multiply a matrix by the vectors `x`, or if XLA is faster."""
    vectors = abstract(x.size // x.shape[-1], x.shape[-1], dtype=x.dtype)
    for part in weight.parts if isinstance(weight, Stacked) else (weight,):
        product_of("gemv", multiplied(part, vectors), vectors, normed=False)


def multiplied_apart(weight: Matrix, x: Shaped) -> MatrixOperand | tuple[MatrixOperand, ...]:
    """Call `multiplied` for a matrix, or for each part of a `Stacked`.

    A kernel that reads several matrices takes the parts as a tuple.
    """
    if isinstance(weight, Stacked):
        return tuple(multiplied(part, x) for part in weight.parts)
    return multiplied(weight, x)


def multiplied(weight: Matrix, x: Shaped) -> MatrixOperand:
    """Convert a matrix to the operand type of the kernels, for a product with x ([batch, 1, cols] or [batch, cols]).

    Raises Unsupported if kernels cannot multiply this matrix by x, or if XLA is faster.
    """
    assert not isinstance(weight, Stacked)
    if not isinstance(weight, QuantizedMatrix):
        if len(x) > MOST_SEQUENCES:
            what = f"kernels multiply a matrix of floats by at most {MOST_SEQUENCES} vectors"
            raise Unsupported(f"{what} (XLA is faster for more), got {len(x)}")
    elif weight.cols != x.shape[-1]:
        raise Unsupported(f"kernels need rows of whole groups, got {x.shape[-1]} columns in groups of {weight.group}")
    return operand(weight)


def operand(weight: Matrix) -> MatrixOperand:
    """Convert a matrix to the operand type of the kernels, without a copy. Raises Unsupported if no kernel reads it."""
    assert not isinstance(weight, Stacked)  # only the matrix of q, k and v can be a `Stacked`
    if isinstance(weight, Adapted):
        raise Unsupported("no kernel reads a matrix with an adapter")
    if not isinstance(weight, QuantizedMatrix):
        return weight
    if isinstance(weight, FP8):
        if weight.scales.shape[1] > 1:
            raise Unsupported(
                f"kernels multiply by fp8 weights with one scale per row, got one scale per {weight.group} columns"
            )
        return ScaledE4M3(weight.codes, weight.scales[:, 0])
    if isinstance(weight, tuple(WORDS.values())) or (isinstance(weight, Int8 | Int8Min) and weight.zeros is None):
        one_a_row = isinstance(weight, Int8) and weight.scales.shape[1] == 1
        scales = weight.scales[:, 0] if one_a_row else weight.scales
        return ScaledCodes(weight.codes, scales, weight.minima, LEVELS.get(weight.form), weight.low_bits)
    raise Unsupported(
        f"kernels read {weight.form} weights only in the layout of model/weights/gpu_codes.py: the number of columns "
        f"must be a multiple of {int4.BLOCK} (got {weight.cols}), and zero points per row are not supported"
    )


def prompt_product(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """Multiply the many tokens of a prompt by a matrix, with sums in float32.

    If x is bfloat16, we decode quantized weights and round them to bfloat16, as if the file stored bfloat16. A product
    in float32 would take ten times as long.
    """
    if isinstance(weight, Adapted):
        return adapted_product(x, weight, prompt_product)
    if isinstance(weight, Stacked):
        return jnp.concatenate([prompt_product(x, part) for part in weight.parts], axis=-1)
    if not isinstance(weight, QuantizedMatrix) or x.dtype != jnp.bfloat16:
        return dot(x, weight)
    # The barrier makes decoding wait for x. Without it, XLA might decode the matrices of all layers first.
    x, codes = lax.optimization_barrier((x, weight))
    assert isinstance(codes, QuantizedMatrix)
    return dot(x, codes.weights()[:, : x.shape[-1]].astype(x.dtype))


PROMPTS = plain(prompt_product)


def abstract(*sizes: int, dtype: np.dtype) -> Any:
    """Return the shape and dtype of an array, for use in place of the array."""
    return jax.ShapeDtypeStruct(sizes, dtype)
