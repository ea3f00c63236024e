"""How llama2.c's files are laid out (https://github.com/karpathy/llama2.c, export.py).

    v0    28 bytes of header, float32
    v1    256 bytes of header that begin with a magic number, float32, no RoPE tables
    v2    as v1; all but the norms are int8 in groups, each tensor followed by a float32 scale for each group
    v3    KuiperLLama's (https://github.com/zjhellofss/KuiperLLama, tools/export.py), which it calls so itself: the
          header of v0 and an int32, the group size; int8 as in v2, but the embedding, which comes after; no RoPE tables

A header is seven 32-bit integers: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, max_seq_len. Version 0
negates vocab_size where the output projection is not the embedding; the others say so in a byte of its own.
Tensors lie kind by kind, all layers of one kind together. The pairs of q and k are interleaved.
Version 3 says nothing of itself: it is told by its size. Where the output projection is the embedding, KuiperLLama
takes the float32 of the embedding for codes; here it is what it is.
What a header does not say is fixed in run.c: theta 10000, eps 1e-5, BOS 1, EOS 2; and BOS ends a text as well.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from model.checkpoints.checkpoint import tensor_shapes
from reference.config import Config

THETA = 10_000.0
EPS = 1e-5
BOS = 1
STOPS = frozenset({1, 2})

MAGIC = struct.pack("<I", 0x616B3432)  # "ak42", backwards in the file
LEGACY_HEADER = struct.Struct("<7i")
HEADER = struct.Struct("<4si7iB")  # of versions 1 and 2, where an unaligned int32 follows: the group size of version 2
HEADER_BYTES = {0: LEGACY_HEADER.size, 1: 256, 2: 256, 3: LEGACY_HEADER.size + 4}
KUIPER = 3

EMBEDDING = "model.embed_tokens.weight"
ATTENTION_NORM = "model.layers.{}.input_layernorm.weight"
Q = "model.layers.{}.self_attn.q_proj.weight"
K = "model.layers.{}.self_attn.k_proj.weight"
V = "model.layers.{}.self_attn.v_proj.weight"
O = "model.layers.{}.self_attn.o_proj.weight"  # noqa: E741
FFN_NORM = "model.layers.{}.post_attention_layernorm.weight"
GATE = "model.layers.{}.mlp.gate_proj.weight"
DOWN = "model.layers.{}.mlp.down_proj.weight"
UP = "model.layers.{}.mlp.up_proj.weight"
NORM = "model.norm.weight"
ROPE_TABLES = "rope"  # cosines, then sines, [context, head_dim / 2] each; written for readers older than ours
HEAD = "lm_head.weight"

_LEGACY_ORDER = (EMBEDDING, ATTENTION_NORM, Q, K, V, O, FFN_NORM, GATE, DOWN, UP, NORM, ROPE_TABLES, HEAD)
_ORDER = (ATTENTION_NORM, FFN_NORM, NORM, EMBEDDING, Q, K, V, O, GATE, DOWN, UP, HEAD)
_KUIPER_ORDER = (Q, K, V, O, GATE, DOWN, UP, HEAD, EMBEDDING, ATTENTION_NORM, FFN_NORM, NORM)
ORDER = {0: _LEGACY_ORDER, 1: _ORDER, 2: _ORDER, KUIPER: _KUIPER_ORDER}


class Stored(NamedTuple):
    """A tensor as a file of one of the versions holds it."""

    name: str
    shape: tuple[int, ...]
    group: int  # values that share a scale; 0: float32

    @property
    def bytes(self) -> int:
        size = math.prod(self.shape)
        return size + 4 * (size // self.group) if self.group else 4 * size


def stored_tensors(config: Config, *, version: int, group: int = 0) -> Iterator[Stored]:
    """What a file holds after its header, in its order."""
    shapes = tensor_shapes(config) | {ROPE_TABLES: (2 * config.context, config.head_dim // 2)}
    for kind in ORDER[version]:
        for layer in range(config.layers if "{}" in kind else 1):
            name = kind.format(layer)
            if name in shapes:  # a tied model has no head
                plain = len(shapes[name]) < 2 or (version == KUIPER and kind == EMBEDDING)
                yield Stored(name, shapes[name], 0 if plain else group)


def file_bytes(config: Config, *, version: int, group: int = 0) -> int:
    """The size of a whole file, in time that does not depend on the number of layers."""
    one = {
        tensor.name: tensor.bytes for tensor in stored_tensors(replace(config, layers=1), version=version, group=group)
    }
    a_layer = sum(size for name, size in one.items() if name.startswith("model.layers."))
    return HEADER_BYTES[version] + sum(one.values()) + (config.layers - 1) * a_layer
