"""A table of ggml types by name, and conversion of tensors to and from the bytes of a GGUF file.

A type stores `weights` consecutive weights of a row in `bytes` bytes. `quantize` computes codes and scales,
`dequantize` turns them into weights again, and `pack` and `unpack` convert between codes and bytes.
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
class BlockReader(Protocol):
    """A ggml type that we can read: `unpack` gives codes and scales, and `dequantize` turns these into weights."""

    @property
    def weights(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def dequantize(self, q: Any) -> Float64[np.ndarray, "*batch cols"]: ...
    def unpack(self, packed: UInt8[np.ndarray, "*batch blocks bytes"]) -> Any: ...


@runtime_checkable
class Type(BlockReader, Protocol):
    """A ggml type that we can also write: `quantize` gives codes and scales, and `pack` turns these into bytes."""

    def quantize(self, w: Float[np.ndarray, "*batch cols"]) -> Any: ...
    def pack(self, q: Any) -> UInt8[np.ndarray, "*batch blocks bytes"]: ...


class SearchedType(Type, Protocol):
    """A ggml type that can use the importances of columns in a search for the best scales."""

    def quantize(
        self, w: Float[np.ndarray, "*batch cols"], importance: Float[np.ndarray, " cols"] | None = None
    ) -> Any: ...


SEARCHED: dict[str, SearchedType] = {
    "Q4_0": Q4_0,
    "Q4_1": Q4_1,
    "Q5_0": Q5_0,
    "Q5_1": Q5_1,
    "Q2_K": Q2_K,
    "Q3_K": Q3_K,
    "Q4_K": Q4_K,
    "Q5_K": Q5_K,
    "Q6_K": Q6_K,
    "IQ4_NL": IQ4_NL,
}
TYPES: dict[str, Type] = {
    **SEARCHED,
    "Q8_0": Q8_0,
    "TQ1_0": TQ1_0,
    "TQ2_0": TQ2_0,
    "MXFP4": MXFP4,
}
READABLE: dict[str, BlockReader] = {
    **TYPES,  # we can only read the other types: they have no `quantize`
    "IQ1_S": IQ1_S,
    "IQ1_M": IQ1_M,
    "IQ2_XXS": IQ2_XXS,
    "IQ2_XS": IQ2_XS,
    "IQ2_S": IQ2_S,
    "IQ3_XXS": IQ3_XXS,
    "IQ3_S": IQ3_S,
    "IQ4_XS": IQ4_XS,
}


def encode(
    w: Float[np.ndarray, "*batch cols"], name: str, importance: Float[np.ndarray, " cols"] | None = None
) -> UInt8[np.ndarray, "*batch bytes"]:
    """Encode the rows of `w` for a GGUF file.

    `importance` says how much an error in a column counts. Types that are not in `SEARCHED` do not use it.

    Raises ValueError for an unknown type, rows that are not complete blocks, or weights out of the type's range.

    >>> encode(np.ones((2, 32)), "Q4_0").shape
    (2, 18)
    """
    if name not in TYPES:
        raise ValueError(f"no ggml type {name}: expected one of {', '.join(TYPES)}")
    kind = TYPES[name]
    q = kind.quantize(w) if importance is None or name not in SEARCHED else SEARCHED[name].quantize(w, importance)
    return kind.pack(q).reshape(*w.shape[:-1], -1)


def decode(data: UInt8[np.ndarray, "*batch bytes"], name: str) -> Float64[np.ndarray, "*batch cols"]:
    """Decode rows of a GGUF file to exact weights. ggml computes the same in float32, which rounds once.

    Raises ValueError for an unknown type, or rows that are not complete blocks.

    >>> decode(encode(-np.ones((2, 32)), "Q4_0"), "Q4_0")[1, 30:]
    array([-1., -1.])
    """
    if name not in READABLE:
        raise ValueError(f"no ggml type {name}: expected one of {', '.join(READABLE)}")
    kind = READABLE[name]
    if data.shape[-1] % kind.bytes:
        raise ValueError(f"rows of {data.shape[-1]} bytes do not fill blocks of {name}, {kind.bytes} bytes each")
    return kind.dequantize(kind.unpack(data.reshape(*data.shape[:-1], -1, kind.bytes)))
