r"""An int8 cache: the key and the value of each token and head have their own scales.

    s = max_i |x_i| / 127        q_i = rint(x_i / s)        x_i ~ s q_i        over the head_dim numbers of a vector

This is `symmetric` with a vector as the block. A new token does not change stored numbers, and attention reads 1 + 4 /
head_dim bytes per number. (llama.cpp's `--cache-type-k q8_0` uses blocks of 32 and float16 scales instead:
`ggml_blocks.Q8_0`.)

Guaranteed for a query that is not quantized, where score^ and output^ are computed from the quantized cache:

    |score - score^|  <=  e,   e = max_j s_j ||query||_1 / (2 sqrt(head_dim))              over the keys j that it sees
    |output - output^|  <=  (exp(2 e) - 1) max_j |v_j| + max_j s_j / 2                     over the values j

||query||_1 is the sum of the query's magnitudes. Reasons: |x - s q| <= s / 2, so a score changes by at most e. Then a
probability changes by at most a factor of exp(2 e). The output is a mean of the values v_j, and each of them is off by
at most half a step s_j / 2 (plus 127 2^-150 if the scale is denormal).

A row is packed as its codes followed by its scale, 4 bytes of float32. So the cache is one array with a row per token.

The laws of `symmetric` hold. Powers of two: 2^k x has the same codes as x, and the scale 2^k s. Sign: Q(-x) = -Q(x),
where Q(x) = s q. Fixed point: quantizing Q(x) gives the same codes and s.
"""

import numpy as np
from jaxtyping import Float, Float64, Int8

from llamaspec.reference.llama import LayerCache
from llamaspec.reference.quantizers import symmetric
from llamaspec.reference.quantizers.blocks import Quantized


def quantize(x: Float[np.ndarray, "*batch head_dim"]) -> Quantized:
    """Quantize to int8 codes and float32 scales [*batch, 1]. Raises ValueError unless all of x is finite.

    >>> q = quantize(np.array([[1.0, -0.5], [0.0, 0.0]]))
    >>> q.codes.tolist(), q.scales.shape
    ([[127, -64], [0, 0]], (2, 1))
    """
    return symmetric.quantize(x, bits=8, block=(1,) * (x.ndim - 1) + x.shape[-1:])


def dequantize(q: Quantized) -> Float64[np.ndarray, "*batch head_dim"]:
    """Return each code times the scale of its vector, exactly."""
    return symmetric.dequantize(q)


class Int8Cache(LayerCache):
    """A layer's cache that holds every key and value, including the newest, quantized to int8 and dequantized again.

    >>> cache = Int8Cache(np.zeros((0, 1, 2)), np.zeros((0, 1, 2)))
    >>> cache.append(np.array([[[127.0, 0.4]]]), np.array([[[127.0, 0.6]]])).v
    array([[[127.,   1.]]])
    """

    def append(
        self, k: Float[np.ndarray, "seq kv_heads head_dim"], v: Float[np.ndarray, "seq kv_heads head_dim"]
    ) -> "Int8Cache":
        """Append the rounded keys and values of new positions."""
        k, v = (dequantize(quantize(x)) for x in (k, v))
        return Int8Cache(np.concatenate([self.k, k]), np.concatenate([self.v, v]))


def pack(q: Quantized) -> Int8[np.ndarray, "*batch bytes"]:
    """Pack the codes of each vector, then its scale, little-endian.

    >>> pack(quantize(np.array([[127.0, -0.5]])))
    array([[ 127,    0,    0,    0, -128,   63]], dtype=int8)
    """
    return np.concatenate([q.codes.astype(np.int8), q.scales.astype("<f4").view(np.int8)], axis=-1)


def unpack(rows: Int8[np.ndarray, "*batch bytes"]) -> Quantized:
    """Undo `pack`. Raises ValueError for rows that are too short for a code and a scale.

    >>> unpack(pack(quantize(np.array([[127.0, -0.5]])))).codes
    array([[127,   0]], dtype=int8)
    """
    if rows.shape[-1] <= 4:
        raise ValueError(f"expected rows of codes followed by a scale of 4 bytes, got rows of {rows.shape[-1]} bytes")
    scales = np.ascontiguousarray(rows[..., -4:]).view("<f4").astype(np.float32)
    return Quantized(rows[..., :-4], scales)
