"""Emulates, in JAX and in NumPy, other programs that round activations before a product.

llama.cpp rounds activations in blocks (`reference.quantizers.ggml_activations`). SmoothQuant rounds activations to int8
(`reference.quantizers.smoothquant.activations`), so that a product multiplies int8 by int8.

We store the rounding with the matrix, so that the code of the model is the same with and without rounding. In JAX,
`RoundedMatrix` is a pytree that contains a matrix, and `emulating` makes a product that applies the rounding. In NumPy,
`RoundingArray` is a matrix that rounds the vectors of a product.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from llamaspec.model.cache import from_int8, to_int8
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import BYTES
from llamaspec.model.ops.cpu import CPU
from llamaspec.model.ops.products import cpu_product, dot
from llamaspec.model.ops.table import Ops, Product
from llamaspec.model.ops.xla import XLA, plain
from llamaspec.model.tensors import stacks
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.gpu_codes import Stacked
from llamaspec.model.weights.params import Matrix, Names, Params, array_names
from llamaspec.reference.config import Config

BLOCK = 32
SUPERBLOCK = 256


def roundings(checkpoint: Checkpoint, emulate: str) -> dict[str, str]:
    """Map the name of each matrix that needs rounded activations to its rounding, which is a key of `ROUNDINGS`.

    `emulate` is one of three names. q8_0 rounds the inputs of all quantized matrices. int8 rounds the inputs of
    matrices in int8, with one scale per token. ggml rounds the inputs of each matrix of a GGUF file as llama.cpp does
    for the matrix's type. Raises ValueError if the name is unknown, if no matrix needs rounding, if matrices that we
    stack for one product have different roundings, or if the model has an adapter.
    """
    from llamaspec.reference.quantizers.ggml_activations import ROUNDING_OF  # here, since most runs do not need this

    if any(tensor.adapter for tensor in checkpoint.tensors.values()):
        raise ValueError("emulated activations work only without an adapter")

    matrices = {name: tensor for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    named = {name: ROUNDING_OF[tensor.type] for name, tensor in matrices.items() if tensor.type in ROUNDING_OF}
    if emulate == "ggml":
        rounded_by = named
    elif emulate == "q8_0":
        blocks = {name for name, rounding in named.items() if rounding in ("q8_0", "q8_1", "q8_k")}
        rounded_by = {name: "q8_0" for name, tensor in matrices.items() if tensor.codes or name in blocks}
    elif emulate == "int8":
        rounded_by = {name: "int8" for name, tensor in matrices.items() if tensor.codes and tensor.codes.form in BYTES}
    else:
        raise ValueError(f"the rounding of activations {emulate!r} is unknown: choose q8_0, int8 or ggml")
    if not rounded_by:
        raise ValueError(f"{checkpoint.path} has no matrix for which {emulate} would round activations")
    for stack in stacks(checkpoint.config):
        first, *stacked = (weight.name for weight in stack.weights)
        for name in stacked:
            if rounded_by.get(first) != rounded_by.get(name):
                what = "are multiplied together, but their types need different roundings of activations"
                raise ValueError(f"{checkpoint.path}: {first} and {name} {what}")
    return rounded_by


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundedMatrix:
    """A matrix, and the name of the rounding for the vectors of its products."""

    weight: Any  # a `Matrix`, or another leaf if JAX maps a function over the tree
    to: str = field(metadata={"static": True})


def emulating(product: Product) -> Callable[[Array, Matrix | RoundedMatrix], Array]:
    """Extend the function `product` to accept a `RoundedMatrix`: it then rounds the vectors before it multiplies."""

    def rounded(x: Float[Array, "*batch cols"], weight: Matrix | RoundedMatrix) -> Float[Array, "*batch rows"]:
        if not isinstance(weight, RoundedMatrix):
            return product(x, weight)
        cols = x.shape[-1]
        numbers = ROUNDINGS[weight.to](x.astype(jnp.float32))
        y = product(numbers[..., :cols], weight.weight)
        if weight.to == "q8_1":
            assert isinstance(weight.weight, QuantizedMatrix | Stacked) and weight.weight.minima is not None
            minima = weight.weight.minima[:, : numbers.shape[-1] - cols]  # appended columns have minima of 0
            y += jnp.matmul(numbers[..., cols:], minima.T, precision=lax.Precision.HIGHEST)
        return y

    return rounded


EMULATED = {XLA: plain(emulating(dot)), CPU: plain(emulating(cpu_product))}


def emulated_ops(ops: Ops) -> Ops:
    """Return the table `ops` with products that apply `RoundedMatrix`. Raises ValueError for a table with kernels."""
    if ops not in EMULATED:
        raise ValueError("pallas kernels cannot emulate activations: choose xla or cpu")
    return EMULATED[ops]


def with_roundings(params: Params, roundings_by_name: dict[str, str], *, config: Config) -> Params:
    """Replace each matrix in `params` that `roundings_by_name` names by a `RoundedMatrix`. `params` may be shapes."""

    def rounding(place: Any, array: Any) -> Any:
        if isinstance(place, Names) and place.names[0] in roundings_by_name:
            return RoundedMatrix(array, roundings_by_name[place.names[0]])
        return array

    # No product uses the embedding, so we do not wrap it. We do wrap a tied head, which is a separate leaf of the tree.
    return jax.tree.map(rounding, array_names(config, params.rope), params)._replace(embedding=params.embedding)


class RoundingArray(np.ndarray):
    """A NumPy matrix that rounds the vectors x in a product. The only supported product is `x @ matrix.T`.

    The array may also be a stack of matrices, which callers index by the first axis. For the rounding q8_1, `minima`
    has the minimum of each block of the matrix.
    """

    rounding: Callable[[np.ndarray], np.ndarray] | None
    minima: np.ndarray | None

    @classmethod
    def of(cls, matrix: np.ndarray, to: str, minima: np.ndarray | None = None) -> "RoundingArray":
        from llamaspec.reference.quantizers.ggml_activations import ROUNDINGS
        from llamaspec.reference.quantizers.smoothquant import activations

        array = matrix.view(cls)
        array.rounding = activations if to == "int8" else ROUNDINGS[to]
        array.minima = minima
        return array

    def __array_finalize__(self, source: Any) -> None:
        self.rounding = getattr(source, "rounding", None)
        self.minima = getattr(source, "minima", None)

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if self.minima is not None and isinstance(part, RoundingArray):
            part.minima = self.minima[index]
        return part

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = [np.asarray(operand) for operand in inputs]
        if not (ufunc is np.matmul and inputs[1] is self and self.rounding):
            return getattr(ufunc, method)(*arrays, **options)
        numbers, cols = self.rounding(arrays[0]), arrays[0].shape[-1]
        y = numbers[..., :cols] @ arrays[1]
        return y if self.minima is None else y + numbers[..., cols:] @ self.minima.T


def q8_0(x: Float[Array, "*batch cols"]) -> Float[Array, "*batch cols"]:
    """Round activations as `ggml_activations.q8_0` does, in float32, which holds the results exactly."""
    cols = x.shape[-1]
    blocks = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -cols % BLOCK)]).reshape(*x.shape[:-1], -1, BLOCK)
    most = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    # The barrier keeps XLA from multiplying by 1 / 127, which would round differently.
    d = (most / lax.optimization_barrier(jnp.float32(127))).astype(jnp.float16).astype(jnp.float32)
    factor = jnp.where(d == 0, 0, 127 / most)
    return (jnp.round(blocks * factor) * d).reshape(*x.shape[:-1], -1)[..., :cols]


def q8_1(x: Float[Array, "*batch cols"]) -> Float[Array, "*batch cols_and_blocks"]:
    """Round activations as `ggml_activations.q8_1` does, in float32, which holds the results exactly.

    After the columns, the result has a number for each block. A product multiplies it by the minimum of the matrix's
    block.
    """
    rounded = q8_0(x)
    more = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)]
    blocks, sums = (jnp.pad(a, more).reshape(*x.shape[:-1], -1, BLOCK) for a in (x, rounded))
    d = jnp.max(jnp.abs(blocks), axis=-1) / lax.optimization_barrier(jnp.float32(127))
    stored = d.astype(jnp.float16).astype(jnp.float32)
    codes = jnp.sum(jnp.round(sums / jnp.where(stored == 0, 1, stored)[..., None]), axis=-1)
    # The barriers keep XLA from fusing product and difference into one operation with one rounding.
    summed = lax.optimization_barrier(d * codes).astype(jnp.float16).astype(jnp.float32)
    return jnp.concatenate([rounded, summed - lax.optimization_barrier(stored * codes)], axis=-1)


def q8_k(x: Float[Array, "*batch cols"]) -> Float[Array, "*batch cols"]:
    """Round activations as `ggml_activations.q8_k` does, and round each result once to float32."""
    blocks = x.reshape(*x.shape[:-1], -1, SUPERBLOCK)
    first = jnp.argmax(jnp.abs(blocks), axis=-1, keepdims=True)
    most = jnp.take_along_axis(blocks, first, axis=-1)
    factor = -127 / most
    usable = jnp.isfinite(factor)
    factor = jnp.where(usable, factor, 0)
    d = jnp.where(usable, 1 / factor, 0)
    return (jnp.minimum(jnp.round(blocks * factor), 127) * d).reshape(x.shape)


def int8(x: Float[Array, "*batch cols"]) -> Float[Array, "*batch cols"]:
    """Round activations as `smoothquant.activations` does, in float32, with the same functions as the int8 cache."""
    codes, scales = from_int8(to_int8(x))
    return codes * scales[..., None]


def _cast(dtype: DTypeLike) -> Callable[[Array], Array]:
    return lambda x: x.astype(dtype).astype(jnp.float32)


ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "q8_0": q8_0,
    "q8_1": q8_1,
    "q8_k": q8_k,
    "int8": int8,
    "bfloat16": _cast(jnp.bfloat16),
    "float16": _cast(jnp.float16),
}
