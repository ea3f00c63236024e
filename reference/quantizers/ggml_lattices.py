r"""ggml's "i-quants": IQ1 to IQ3 store a grid point for several weights at once; IQ4_XS stores levels.

A superblock has 256 weights. A group of weights has the scale d s, with d in float16 and s of a few bits:

    IQ2_XXS, IQ2_XS, IQ2_S   w = d (s + 1/2) / 4  (+-) g     g from 8, 25, 43; eight weights per point
    IQ3_XXS                  w = d (s + 1/2) / 2  (+-) g     g from 4, 12, ..., 52, 62; four weights per point
    IQ3_S                    w = d (2 s + 1)      (+-) g     g from 1, 3, ..., 15; four weights per point
    IQ1_S, IQ1_M             w = d (2 s + 1) (g +- 1/8)      g from -1, 0, 1; eight weights per point
    IQ4_XS                   w = d (s - 32) v_q              v of IQ4_NL (see `ggml_codebooks`), four bits each

g is a weight's coordinate in the point. (+-) is a separate sign for each weight. IQ2_XXS, IQ2_XS and IQ3_XXS store
seven of every eight signs. The eighth one follows, because the number of minus signs in eight is always even. The sign
in +-1/8 is common to eight weights (IQ1_M) or to 32 weights (IQ1_S). The grids are in `ggml_grids`.

    bits per weight    IQ1_S 1.56   IQ1_M 1.75   IQ2_XXS 2.06   IQ2_XS 2.31
                       IQ2_S 2.56   IQ3_XXS 3.06   IQ3_S 3.44   IQ4_XS 4.25

We only read these types. To write them, ggml needs the importance of each weight for a text (the imatrix). Every weight
is exact in float32, as in ggml: d has 11 significant bits, and the product of the other factors has at most 13,
together the 24 bits of float32. (https://github.com/ggml-org/llama.cpp, ggml/src/ggml-quants.c, `dequantize_row_*`.)
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int8, Integer, UInt8

from llamaspec.reference.quantizers import ggml_grids, packing
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.ggml_blocks import float16_at
from llamaspec.reference.quantizers.ggml_codebooks import IQ4_NL_LEVELS
from llamaspec.reference.quantizers.ggml_grids import grid

SUPERBLOCK = 256

Bytes = UInt8[np.ndarray, "*batch bytes"]


@dataclass(frozen=True)
class Lattice:
    """One of the types IQ1 to IQ3: integer levels, and a scale for each group.

    `unpack` returns levels with their signs as int8, and float64 scales. The levels of IQ1 are 8 g +- 1. The divisors
    of the formulas, such as 4 in IQ2, are in the scales.
    """

    bytes: int  # bytes of a superblock
    _scales: Callable[[Bytes], np.ndarray]  # [*batch, groups]
    _levels: Callable[[Bytes], np.ndarray]  # [*batch, 256]

    weights = SUPERBLOCK

    def unpack(self, packed: UInt8[np.ndarray, "*batch blocks bytes"]) -> Quantized:
        """Return codes [*batch, blocks, 256], int8, and scales [*batch, blocks, groups], float64."""
        with np.errstate(invalid="ignore"):  # d may be NaN, which readers refuse
            return Quantized(self._levels(packed).astype(np.int8), self._scales(packed))

    def dequantize(self, q: Quantized) -> Float64[np.ndarray, "*batch cols"]:
        """Return the weights of all superblocks in a row."""
        return _weights(q.codes, q.scales)


@dataclass(frozen=True)
class LevelBlocks:
    """IQ4_XS: the levels of IQ4_NL, with scales of six bits.

    >>> block = np.zeros((1, 1, 136), np.uint8)
    >>> block[..., 1], block[..., 3], block[..., 8] = 0x3C, 0x80, 0xF0  # d = 1, a scale of 32 - 32 ..., codes 0 and 15
    >>> q = IQ4_XS.unpack(block)
    >>> q.codes[0, 0, [0, 16]], q.scales[0, 0]
    (array([ 0, 15], dtype=uint8), array([-32., -32., -32., -32., -32., -32., -32.,   0.]))
    """

    weights = SUPERBLOCK
    bytes = 136

    def unpack(self, packed: UInt8[np.ndarray, "*batch blocks bytes"]) -> Quantized:
        """Return codes [*batch, blocks, 256], uint8, and scales [*batch, blocks, 8], float64."""
        low = packing.unpack(packed[..., 4:8], bits=4)
        high = packing.unpack(packed[..., 2:4], bits=2)
        with np.errstate(invalid="ignore"):  # d may be infinite, which readers refuse
            scales = _d(packed) * (low.astype(np.int64) + 16 * high.astype(np.int64) - 32)
        return Quantized(packing.unpack(packed[..., 8:], bits=4, stride=16), scales)

    def dequantize(self, q: Quantized) -> Float64[np.ndarray, "*batch cols"]:
        """Return the weights of all superblocks in a row."""
        return _weights(IQ4_NL_LEVELS[q.codes], q.scales)


def _weights(levels: Integer[np.ndarray, "*batch n"], scales: Float64[np.ndarray, "*batch g"]) -> np.ndarray:
    groups = levels.reshape(*scales.shape, -1).astype(np.float64)  # [*batch, blocks, groups, group]
    with np.errstate(invalid="ignore"):  # an infinite d times 0
        return (groups * scales[..., None]).reshape(*levels.shape[:-2], -1)


def _d(packed: Bytes) -> Float64[np.ndarray, "*batch one"]:
    return float16_at(packed, 0).astype(np.float64)[..., None]


def _words(packed: Bytes, kind: str) -> Integer[np.ndarray, "*batch words"]:
    """Read bytes as little-endian words of dtype `kind`."""
    return np.ascontiguousarray(packed).view(f"<{kind}").astype(np.int64)


def _signed(magnitudes: np.ndarray, minus: UInt8[np.ndarray, "*batch weights"]) -> Int8[np.ndarray, "*batch weights"]:
    return magnitudes.reshape(minus.shape) * (1 - 2 * minus.astype(np.int8))


def _even_signs(sevens: Integer[np.ndarray, "*batch eights"]) -> UInt8[np.ndarray, "*batch weights"]:
    """Return eight signs from seven bits each. The last sign makes the number of minus signs even.

    >>> _even_signs(np.array([0b0000001]))
    array([1, 0, 0, 0, 0, 0, 0, 1], dtype=uint8)
    """
    bits = (sevens[..., None] >> np.arange(7) & 1).astype(np.uint8)  # [*batch, eights, 7]
    last = np.bitwise_xor.reduce(bits, axis=-1, keepdims=True)
    return np.concatenate([bits, last], axis=-1).reshape(*sevens.shape[:-1], -1)


def _fields(words: Integer[np.ndarray, "*batch words"], shifts: tuple[int, ...], mask: int) -> np.ndarray:
    """Split each word into fields: shift it right by each of `shifts`, and keep the bits of `mask`."""
    return (words[..., None] >> np.array(shifts) & mask).reshape(*words.shape[:-1], -1)


_IQ2_LEVELS = (8, 25, 43)
_IQ2_XXS_GRID = grid(ggml_grids.IQ2_XXS, levels=_IQ2_LEVELS, weights=8)
_IQ2_XS_GRID = grid(ggml_grids.IQ2_XS, levels=_IQ2_LEVELS, weights=8)
_IQ2_S_GRID = grid(ggml_grids.IQ2_S, levels=_IQ2_LEVELS, weights=8)
_IQ3_XXS_GRID = grid(ggml_grids.IQ3_XXS, levels=(4, 12, 20, 28, 36, 44, 52, 62), weights=4)
_IQ3_S_GRID = grid(ggml_grids.IQ3_S, levels=(1, 3, 5, 7, 9, 11, 13, 15), weights=4)
_IQ1_GRID = grid(ggml_grids.IQ1_S, levels=(-1, 0, 1), weights=8)
_SEVENS = (0, 7, 14, 21)  # positions of the signs of four eights in a word; four bits of a scale are above them


def _iq2_xxs_scales(packed: Bytes) -> np.ndarray:
    return _d(packed) * (2 * (_words(packed[..., 2:], "u4")[..., 1::2] >> 28) + 1) / 8


def _iq2_xxs_levels(packed: Bytes) -> np.ndarray:
    """Read the levels from pairs of words.

    The first word has four codes of one byte. The second word has four times seven signs, and the scale.
    """
    codes = np.ascontiguousarray(packed[..., 2:]).reshape(*packed.shape[:-1], 8, 8)[..., :4]
    signs = _even_signs(_fields(_words(packed[..., 2:], "u4")[..., 1::2], _SEVENS, 0x7F))
    return _signed(_IQ2_XXS_GRID[codes], signs)


def _iq2_xs_levels(packed: Bytes) -> np.ndarray:
    """Read the levels from 16-bit words: a nine-bit code and seven signs."""
    words = _words(packed[..., 2:66], "u2")
    return _signed(_IQ2_XS_GRID[words & 511], _even_signs(words >> 9))


def _halves_of_scales(packed: Bytes, start: int, divisor: int) -> np.ndarray:
    """Read four-bit scales s, the low half of a byte first, and return d (2 s + 1) / divisor."""
    return _d(packed) * (2 * packing.unpack(packed[..., start:], bits=4).astype(np.int64) + 1) / divisor


def _iq2_s_levels(packed: Bytes) -> np.ndarray:
    """Read the levels: the low eight bits of 32 codes, then signs, then the high two bits of the codes."""
    high = packing.unpack(packed[..., 66:74], bits=2).astype(np.int64)
    codes = packed[..., 2:34].astype(np.int64) + 256 * high
    return _signed(_IQ2_S_GRID[codes], packing.unpack(packed[..., 34:66], bits=1))


def _iq3_xxs_scales(packed: Bytes) -> np.ndarray:
    return _d(packed) * (2 * (_words(packed[..., 66:], "u4") >> 28) + 1) / 4


def _iq3_xxs_levels(packed: Bytes) -> np.ndarray:
    """Read the levels: 64 one-byte codes, then words with four groups of seven signs and a scale."""
    signs = _even_signs(_fields(_words(packed[..., 66:], "u4"), _SEVENS, 0x7F))
    return _signed(_IQ3_XXS_GRID[packed[..., 2:66]], signs)


def _iq3_s_levels(packed: Bytes) -> np.ndarray:
    """Read the levels: the low eight bits of 64 codes, then the ninth bits of these codes, then signs."""
    high = packing.unpack(packed[..., 66:74], bits=1).astype(np.int64)
    codes = packed[..., 2:66].astype(np.int64) + 256 * high
    return _signed(_IQ3_S_GRID[codes], packing.unpack(packed[..., 74:106], bits=1))


def _iq1_levels(codes: np.ndarray, minus: np.ndarray) -> np.ndarray:
    """Return 8 g +- 1 for groups of eight weights."""
    eights = 8 * _IQ1_GRID[codes] + (1 - 2 * minus)[..., None]
    return eights.reshape(*codes.shape[:-1], -1)


def _iq1_s_scales(packed: Bytes) -> np.ndarray:
    return _d(packed) * (2 * (_words(packed[..., 34:], "u2") >> 12 & 7) + 1) / 8


def _iq1_s_levels(packed: Bytes) -> np.ndarray:
    """Read the levels: the low bits of 32 codes, then words with the high bits of four codes, a scale and a sign."""
    words = _words(packed[..., 34:], "u2")
    codes = packed[..., 2:34].astype(np.int64) + 256 * _fields(words, (0, 3, 6, 9), 7)
    return _iq1_levels(codes, np.repeat(words >> 15, 4, axis=-1))


def _iq1_m_scales(packed: Bytes) -> np.ndarray:
    """Read d from the top four bits of four words, d's lowest bits first, and three-bit scales from the bits below."""
    words = _words(packed[..., 48:], "u2")
    d = np.sum(words >> 12 << 4 * np.arange(4), axis=-1, keepdims=True).astype(np.uint16).view(np.float16)
    return d.astype(np.float64) * (2 * _fields(words, (0, 3, 6, 9), 7) + 1) / 8


def _iq1_m_levels(packed: Bytes) -> np.ndarray:
    """Read the levels: the low eight bits of 32 codes, then half a byte per code: its high three bits and the sign."""
    high = packing.unpack(packed[..., 32:48], bits=4).astype(np.int64)
    return _iq1_levels(packed[..., :32].astype(np.int64) + 256 * (high & 7), high >> 3)


IQ2_XXS = Lattice(66, _iq2_xxs_scales, _iq2_xxs_levels)
IQ2_XS = Lattice(74, lambda packed: _halves_of_scales(packed, 66, 8), _iq2_xs_levels)
IQ2_S = Lattice(82, lambda packed: _halves_of_scales(packed, 74, 8), _iq2_s_levels)
IQ3_XXS = Lattice(98, _iq3_xxs_scales, _iq3_xxs_levels)
IQ3_S = Lattice(110, lambda packed: _halves_of_scales(packed, 106, 1), _iq3_s_levels)
IQ1_S = Lattice(50, _iq1_s_scales, _iq1_s_levels)
IQ1_M = Lattice(56, _iq1_m_scales, _iq1_m_levels)
IQ4_XS = LevelBlocks()
