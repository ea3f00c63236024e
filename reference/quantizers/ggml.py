"""Every ggml type that is defined here, by name; tensors to and from the bytes of a GGUF file.

A type turns `weights` consecutive weights of a row into `bytes` bytes. Its `quantize` gives codes and
scales, `dequantize` the weights that these stand for, and `pack` and `unpack` go between them and the
bytes.
"""

from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float64, UInt8

from llamaspec.reference.quantizers.ggml_blocks import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
from llamaspec.reference.quantizers.ggml_codebooks import IQ4_NL, MXFP4
from llamaspec.reference.quantizers.ggml_lattices import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_XS
from llamaspec.reference.quantizers.ggml_superblocks import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from llamaspec.reference.quantizers.ggml_ternary import TQ1_0, TQ2_0


@runtime_checkable
class Readable(Protocol):
    """Bytes to blocks of codes and scales, and those to rows of weights."""

    @property
    def weights(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def dequantize(self, q: Any) -> Float64[np.ndarray, "*batch cols"]: ...
    def unpack(self, packed: UInt8[np.ndarray, "*batch blocks bytes"]) -> Any: ...


@runtime_checkable
class Type(Readable, Protocol):
    """Rows of weights to blocks of codes and scales, and those to bytes, too."""

    def quantize(self, w: Float[np.ndarray, "*batch cols"]) -> Any: ...
    def pack(self, q: Any) -> UInt8[np.ndarray, "*batch blocks bytes"]: ...


TYPES: dict[str, Type] = {
    "Q4_0": Q4_0,
    "Q4_1": Q4_1,
    "Q5_0": Q5_0,
    "Q5_1": Q5_1,
    "Q8_0": Q8_0,
    "Q2_K": Q2_K,
    "Q3_K": Q3_K,
    "Q4_K": Q4_K,
    "Q5_K": Q5_K,
    "Q6_K": Q6_K,
    "IQ4_NL": IQ4_NL,
    "TQ1_0": TQ1_0,
    "TQ2_0": TQ2_0,
    "MXFP4": MXFP4,
}
READABLE: dict[str, Readable] = {
    **TYPES,  # those that are only read have no `quantize`
    "IQ1_S": IQ1_S,
    "IQ1_M": IQ1_M,
    "IQ2_XXS": IQ2_XXS,
    "IQ2_XS": IQ2_XS,
    "IQ2_S": IQ2_S,
    "IQ3_XXS": IQ3_XXS,
    "IQ3_S": IQ3_S,
    "IQ4_XS": IQ4_XS,
}


def encode(w: Float[np.ndarray, "*batch cols"], name: str) -> UInt8[np.ndarray, "*batch bytes"]:
    """The rows of `w` as a GGUF file holds them.

    Raises ValueError for an unknown type, rows that are no whole blocks, or weights that the type cannot hold.

    >>> encode(np.ones((2, 32)), "Q4_0").shape
    (2, 18)
    """
    if name not in TYPES:
        raise ValueError(f"{name} is none of the ggml types {', '.join(TYPES)}")
    kind = TYPES[name]
    return kind.pack(kind.quantize(w)).reshape(*w.shape[:-1], -1)


def decode(data: UInt8[np.ndarray, "*batch bytes"], name: str) -> Float64[np.ndarray, "*batch cols"]:
    """The weights of such rows; ggml computes them in float32, which rounds these once.

    Raises ValueError for an unknown type, or rows that are no whole blocks.

    >>> decode(encode(-np.ones((2, 32)), "Q4_0"), "Q4_0")[1, 30:]
    array([-1., -1.])
    """
    if name not in READABLE:
        raise ValueError(f"{name} is none of the ggml types {', '.join(READABLE)}")
    kind = READABLE[name]
    if data.shape[-1] % kind.bytes:
        raise ValueError(f"rows of {data.shape[-1]} bytes are no whole blocks of {name}, {kind.bytes} bytes each")
    return kind.dequantize(kind.unpack(data.reshape(*data.shape[:-1], -1, kind.bytes)))
