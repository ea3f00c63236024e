"""Packing codes of a few bits into bytes.

The bits of one code follow the bits of the previous code, from the lowest bit of a byte on. This is the order of
`jnp.int4`, ONNX, `bitorder="little"` and GPTQ's little-endian int32 words, where 3-bit codes cross word borders. By
default, the codes in a byte are neighbors. In ggml's formats they are `stride` codes apart. Then shifting and masking a
vector of bytes gives a vector of consecutive codes. Signed codes are in two's complement.
"""

import numpy as np
from jaxtyping import Int8, Integer, UInt8


def pack(
    codes: Integer[np.ndarray, "*batch codes"], *, bits: int, stride: int = 1
) -> UInt8[np.ndarray, "*batch bytes"]:
    """Pack 1 to 8 `bits` of every code. With a stride, byte m of a run has the codes m, m + stride, m + 2 stride, ...

    Raises ValueError if a code needs more bits, or if the codes of the last axis do not fill whole bytes.

    >>> [f"{byte:08b}" for byte in pack(np.array([1, -1, 0, 3]), bits=4)]
    ['11110001', '00110000']
    >>> [f"{byte:08b}" for byte in pack(np.array([1, -1, 0, 3]), bits=4, stride=2)]
    ['00000001', '00111111']
    """
    if codes.shape[-1] * bits % (8 * stride):
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill runs of {stride} bytes")
    if codes.size and (codes.min() < -(1 << bits - 1) or codes.max() >= 1 << bits):
        raise ValueError(f"codes from {codes.min()} to {codes.max()} do not fit {bits} bits")
    neighbors = codes.astype(np.uint8)
    if stride > 1:
        neighbors = neighbors.reshape(*codes.shape[:-1], -1, 8 // bits, stride).swapaxes(-1, -2)
    fields = neighbors[..., None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    return np.packbits(fields.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def unpack(
    packed: UInt8[np.ndarray, "*batch bytes"], *, bits: int, stride: int = 1
) -> UInt8[np.ndarray, "*batch codes"]:
    """Restore the codes from `pack` as unsigned numbers. Raises ValueError for an incomplete code.

    >>> unpack(np.array([0b11110001], np.uint8), bits=4)
    array([ 1, 15], dtype=uint8)
    """
    if packed.shape[-1] * 8 % bits:
        raise ValueError(f"{packed.shape[-1]} bytes end inside a code of {bits} bits")
    if 8 % bits == 0:  # if codes do not cross bytes, shifts are many times faster than single bits
        runs = packed.reshape(*packed.shape[:-1], -1, 1, stride)
        codes = runs >> np.arange(0, 8, bits, dtype=np.uint8)[:, None] & np.uint8((1 << bits) - 1)
    else:
        fields = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, bits)
        codes = np.bitwise_or.reduce(fields << np.arange(bits, dtype=np.uint8), axis=-1)
    return codes.reshape(*packed.shape[:-1], -1)


def signed(codes: UInt8[np.ndarray, "*shape"], *, bits: int) -> Int8[np.ndarray, "*shape"]:
    """Read codes as two's complement: the upper half means negative numbers.

    >>> signed(np.array([0, 7, 8, 15], np.uint8), bits=4)
    array([ 0,  7, -8, -1], dtype=int8)
    """
    half = 1 << bits - 1
    return ((codes ^ np.uint8(half)).astype(np.int16) - half).astype(np.int8)
