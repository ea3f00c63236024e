"""Codes of 1, 2, 4 or 8 bits, side by side in bytes.

The first code of a byte takes its lowest bits, which is the order of `jnp.int4`, ONNX and NumPy's
`bitorder="little"`, and that of int32 words on a little-endian machine: bytes 0 to 3 are bits 0 to 31.
Formats that order their codes otherwise permute them first. Signed codes are in two's complement.
"""

import numpy as np
from jaxtyping import Int8, Integer, UInt8


def pack(codes: Integer[np.ndarray, "*batch codes"], *, bits: int) -> UInt8[np.ndarray, "*batch bytes"]:
    """8 / `bits` codes to a byte.

    Raises ValueError where a code needs more bits, or the last axis does not fill its bytes.

    >>> [f"{byte:08b}" for byte in pack(np.array([1, -1, 0, 3]), bits=4)]
    ['11110001', '00110000']
    """
    per_byte = codes_per_byte(bits)
    if codes.shape[-1] % per_byte:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits do not fill whole bytes")
    if codes.size and (codes.min() < -(1 << bits - 1) or codes.max() >= 1 << bits):
        raise ValueError(f"codes from {codes.min()} to {codes.max()} do not fit {bits} bits")
    fields = codes.astype(np.uint8).reshape(*codes.shape[:-1], -1, per_byte) & np.uint8((1 << bits) - 1)
    return np.bitwise_or.reduce(fields << _shifts(bits), axis=-1)


def unpack(packed: UInt8[np.ndarray, "*batch bytes"], *, bits: int) -> UInt8[np.ndarray, "*batch codes"]:
    """The codes of `pack`, as unsigned numbers.

    >>> unpack(np.array([0b11110001], np.uint8), bits=4)
    array([ 1, 15], dtype=uint8)
    """
    codes_per_byte(bits)
    fields = packed[..., None] >> _shifts(bits) & np.uint8((1 << bits) - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def signed(codes: UInt8[np.ndarray, "*shape"], *, bits: int) -> Int8[np.ndarray, "*shape"]:
    """Two's complement: the upper half of the codes stands for negative numbers.

    >>> signed(np.array([0, 7, 8, 15], np.uint8), bits=4)
    array([ 0,  7, -8, -1], dtype=int8)
    """
    half = 1 << bits - 1
    return ((codes ^ np.uint8(half)).astype(np.int16) - half).astype(np.int8)


def codes_per_byte(bits: int) -> int:
    """Raises ValueError unless bytes hold a whole number of codes."""
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"codes of 1, 2, 4 or 8 bits can be packed, not of {bits}")
    return 8 // bits


def _shifts(bits: int) -> UInt8[np.ndarray, " codes"]:
    return np.arange(0, 8, bits, dtype=np.uint8)
