"""The layout of GGUF files (https://github.com/ggml-org/ggml, docs/gguf.md).

    "GGUF", u32 version, u64 number of tensors, u64 number of keys
    each key        string (name), u32 type of the value, the value; a list is u32 type, u64 length, the values
    each tensor     string (name), u32 number of axes, u64 size of each axis, innermost axis first, u32 type, u64 offset
    padding         to a multiple of general.alignment, 32 if no key states it; offsets count from here
    each tensor     the rows, in blocks (see `reference.quantizers.ggml`), padded in the same way

All numbers are little-endian. A string is a u64 length, then UTF-8. Version 3 differs from version 2 only in that it
also allows big-endian files.

Files of the architecture "llama" interleave the RoPE pairs of q and k; other architectures keep the pairs as halves.
One tensor holds the matrices of all experts of a layer. Files leave out a tied output matrix.
"""

import struct
from typing import NamedTuple

from llamaspec.model.family import Architecture
from llamaspec.model.tensors import Weight, rotated_heads, weights
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.ggml import READABLE

ALIGNMENT = 32
LONGEST_NAME = 64  # bytes of a tensor's name
MOST_AXES = 4

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", UINT32: "<u4", INT32: "<i4", FLOAT32: "<f4", BOOL: "<u1"} | {
    UINT64: "<u8",
    11: "<i8",
    12: "<f8",
}  # NumPy's code for each GGUF type with a fixed size
LENGTH = struct.Struct("<Q")

EMBEDDING, ROPE_FACTORS = "token_embd.weight", "rope_freqs.weight"
FIRST_EXPERT = "blk.0.ffn_gate.0"  # Only files from before April 2024 have a tensor for each expert, such as this.
LONG_ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


class BlockType(NamedTuple):
    """The block size of one of ggml's types: the number of weights and the number of bytes in a block."""

    weights: int
    bytes: int


FLOATS = {"F32": BlockType(1, 4), "F16": BlockType(1, 2), "BF16": BlockType(1, 2)}
BLOCKS = FLOATS | {name: BlockType(kind.weights, kind.bytes) for name, kind in READABLE.items()}
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
# Types that ggml no longer supports, with their old name and the type to use instead (ggml/include/ggml.h). Types such
# as Q4_0_4_4 had weights rearranged for one kind of processor; programs now rearrange weights when they load a file.
DROPPED_TYPES = {
    4: ("Q4_2", "Q4_0"), 5: ("Q4_3", "Q4_1"), 31: ("Q4_0_4_4", "Q4_0"), 32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"), 36: ("IQ4_NL_4_4", "IQ4_NL"), 37: ("IQ4_NL_4_8", "IQ4_NL"), 38: ("IQ4_NL_8_8", "IQ4_NL"),
}  # fmt: skip
TYPE_CODES = {name: code for code, name in TYPE_NAMES.items()}


class WeightPlace(NamedTuple):
    """The location of a weight in a file."""

    name: str
    at: int | None  # index of the expert, or of the head for a norm, on the outermost axis; None: the whole tensor
    heads: int  # number of heads if the rows have interleaved RoPE pairs; else 0


def stored_shape(weight: Weight) -> tuple[int, ...]:
    """Return the shape of a weight in a file. A file stores a matrix of one row as a vector."""
    return weight.shape[1:] if weight.axes[0] == "one" else weight.shape


def places(config: Config, architecture: Architecture) -> dict[Weight, WeightPlace]:
    """Return the location of each weight, in the order of use."""
    return {
        weight: WeightPlace(
            weight.named(architecture.names),
            weight.head if weight.expert is None else weight.expert,
            rotated_heads(weight, config) if architecture.interleaved else 0,
        )
        for weight in weights(config)
    }
