"""Quantizing on the device: the codes of `reference.quantizers.schemes`, bit for bit, in the layout of a product.

The reference divides in float64, with NumPy on one core. Here XLA finds the same codes in float32, on all cores or on a
GPU. A float32 quotient is off by a few units in the last place, and on a GPU it is not even rounded correctly. It gives
two codes, one of which is right. Which one follows from the sign of a difference that float32 holds exactly.

Scales, one for each group, are computed in float64.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Float64, Int32, Shaped

from llamaspec.model.checkpoints.checkpoint import Codes, Tensor
from llamaspec.model.checkpoints.codes import exact_parts
from llamaspec.model.weights.codes import CLASS_OF_FORM, QuantizedMatrix
from llamaspec.model.weights.groups import LANES, repeats_of_scales
from llamaspec.reference.quantizers import mx
from llamaspec.reference.quantizers.minifloat import E2M1, E4M3, Minifloat
from llamaspec.reference.quantizers.nf4 import NF4
from llamaspec.reference.quantizers.schemes import SCHEMES

# Powers of 2 between which the largest weight of a group must be. Nothing is subnormal then, which XLA on a CPU would
# take for 0, and nothing overflows.
LEAST, MOST = 2.0**-90, 2.0**90
MAGNITUDE = 0x7FFFFFFF  # bits of a float32 without its sign
EXPONENT = 0x7F800000
FRACTION, BIAS = 23, 127  # bits of a float32's fraction, and what its exponent is stored with
UPPER = -1 << 12  # mask of the upper half of a float32's digits


PART = 16 << 20  # bytes
FEW = 1 << 26  # weights, which NumPy quantizes on one core before XLA has compiled


class OnDevice(NamedTuple):
    """A matrix that a device has quantized."""

    matrix: QuantizedMatrix
    exact: Bool[Array, ""]  # False: a group is beyond `LEAST` and `MOST`, and codes may differ from the reference's


def quantized_parts(
    codes: Codes, shapes: QuantizedMatrix, note: Callable[[Any], None], by_device: bool
) -> Iterator[QuantizedMatrix]:
    """Quantize the plain weights that `codes` are made of, a few megabytes at a time, on the device or with NumPy.

    `note` gets each part before it is quantized.
    """
    assert codes.source
    rows = 0
    for part in in_parts(codes.source.read()) if by_device else exact_parts(codes.source):
        note(part)
        if by_device:
            rows = rows or len(part)  # the last part is padded, so that one program does them all
            whole = np.pad(part, [(0, rows - len(part)), (0, 0)]) if len(part) < rows else part
            matrix, exact = quantized_on_device(whole, codes)
            if exact:
                yield jax.tree.map(np.asarray, matrix) if len(part) == rows else _first_rows(matrix, len(part))
                continue
        yield shapes.stored(SCHEMES[codes.scheme].quantize(part), codes)


def _first_rows(matrix: QuantizedMatrix, count: int) -> QuantizedMatrix:
    return jax.tree.map(lambda array: np.asarray(array)[:count], matrix)


def is_worth_compiling(tensors: Iterable[Tensor]) -> bool:
    """Whether XLA quantizes these tensors sooner than NumPy, with the seconds that it takes to compile."""
    plain = [tensor for tensor in tensors if tensor.codes and tensor.codes.source]
    return sum(math.prod(tensor.shape) for tensor in plain) > FEW


def can_quantize_whole(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors from `_joined` are plain weights of one dtype, which a GPU can quantize as a whole.

    On a CPU parts are quantized instead: that takes less memory, and the result is copied to pages of its own.
    """
    sources = [tensor.codes.source if tensor.codes else None for tensor in tensors]
    return all(
        source and not source.codes and source.dtype == tensors[0].codes.source.dtype  # type: ignore
        for source in sources
    )


def quantized_whole(
    tensors: Sequence[Tensor], names: Sequence[str], note: Callable[[str, Tensor, Any], None]
) -> OnDevice:
    """Stack plain weights, as they are stored, and have the device quantize them."""
    codes = [tensor.codes for tensor in tensors if tensor.codes]
    sources = [one.source for one in codes if one.source]
    stacked = np.empty((sum(source.shape[0] for source in sources), *sources[0].shape[1:]), sources[0].dtype)
    start = 0
    for name, tensor, source in zip(names, tensors, sources, strict=True):
        for part in in_parts(source.read()):
            stacked[start : start + len(part)] = part
            start += len(part)
            note(name, tensor, part)
    return quantized_on_device(jax.device_put(stacked), codes[0])


def in_parts(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield consecutive rows, a few megabytes at a time, so that little of the file is in memory at once."""
    rows = max(1, PART // max(1, values[:1].nbytes))
    for start in range(0, len(values), rows):
        yield values[start : start + rows]


def quantized_on_device(weights: Float[Array | np.ndarray, "rows cols"], codes: Codes) -> OnDevice:
    """Quantize finite weights by the scheme of `codes`, into the arrays of `QuantizedMatrix.shapes`.

    `weights` are float32, bfloat16 or float16.
    """
    assert codes.scheme
    with jax.enable_x64(True):
        # XLA would multiply by the reciprocal of a constant, which rounds otherwise.
        largest = np.float64(_largest(codes.scheme))
        return _quantized(weights, largest, codes=codes._replace(bytes=0, parts=_none, source=None))


def _none() -> Any:
    """Stand in for the parts of a file, so that all matrices of one shape share a program."""
    raise AssertionError("the codes are made from weights")


def _largest(scheme: str) -> float:
    """Give the number that the largest weight of a group becomes, where the scheme has one."""
    bits = SCHEMES[scheme].code_bits
    return {"nf4": 1.0, "fp8": E4M3.largest, "mxfp4": E2M1.largest}.get(scheme, 2.0 ** (bits - 1) - 1)


@partial(jax.jit, static_argnames=("codes",))
def _quantized(weights: Float[Array, "rows cols"], largest: Float64[Array, ""], *, codes: Codes) -> OnDevice:
    rows, cols = weights.shape
    group = SCHEMES[codes.scheme].group or cols
    padded = jnp.pad(weights.astype(jnp.float32), [(0, 0), (0, -cols % group)])
    blocks = padded.reshape(rows, -1, group)
    # As integers, magnitudes are ordered as the floats are, and no subnormal number is taken for 0.
    tops = jnp.max(_bits(blocks) & MAGNITUDE, axis=-1)
    least, most = (int(np.float32(bound).view(np.int32)) for bound in (LEAST, MOST))
    exact = jnp.all((tops == 0) | ((tops >= least) & (tops <= most)))
    bits, scales = ENCODERS[codes.scheme](blocks, lax.bitcast_convert_type(tops, jnp.float32), largest)
    return OnDevice(_stored(bits.reshape(rows, -1)[:, :cols], scales, codes), exact)


def _stored(bits: Shaped[Array, "rows cols"], scales: Shaped[Array, "rows groups"], codes: Codes) -> QuantizedMatrix:
    """Do what `QuantizedMatrix.stored` does, for codes without zero points and minima."""
    (rows, cols), kind = bits.shape, CLASS_OF_FORM[codes.form]
    shapes, copies = kind.shapes(rows, cols, codes), repeats_of_scales(codes, cols)
    scales = jnp.repeat(scales, copies, axis=1)[:, : shapes.scales.shape[1]]
    scales = jnp.pad(scales, [(0, 0), (0, shapes.scales.shape[1] - scales.shape[1])])
    if kind.middle and kind.packed:
        bits = bits + jnp.int8(kind.middle)
    bits = jnp.pad(lax.bitcast_convert_type(bits, jnp.uint8), [(0, 0), (0, shapes.cols - cols)])
    if kind.packed:
        # Without the barrier XLA on a CPU would compute each code twice, for the low and the high half of a byte.
        pairs = lax.optimization_barrier(bits).reshape(rows, -1, 2, LANES)
        bits = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(rows, -1)
    arrays: Any = (lax.bitcast_convert_type(bits, kind.dtype), scales.astype(kind.scale_dtype), None, None)
    return kind(*arrays)


Encoded = tuple[Shaped[Array, "rows groups group"], Shaped[Array, "rows groups"]]
Blocks = Float32[Array, "rows groups group"]
Tops = Float32[Array, "rows groups"]


def _symmetric(blocks: Blocks, tops: Tops, largest: Float64[Array, ""]) -> Encoded:
    """Do what `reference.quantizers.symmetric.quantize` does."""
    scales, reciprocals = _scales(tops, largest)
    codes = _nearest(jnp.abs(blocks), scales[..., None], reciprocals[..., None])
    codes = jnp.minimum(codes, largest.astype(jnp.int32))
    return jnp.where(blocks < 0, -codes, codes).astype(jnp.int8), scales


def _fp8(blocks: Blocks, tops: Tops, largest: Float64[Array, ""]) -> Encoded:
    """Do what `reference.quantizers.minifloat.quantize` does, to E4M3."""
    scales, reciprocals = _scales(tops, largest)
    magnitudes, divisors = jnp.abs(blocks), jnp.broadcast_to(scales[..., None], blocks.shape)
    exponents = _exponent_to(magnitudes * reciprocals[..., None], E4M3)
    units = _power_of_two(exponents - E4M3.mantissa_bits)
    steps = _nearest(magnitudes, divisors * units, reciprocals[..., None] / units)
    return _minifloat(blocks, exponents, steps, E4M3), scales


def _nf4(blocks: Blocks, tops: Tops, largest: Float64[Array, ""]) -> Encoded:
    """Do what `reference.quantizers.nf4.Codebook.quantize` does, in float32 as well."""
    reciprocals = (largest / jnp.where(tops == 0, 1, tops).astype(jnp.float64)).astype(jnp.float32)
    scaled = blocks * reciprocals[..., None]
    ordered = NF4.levels[NF4.order]
    assert np.array_equal(NF4.order, np.arange(len(ordered)))
    places = jnp.zeros(blocks.shape, jnp.uint8)
    for between in (ordered[1:] + ordered[:-1]) / 2:
        places = places + (scaled > between).astype(jnp.uint8)
    return places, tops


def _mxfp4(blocks: Blocks, tops: Tops, largest: Float64[Array, ""]) -> Encoded:
    """Do what `reference.quantizers.mx.quantize` does, to E2M1. Its scales are powers of 2, so quotients are exact."""
    exponents = jnp.where(tops == 0, -mx.BIAS, _exponent(tops) - _exponent(largest.astype(jnp.float32)))
    scaled = jnp.minimum(jnp.abs(blocks) * _power_of_two(-exponents)[..., None], E2M1.largest)
    own = _exponent_to(scaled, E2M1)
    steps = jnp.rint(scaled * _power_of_two(E2M1.mantissa_bits - own)).astype(jnp.int32)
    return _minifloat(blocks, own, steps, E2M1), (exponents + mx.BIAS).astype(jnp.uint8)


def _scales(tops: Tops, largest: Float64[Array, ""]) -> tuple[Tops, Tops]:
    """Compute scales with which each top becomes `largest`, rounded once, and their reciprocals; of 0 both are 0."""
    scales = (tops.astype(jnp.float64) / largest).astype(jnp.float32)
    reciprocals = jnp.where(scales == 0, 0, 1 / scales.astype(jnp.float64)).astype(jnp.float32)
    return scales, reciprocals


Spread = Float32[Array, "rows groups #group"]


def _nearest(magnitudes: Blocks, divisors: Spread, reciprocals: Spread) -> Int32[Array, "rows groups group"]:
    """Round quotients below 256 to the nearest integers, ties to even, as if they were exact.

    With `below` within one of the quotient, the tie is the middle of the two codes in question. Its product with the
    upper half of a divisor's digits has 20 digits, and so has the product with the lower half. The first difference is
    exact where it is close to 0, so the sign of the second one is right.
    """
    below = jnp.floor(magnitudes * reciprocals)
    tie = below + 0.5
    upper = lax.bitcast_convert_type(_bits(divisors) & UPPER, jnp.float32)
    beyond = (magnitudes - tie * upper) - tie * (divisors - upper)
    code = below.astype(jnp.int32)
    return code + ((beyond > 0) | ((beyond == 0) & (code & 1 == 1) & (divisors > 0)))


Integers = Int32[Array, "rows groups group"]


def _minifloat(
    blocks: Blocks, exponents: Integers, steps: Integers, to: Minifloat
) -> Shaped[Array, "rows groups group"]:
    """Make codes of signs, exponents and steps of 2^(exponent - mantissa bits); see `Minifloat.encode`."""
    # A normal number has 2^mantissa_bits steps to begin with, which count as one in its exponent; so does a carry.
    codes = (exponents - (1 - to.bias) << to.mantissa_bits) + steps
    last = int(to.encode(np.array([to.largest]))[0])
    sign = lax.shift_right_logical(_bits(blocks), jnp.int32(31))
    return (jnp.minimum(codes, last) | sign << to.bits - 1).astype(jnp.uint8)


def _exponent_to(x: Blocks, to: Minifloat) -> Int32[Array, "rows groups group"]:
    """Give the exponents that `x` has in a format; subnormal numbers and 0 share the smallest one."""
    return jnp.clip(_exponent(x), 1 - to.bias, int(np.log2(to.largest)))


def _bits(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    return lax.bitcast_convert_type(x, jnp.int32)


def _exponent(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Compute floor(log2(x)) of positive numbers that are not subnormal; of 0, -127."""
    return ((_bits(x) & EXPONENT) >> FRACTION) - BIAS


def _power_of_two(exponent: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return lax.bitcast_convert_type(exponent + BIAS << FRACTION, jnp.float32)


ENCODERS: dict[str, Callable[..., Encoded]] = {
    "q8": _symmetric,
    "q8_row": _symmetric,
    "q4": _symmetric,
    "nf4": _nf4,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
