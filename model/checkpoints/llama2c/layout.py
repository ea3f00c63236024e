"""The layouts of llama2.c's files (https://github.com/karpathy/llama2.c, export.py).

    v0    a header of 28 bytes; weights in float32
    v1    a header of 256 bytes, which begins with a magic number; weights in float32; no RoPE tables
    v2    the header of v1; all weights except the norms are int8 in groups; after the codes of a tensor, the file has
          a float32 scale for each group; no RoPE tables
    v3    version 3 of KuiperLLama (https://github.com/zjhellofss/KuiperLLama, tools/export.py): the header of v0 and
          an int32, the group size; matrices in int8 as in v2, then the embedding in float32; no RoPE tables

A header is seven 32-bit integers: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len. Versions 0
and 3 negate vocab_size if the output projection is not the embedding; versions 1 and 2 have a byte for this. Files
group tensors by kind: for example, the q matrices of all layers come together. RoPE pairs of q and k are interleaved.

A file of version 3 does not state its version: we recognize it by its size. If the output projection is tied,
KuiperLLama reads the embedding's float32 numbers as codes; we read them as float32.

Headers leave out theta, eps and special tokens, which run.c fixes: theta 10000, eps 1e-5, BOS 1, EOS 2. In run.c, BOS
also ends generation.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from llamaspec.model.tensors import Role, Weight, weights
from llamaspec.reference.config import Config

THETA = 10_000.0
EPS = 1e-5
BOS = 1
STOPS = frozenset({1, 2})

MAGIC = struct.pack("<I", 0x616B3432)  # "ak42", backwards in the file
LEGACY_HEADER = struct.Struct("<7i")
HEADER = struct.Struct("<4si7iB")  # for versions 1 and 2; in version 2, an unaligned int32 follows: the group size
HEADER_BYTES = {0: LEGACY_HEADER.size, 1: 256, 2: 256, 3: LEGACY_HEADER.size + 4}
KUIPER = 3

ROPE_TABLES = "rope"  # cosines, then sines, [context, head_dim / 2] each; only old readers use these tables

# The order of the parts of `model.tensors` in a file; all layers of a part come together.
_MATRICES = ("q", "k", "v", "o", "gate", "down", "up")
_LEGACY_ORDER = (
    "embedding", "attention_norm", "q", "k", "v", "o", "ffn_norm", "gate", "down", "up", "norm", ROPE_TABLES, "head",
)  # fmt: skip
_ORDER = ("attention_norm", "ffn_norm", "norm", "embedding", *_MATRICES, "head")
_KUIPER_ORDER = (*_MATRICES, "head", "embedding", "attention_norm", "ffn_norm", "norm")
ORDER = {0: _LEGACY_ORDER, 1: _ORDER, 2: _ORDER, KUIPER: _KUIPER_ORDER}


class StoredBlock(NamedTuple):
    """A tensor in a file of llama2.c."""

    weight: Weight | None  # None: the RoPE tables
    shape: tuple[int, ...]
    group: int  # number of weights that share a scale; 0: the tensor is float32

    @property
    def bytes(self) -> int:
        size = math.prod(self.shape)
        return size + 4 * (size // self.group) if self.group else 4 * size


def stored_tensors(config: Config, *, version: int, group: int = 0) -> Iterator[StoredBlock]:
    """Yield the tensors that follow the header, in the file's order."""
    by_part: dict[str, list[Weight]] = {}
    for weight in weights(config):
        by_part.setdefault(weight.part, []).append(weight)
    for part in ORDER[version]:
        if part == ROPE_TABLES:
            yield StoredBlock(None, (2 * config.context, config.head_dim // 2), 0)
        for weight in by_part.get(part, []):  # a tied model has no head
            plain = weight.role is Role.NORM or (version == KUIPER and weight.role is Role.EMBEDDING)
            yield StoredBlock(weight, weight.shape, 0 if plain else group)


def file_bytes(config: Config, *, version: int, group: int = 0) -> int:
    """Compute the size of a whole file in bytes. This is fast even if a header states millions of layers."""
    of_one_layer = stored_tensors(replace(config, layers=1), version=version, group=group)
    sizes = HEADER_BYTES[version]
    for stored in of_one_layer:
        in_layers = stored.weight is not None and stored.weight.layer is not None
        sizes += stored.bytes * (config.layers if in_layers else 1)
    return sizes
