"""Converts quantized matrices to the layout of the GPU's kernels, on the device, when a model is loaded.

Scales and minima are float32, one for each group. The table shows the bits per weight in memory, including scales and
minima, for groups of 16 and of 32 columns ("levels" are the forms nf4, fp4, iq4_nl and mxfp4):

    form             groups of 16   groups of 32
    int8             10             9
    int8_min         12             10
    int6             8
    int5                            6
    int5_min                        7
    int4, levels     6              5
    int4_min         8              6

Codes of 5 and 6 bits have these sizes only if a group has as many columns as in GGUF files. Otherwise, each code needs
a byte.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from llamaspec.model.checkpoints.checkpoint import Tensor
from llamaspec.model.device import Device
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.forms.integers import Int8Min
from llamaspec.model.weights.forms.table import LEVELS, WORDS
from llamaspec.model.weights.groups import LANES, can_multiply
from llamaspec.model.weights.words import Words
from llamaspec.pallas_kernels.parts import int4

APART = {"int6": (6, 16), "int5": (5, 32), "int5_min": (5, 32)}  # form: bits per code, columns per group


class Stacked(NamedTuple):
    """Quantized matrices with different forms of codes, stacked by rows because they multiply the same vectors."""

    parts: tuple[QuantizedMatrix, ...]

    @property
    def cols(self) -> int:
        return self.parts[0].cols

    @property
    def minima(self) -> Float[Array, "rows groups"] | None:
        """The minima of all rows; None if a part has no minima, or if the number of minima per row differs."""
        minima = [part.minima for part in self.parts if part.minima is not None]
        if len(minima) < len(self.parts) or len({rows.shape[1] for rows in minima}) > 1:
            return None
        return jnp.concatenate(minima)


def in_runs_of_a_form(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split a list of tensors into runs of consecutive tensors with the same form of codes.

    We stack the tensors of a run. If a tensor has no codes, or codes that products cannot read, we return all tensors
    as one run.
    """
    together = [list(tensors)]
    runs: list[list[Tensor]] = []
    for tensor in tensors:
        codes = tensor.codes
        if codes is None or not can_multiply(codes, tensor.shape[-1]):
            return together
        last = runs[-1][-1].codes if runs else None
        if last and (last.form, last.group, last.zeros) == (codes.form, codes.group, codes.zeros):
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs


def to_kernel_layout(weight: Any, device: Device) -> Any:
    """Convert a quantized matrix (or its shapes) to the layout of the kernels, if `device` has kernels.

    Any other weight is returned unchanged.
    """
    if not isinstance(weight, QuantizedMatrix) or not device.has_kernels:
        return weight
    abstract = isinstance(weight.codes, jax.ShapeDtypeStruct)
    return jax.eval_shape(arranged, weight) if abstract else arranged(weight)


def arranged(weights: Any) -> Any:
    """Convert the quantized matrices in a tree of weights to the layout of the kernels. JAX can trace this function.

    Zero points become minima, which is exact if the file has scales in float16 or bfloat16. If no kernel reads a
    matrix of this form or size, the matrix stays unchanged.
    """
    return jax.tree.map(_arranged, weights, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix))


def _arranged(leaf: Any) -> Any:
    if not isinstance(leaf, QuantizedMatrix) or isinstance(leaf, Words):
        return leaf
    if leaf.zeros is not None and leaf.group == leaf.cols:
        return leaf
    if leaf.form == "int8":
        return leaf if leaf.zeros is None else _with_minima(leaf)
    if leaf.form in APART:
        _, group = APART[leaf.form]
        return leaf if leaf.group != group or leaf.cols % int4.WIDE_BLOCK else _split_bits(leaf)
    return leaf if leaf.form not in WORDS or leaf.cols % int4.BLOCK else _in_words(leaf)


@jax.jit
def _with_minima(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Convert the zero points of a matrix with codes of eight bits to minima."""
    return Int8Min(matrix.codes, matrix.scales, None, _minima(matrix.scales, matrix.zeros))


@jax.jit
def _split_bits(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Pack the upper four bits of codes into one array of words, and the low bits into another array."""
    form = matrix.form
    bits, group = APART[form]
    codes = lax.bitcast_convert_type(matrix.codes, jnp.uint8) & (1 << bits) - 1
    packed = int4.packed_apart(codes, int4.order_of(group, levels=False), bits=bits)
    words, low_bits = (lax.bitcast_convert_type(array, jnp.int32) for array in packed)
    return WORDS[form](words, matrix.scales, None, matrix.minima, low_bits)


@jax.jit
def _in_words(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Pack codes of four bits into words, and convert zero points to minima."""
    form, group = matrix.form, matrix.group
    codes, minima = _in_order(matrix.codes), matrix.minima
    if form == "int4" and matrix.zeros is None:
        codes = codes ^ 8  # subtracts 8, in two's complement
    elif form == "int4":
        form, minima = "int4_min", _minima(matrix.scales, matrix.zeros, middle=matrix.middle)
    words = int4.packed(codes, int4.order_of(group, levels=form in LEVELS))
    return WORDS[form](lax.bitcast_convert_type(words, jnp.int32), matrix.real_scales(matrix.scales), None, minima)


def _minima(scales: Float[Array, "rows groups"], zeros: Any, *, middle: int = 0) -> Float[Array, "rows groups"]:
    """Compute the minima that replace zero points; `middle` is the number that was added to the stored codes."""
    return -scales * (zeros.astype(jnp.float32) + middle)


def _in_order(codes: UInt8[Array, "rows bytes"]) -> UInt8[Array, "rows cols"]:
    """Unpack the codes of a packed `QuantizedMatrix` into one byte per column, in the order of the columns."""
    rows, count = codes.shape
    pairs = codes.reshape(rows, count // LANES, LANES)
    return jnp.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(rows, 2 * count)
