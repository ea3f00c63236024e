"""Codes of 1, 2, 4 or 8 bits, side by side in bytes.

The first code of a byte takes its lowest bits. Codes that share a byte are neighbours, which is the order
of `jnp.int4`, ONNX and little-endian int32 words; or they lie `stride` apart, as in ggml's formats, so that
a vector of bytes, shifted and masked, gives a vector of consecutive codes. Signed codes are in two's
complement.
"""

import numpy as np
from jaxtyping import Int8, Integer, UInt8


def pack(
    codes: Integer[np.ndarray, "*batch codes"], *, bits: int, stride: int = 1
) -> UInt8[np.ndarray, "*batch bytes"]:
    """8 / `bits` codes to a byte: byte m of a run holds the codes m, m + stride, m + 2 stride, ...

    Raises ValueError where a code needs more bits, or the last axis does not fill its bytes.

    >>> [f"{byte:08b}" for byte in pack(np.array([1, -1, 0, 3]), bits=4)]
    ['11110001', '00110000']
    >>> [f"{byte:08b}" for byte in pack(np.array([1, -1, 0, 3]), bits=4, stride=2)]
    ['00000001', '00111111']
    """
    shifts = _shifts(bits)
    if codes.shape[-1] % (len(shifts) * stride):
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill runs of {stride} bytes")
    if codes.size and (codes.min() < -(1 << bits - 1) or codes.max() >= 1 << bits):
        raise ValueError(f"codes from {codes.min()} to {codes.max()} do not fit {bits} bits")
    fields = codes.astype(np.uint8).reshape(*codes.shape[:-1], -1, len(shifts), stride) & np.uint8((1 << bits) - 1)
    return np.bitwise_or.reduce(fields << shifts, axis=-2).reshape(*codes.shape[:-1], -1)


def unpack(
    packed: UInt8[np.ndarray, "*batch bytes"], *, bits: int, stride: int = 1
) -> UInt8[np.ndarray, "*batch codes"]:
    """The codes of `pack`, as unsigned numbers.

    >>> unpack(np.array([0b11110001], np.uint8), bits=4)
    array([ 1, 15], dtype=uint8)
    """
    runs = packed.reshape(*packed.shape[:-1], -1, 1, stride)
    return (runs >> _shifts(bits) & np.uint8((1 << bits) - 1)).reshape(*packed.shape[:-1], -1)


def signed(codes: UInt8[np.ndarray, "*shape"], *, bits: int) -> Int8[np.ndarray, "*shape"]:
    """Two's complement: the upper half of the codes stands for negative numbers.

    >>> signed(np.array([0, 7, 8, 15], np.uint8), bits=4)
    array([ 0,  7, -8, -1], dtype=int8)
    """
    half = 1 << bits - 1
    return ((codes ^ np.uint8(half)).astype(np.int16) - half).astype(np.int8)


def _shifts(bits: int) -> UInt8[np.ndarray, "codes 1"]:
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"codes of 1, 2, 4 or 8 bits can be packed, not of {bits}")
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]
