r"""Ops for quantized weights on plain arrays: quantize, pack and multiply. Schemes and types are chosen by name.

    codes, scales = quantize(W)        W' = dequantize(codes, scales)        y = W' x

The exact product uses W', the dequantized weights, not W. The distance between W' and W depends on the scheme, and
each file of this folder states its bound. A kernel is only judged by its error in W' x. `schemes` lists the schemes,
`ggml` the types of GGUF files.
"""

import numpy as np
from jaxtyping import Float, Integer, Shaped, UInt8

from llamaspec.reference.linear import linear
from llamaspec.reference.quantizers import ggml
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.schemes import SCHEMES


def quantize(
    w: Float[np.ndarray, "rows cols"], *, scheme: str
) -> tuple[Integer[np.ndarray, "rows cols"], Shaped[np.ndarray, "rows groups"]]:
    """Quantize to codes and scales.

    >>> quantize(np.array([[127.0, -2.0]]), scheme="q8")
    (array([[127,  -2]], dtype=int8), array([[1.]], dtype=float32))
    """
    q = SCHEMES[scheme].quantize(w)
    return q.codes, q.scales


def dequantize(
    codes: Integer[np.ndarray, "rows cols"], scales: Shaped[np.ndarray, "rows groups"], *, scheme: str
) -> Float[np.ndarray, "rows cols"]:
    """Dequantize codes and scales, in float64.

    >>> dequantize(np.array([[127, -2]], np.int8), np.array([[0.5]], np.float32), scheme="q8")
    array([[63.5, -1. ]])
    """
    return SCHEMES[scheme].dequantize(Quantized(codes, scales))


def gemv_quantized(
    x: Float[np.ndarray, " cols"],
    codes: Integer[np.ndarray, "rows cols"],
    scales: Shaped[np.ndarray, "rows groups"],
    *,
    scheme: str,
) -> Float[np.ndarray, " rows"]:
    """Compute W x, with W dequantized from codes and scales.

    >>> gemv_quantized(np.array([1.0, 2.0]), np.array([[4, -1]], np.int8), np.array([[0.5]], np.float32), scheme="q8")
    array([1.])
    """
    return linear(x, dequantize(codes, scales, scheme=scheme))


def gemm_quantized(
    x: Float[np.ndarray, "batch cols"],
    codes: Integer[np.ndarray, "rows cols"],
    scales: Shaped[np.ndarray, "rows groups"],
    *,
    scheme: str,
) -> Float[np.ndarray, "batch rows"]:
    """Compute x W^T for several vectors x, with W dequantized from codes and scales.

    >>> x = np.array([[1.0, 2.0], [0.0, 2.0]])
    >>> gemm_quantized(x, np.array([[4, -1]], np.int8), np.array([[0.5]], np.float32), scheme="q8")
    array([[ 1.],
           [-1.]])
    """
    return linear(x, dequantize(codes, scales, scheme=scheme))


def pack(codes: Integer[np.ndarray, "rows cols"], *, scheme: str) -> UInt8[np.ndarray, "rows bytes"]:
    """Pack codes into bytes.

    >>> pack(np.array([[1, -1]], np.int8), scheme="q4")
    array([[241]], dtype=uint8)
    """
    return SCHEMES[scheme].pack(codes)


def unpack(packed: UInt8[np.ndarray, "rows bytes"], *, scheme: str) -> Integer[np.ndarray, "rows cols"]:
    """Unpack codes from bytes.

    >>> unpack(np.array([[241]], np.uint8), scheme="q4")
    array([[ 1, -1]], dtype=int8)
    """
    return SCHEMES[scheme].unpack(packed)


def ggml_encode(w: Float[np.ndarray, "rows cols"], *, name: str) -> UInt8[np.ndarray, "rows bytes"]:
    """Encode weights as the bytes of a ggml type, by `ggml.encode`.

    >>> ggml_encode(np.full((1, 32), 127.0), name="Q8_0").shape
    (1, 34)
    """
    return ggml.encode(w, name)


def ggml_decode(data: UInt8[np.ndarray, "rows bytes"], *, name: str) -> Float[np.ndarray, "rows cols"]:
    """Decode rows of a GGUF file to weights, by `ggml.decode`.

    >>> ggml_decode(ggml_encode(np.full((1, 32), 127.0), name="Q8_0"), name="Q8_0")[0, :2]
    array([127., 127.])
    """
    return ggml.decode(data, name)
