"""Quantizes weights on the device; the codes are the same, bit for bit, as those of `reference.quantizers.schemes`.

The reference divides in float64, with NumPy on one core. This module finds the same codes in float32, with XLA on all
cores or on a GPU. A float32 quotient may be wrong by a few units in the last place, so we get two candidate codes from
it. Then we compute a difference that is exact in float32, and its sign tells which of the two codes is right.

We compute scales, one for each group, in float64.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float64, Shaped

from llamaspec.model.checkpoints.checkpoint import Codes, Tensor
from llamaspec.model.checkpoints.codes import exact_parts
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.forms.table import CLASS_OF_FORM
from llamaspec.model.weights.groups import LANES, repeats_of_scales
from llamaspec.model.weights.rounding import bits_of
from llamaspec.reference.quantizers.schemes import SCHEMES

# The largest magnitude of a group must be between these powers of 2. Then no number overflows, and no number is
# subnormal. (XLA on a CPU treats a subnormal number as 0.)
LEAST, MOST = 2.0**-90, 2.0**90
MAGNITUDE = 0x7FFFFFFF  # bits of a float32 without its sign


PART = 16 << 20  # number of bytes to read at once
FEW = 1 << 26  # number of weights that NumPy quantizes on one core in the time that XLA needs to compile


class OnDevice(NamedTuple):
    """A matrix that a device has quantized, and whether its codes are exact."""

    matrix: QuantizedMatrix
    exact: Bool[Array, ""]  # False: the largest magnitude of a group is not in `LEAST` to `MOST`; codes may be wrong


def quantized_parts(
    codes: Codes, shapes: QuantizedMatrix, note: Callable[[Any], None], by_device: bool
) -> Iterator[QuantizedMatrix]:
    """Quantize the float weights of `codes.source`, a few megabytes at a time.

    We quantize on the device if `by_device`, otherwise with NumPy. We call `note` with each part before we quantize it.
    If the device reports that the codes of a part may not be exact, we quantize the part again with NumPy.
    """
    assert codes.source
    rows = 0
    for part in in_parts(codes.source.read()) if by_device else exact_parts(codes.source):
        note(part)
        if by_device:
            rows = rows or len(part)  # We pad the last part to this number of rows, so that all parts use one program.
            padded = np.pad(part, [(0, rows - len(part)), (0, 0)]) if len(part) < rows else part
            matrix, exact = quantized_on_device(padded, codes)
            if exact:
                yield jax.tree.map(np.asarray, matrix) if len(part) == rows else _first_rows(matrix, len(part))
                continue
        yield shapes.stored(SCHEMES[codes.scheme].quantize(part), codes)


def _first_rows(matrix: QuantizedMatrix, count: int) -> QuantizedMatrix:
    return jax.tree.map(lambda array: np.asarray(array)[:count], matrix)


def is_worth_compiling(tensors: Iterable[Tensor]) -> bool:
    """Tell whether XLA, including its time to compile, quantizes these tensors faster than NumPy."""
    plain = [tensor for tensor in tensors if tensor.codes and tensor.codes.source]
    return sum(math.prod(tensor.shape) for tensor in plain) > FEW


def can_quantize_whole(tensors: Sequence[Tensor]) -> bool:
    """Tell whether a GPU can quantize tensors from `loading._joined` all at once: all must be floats of one dtype.

    On a CPU, we quantize one part after the other, which needs less memory, and copy the codes into huge pages.
    """
    sources = [tensor.codes.source if tensor.codes else None for tensor in tensors]
    return all(
        source and not source.codes and source.dtype == tensors[0].codes.source.dtype  # type: ignore  # the first is not None here
        for source in sources
    )


def quantized_whole(
    tensors: Sequence[Tensor], names: Sequence[str], note: Callable[[str, Tensor, Any], None]
) -> OnDevice:
    """Stack float weights in their stored dtype, and quantize them on the device; call `note` with each part read."""
    codes = [tensor.codes for tensor in tensors if tensor.codes]
    sources = [code.source for code in codes if code.source]
    stacked = np.empty((sum(source.shape[0] for source in sources), *sources[0].shape[1:]), sources[0].dtype)
    start = 0
    for name, tensor, source in zip(names, tensors, sources, strict=True):
        for part in in_parts(source.read()):
            stacked[start : start + len(part)] = part
            start += len(part)
            note(name, tensor, part)
    return quantized_on_device(jax.device_put(stacked), codes[0])


def in_parts(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows of an array in order, a few megabytes at a time, so that little of a file is in memory at once."""
    rows = max(1, PART // max(1, values[:1].nbytes))
    for start in range(0, len(values), rows):
        yield values[start : start + rows]


def quantized_on_device(weights: Float[Array | np.ndarray, "rows cols"], codes: Codes) -> OnDevice:
    """Quantize finite weights by the scheme of `codes`, into the arrays of `QuantizedMatrix.shapes`.

    `weights` are float32, bfloat16 or float16.
    """
    assert codes.scheme
    with jax.enable_x64(True):
        # `largest` is an argument, because XLA replaces division by a constant with a product that rounds differently.
        largest = np.float64(CLASS_OF_FORM[codes.form].largest)
        return _quantized(weights, largest, codes=codes._replace(bytes=0, parts=no_parts, source=None))


def no_parts() -> Any:
    """Stand in for `Codes.parts`, so that matrices of one shape have equal `codes` and share a compiled program."""
    raise AssertionError("these codes are computed on the device, so they have no stored parts")


@partial(jax.jit, static_argnames=("codes",))
def _quantized(weights: Float[Array, "rows cols"], largest: Float64[Array, ""], *, codes: Codes) -> OnDevice:
    rows, cols = weights.shape
    group = SCHEMES[codes.scheme].group or cols
    padded = jnp.pad(weights.astype(jnp.float32), [(0, 0), (0, -cols % group)])
    blocks = padded.reshape(rows, -1, group)
    # We compare magnitudes by their bits as integers. The order is the same, and no subnormal number becomes 0.
    tops = jnp.max(bits_of(blocks) & MAGNITUDE, axis=-1)
    least, most = (int(np.float32(bound).view(np.int32)) for bound in (LEAST, MOST))
    exact = jnp.all((tops == 0) | ((tops >= least) & (tops <= most)))
    encode = CLASS_OF_FORM[codes.form].encode
    assert encode, f"no scheme has codes of {codes.form}"
    codes_of_weights, scales = encode(blocks, lax.bitcast_convert_type(tops, jnp.float32), largest)
    return OnDevice(stored_on_device(codes_of_weights.reshape(rows, -1)[:, :cols], scales, None, codes), exact)


def stored_on_device(
    bits: Shaped[Array, "rows cols"],
    scales: Shaped[Array, "rows groups"],
    minima: Float[Array, "rows groups"] | None,
    codes: Codes,
) -> QuantizedMatrix:
    """Arrange codes, scales and minima as `QuantizedMatrix.stored` does, for codes without zero points."""
    (rows, cols), kind = bits.shape, CLASS_OF_FORM[codes.form]
    shapes, copies = kind.shapes(rows, cols, codes), repeats_of_scales(codes, cols)
    groups = shapes.scales.shape[1]

    def spread(numbers: Array) -> Array:
        spread = jnp.repeat(numbers, copies, axis=1)[:, :groups]
        return jnp.pad(spread, [(0, 0), (0, groups - spread.shape[1])])

    if kind.middle and kind.packed:
        bits = bits + jnp.int8(kind.middle)
    bits = jnp.pad(lax.bitcast_convert_type(bits, jnp.uint8), [(0, 0), (0, shapes.cols - cols)])
    if kind.packed:
        # Without the barrier, XLA on a CPU would compute each code twice: for the low and for the high half of a byte.
        pairs = lax.optimization_barrier(bits).reshape(rows, -1, 2, LANES)
        bits = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(rows, -1)
    arrays: Any = (
        lax.bitcast_convert_type(bits, kind.dtype),
        spread(scales).astype(kind.scale_dtype),
        None,
        None if minima is None else spread(minima),
    )
    return kind(*arrays)
