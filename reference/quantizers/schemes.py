"""The quantization schemes for a model's weights, by the names that `--quantize` takes.

    name      codes                       a scale for       scale       see
    q8        int8                        64 of a row       float32     `symmetric`
    q8_row    int8                        a row             float32     `symmetric`
    q4        int4, as int8               64 of a row       float32     `symmetric`
    nf4       indices of 16 levels        64 of a row       float32     `nf4`
    fp8       e4m3                        a row             float32     `minifloat`
    mxfp4     e2m1                        32 of a row       e8m0        `mx`

If the group does not divide a row, the last group is shorter, with its own scale. Every scheme returns
`Quantized`: one code per weight, in the shape of w, and scales [*batch, groups]. The file in the last column
defines rounding, the guaranteed error, and packing.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64, Integer, UInt8

from llamaspec.reference.quantizers import minifloat, mx, nf4, symmetric
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.minifloat import E2M1, E4M3


class Scheme(NamedTuple):
    """A scheme: its functions for complete groups, and the number of bits of a code and of a scale."""

    code_bits: int
    scale_bits: int
    group: int | None  # weights of a row with a common scale; None: the whole row
    encode: Callable[[np.ndarray, int], Quantized]  # weights and the size of a group
    decode: Callable[[Quantized], np.ndarray]
    pack: Callable[[np.ndarray], np.ndarray]
    unpack: Callable[[np.ndarray], np.ndarray]
    levels: Float64[np.ndarray, " codes"] | None = None  # levels of all codes; None: a code is its own level

    def quantize(self, w: Float[np.ndarray, "*batch cols"]) -> Quantized:
        """Quantize weights. Raises ValueError for weights that are not finite.

        >>> q = SCHEMES["q8"].quantize(np.ones((2, 100)))
        >>> q.codes.shape, q.scales.shape, q.codes[0, 99]
        ((2, 100), (2, 2), np.int8(127))
        """
        cols = w.shape[-1]
        group = self.group or cols
        codes, scales = self.encode(np.pad(w, _to_whole_groups(w, group)), group)
        return Quantized(codes[..., :cols], scales)

    def dequantize(self, q: Quantized) -> Float64[np.ndarray, "*batch cols"]:
        """Compute the dequantized weights exactly."""
        cols = q.codes.shape[-1]
        codes = np.pad(q.codes, _to_whole_groups(q.codes, self.group or cols))
        return self.decode(Quantized(codes, q.scales))[..., :cols]

    def bits_per_weight(self, cols: int) -> float:
        """Return the bits per weight of a row of `cols` weights, with codes and scales.

        >>> [(name, scheme.bits_per_weight(2048)) for name, scheme in SCHEMES.items()]
        [('q8', 8.5), ('q8_row', 8.015625), ('q4', 4.5), ('nf4', 4.5), ('fp8', 8.015625), ('mxfp4', 4.25)]
        """
        groups = -(-cols // (self.group or cols))
        return self.code_bits + self.scale_bits * groups / cols


def _to_whole_groups(a: np.ndarray, group: int) -> list[tuple[int, int]]:
    """Return the argument of `np.pad` that completes the last group of a row with zeros.

    These zeros do not change the group's scale.
    """
    return [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % group)]


def _integers(bits: int, group: int | None) -> Scheme:
    def encode(w: Float[np.ndarray, "*batch cols"], group: int) -> Quantized:
        return symmetric.quantize(w, bits=bits, block=(1,) * (w.ndim - 1) + (group,))

    pack, unpack = partial(symmetric.pack, bits=bits), partial(symmetric.unpack, bits=bits)
    return Scheme(bits, 32, group, encode, symmetric.dequantize, pack, unpack)


def _fp8(w: Float[np.ndarray, "*batch cols"], group: int) -> Quantized:
    return minifloat.quantize(w, to=E4M3, block=(1,) * (w.ndim - 1) + (group,))


def _nf4(w: Float[np.ndarray, "*batch cols"], group: int) -> Quantized:
    return nf4.NF4.quantize(w, group=group)


def _mxfp4(w: Float[np.ndarray, "*batch cols"], group: int) -> Quantized:
    assert group == mx.BLOCK
    return mx.quantize(w, to=E2M1)


def _bytes(codes: Integer[np.ndarray, "*batch cols"]) -> UInt8[np.ndarray, "*batch cols"]:
    return codes.astype(np.uint8)


_CODES = np.arange(256, dtype=np.uint8)
SCHEMES = {
    "q8": _integers(bits=8, group=64),
    "q8_row": _integers(bits=8, group=None),
    "q4": _integers(bits=4, group=64),
    "nf4": Scheme(4, 32, 64, _nf4, nf4.NF4.dequantize, nf4.pack, nf4.unpack, levels=nf4.NF4.levels.astype(np.float64)),
    "fp8": Scheme(
        8, 32, None, _fp8, partial(minifloat.dequantize, to=E4M3), _bytes, _bytes, levels=E4M3.decode(_CODES)
    ),
    "mxfp4": Scheme(
        4,
        8,
        mx.BLOCK,
        _mxfp4,
        partial(mx.dequantize, to=E2M1),
        partial(mx.pack, to=E2M1),
        partial(mx.unpack, to=E2M1),
        levels=E2M1.decode(_CODES[:16]),
    ),
}


def scheme(name: str) -> Scheme:
    """Look up a scheme. Raises ValueError for an unknown name."""
    if name not in SCHEMES:
        raise ValueError(f"no scheme {name}: expected one of {', '.join(SCHEMES)}")
    return SCHEMES[name]
