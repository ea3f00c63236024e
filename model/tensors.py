"""The table of weights: the name, shape, logical axes and role of every tensor of a model.

Many tasks are loops over this table: loading on either backend, reading and writing files, quantization, calibration,
making initial values, and sharding over several devices.

We name a weight as Hugging Face's Llamas and Mixtrals do, for every file format. The `part` of a weight is its place in
a block, such as "q" or "down". `model.families` maps parts to the names in files.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import groupby
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from llamaspec.reference.config import Config

NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "attention_norm": "model.layers.{layer}.input_layernorm",
    "q": "model.layers.{layer}.self_attn.q_proj",
    "k": "model.layers.{layer}.self_attn.k_proj",
    "v": "model.layers.{layer}.self_attn.v_proj",
    "q_norm": "model.layers.{layer}.self_attn.q_norm",
    "k_norm": "model.layers.{layer}.self_attn.k_norm",
    "head_q_norm": "model.layers.{layer}.self_attn.q_layernorm.norms.{head}",
    "head_k_norm": "model.layers.{layer}.self_attn.k_layernorm.norms.{head}",
    "sinks": "model.layers.{layer}.self_attn.sinks",
    "o": "model.layers.{layer}.self_attn.o_proj",
    "attention_post_norm": "model.layers.{layer}.attention_output_layernorm",
    "ffn_norm": "model.layers.{layer}.post_attention_layernorm",
    "gate": "model.layers.{layer}.mlp.gate_proj",
    "up": "model.layers.{layer}.mlp.up_proj",
    "down": "model.layers.{layer}.mlp.down_proj",
    "router": "model.layers.{layer}.block_sparse_moe.gate",
    "expert_gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
    "expert_up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
    "expert_down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
    "shared_score": "model.layers.{layer}.shared_expert_gate",
    "shared_gate": "model.layers.{layer}.shared_expert.gate_proj",
    "shared_up": "model.layers.{layer}.shared_expert.up_proj",
    "shared_down": "model.layers.{layer}.shared_expert.down_proj",
    "ffn_post_norm": "model.layers.{layer}.feedforward_output_layernorm",
    "norm": "model.norm",
    "head": "lm_head",
}
EMBEDDING = f"{NAMES['embedding']}.weight"
HEAD = f"{NAMES['head']}.weight"


class Role(Enum):
    """The kind of a weight."""

    EMBEDDING = "embedding"  # [vocab, dim], a row per token; also the head, if the two are tied
    HEAD = "head"  # [vocab, dim], in a model that does not tie head and embedding
    MATRIX = "matrix"  # a matrix of attention, or of a feed-forward layer without experts
    EXPERT = "expert"  # a matrix that multiplies only the tokens of one expert
    ROUTER = "router"  # [experts, dim]
    NORM = "norm"
    BIAS = "bias"
    SINKS = "sinks"  # one attention score per head


QUANTIZABLE = (Role.HEAD, Role.MATRIX, Role.EXPERT)


class Weight(NamedTuple):
    """A tensor of a model: its place, shape, axes and role."""

    name: str
    part: str  # a key of `NAMES`; a bias has the part of its matrix or norm
    shape: tuple[int, ...]
    axes: tuple[str, ...]  # keys of `sizes` in `_weights_of`; heads and kv_heads count rows, heads * head_dim
    role: Role
    field: str  # field of `model.weights.params.Layer` or of its parts; matrices of one field are stacked by rows
    layer: int | None = None  # None: outside the blocks
    expert: int | None = None
    head: int | None = None  # the head, for a norm of a single head

    def named(self, names: Mapping[str, str]) -> str:
        """Return the name of the tensor according to a table of names such as `NAMES`.

        >>> config = Config(4, 1, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4)
        >>> [weight.named({**NAMES, "q": "blk.{layer}.attn_q"}) for weight in weights(config)][2]
        'blk.0.attn_q.weight'
        """
        name = names[self.part].format(layer=self.layer, expert=self.expert, head=self.head)
        if self.role is Role.SINKS:  # for sinks, the table has the complete name
            return name
        return f"{name}.{'bias' if self.role is Role.BIAS else 'weight'}"


class Stack(NamedTuple):
    """Weights of one block or expert, stacked by rows in one array, and their biases."""

    field: str
    layer: int | None
    expert: int | None
    weights: Sequence[Weight]
    biases: Sequence[Weight]


class _Part(NamedTuple):
    part: str
    axes: tuple[str, ...]
    role: Role
    field: str
    bias: str | None = None  # the switch of `Config` that adds a bias
    switch: str | None = None  # the switch or property of `Config` that adds this part; None: always present


_EMBEDDING = _Part("embedding", ("vocab", "dim"), Role.EMBEDDING, "embedding")
_ATTENTION = (
    _Part("attention_norm", ("dim",), Role.NORM, "attention_norm", bias="layer_norm", switch="pre_norms"),
    _Part("q", ("heads", "dim"), Role.MATRIX, "qkv", bias="qkv_bias"),
    _Part("k", ("kv_heads", "dim"), Role.MATRIX, "qkv", bias="qkv_bias"),
    _Part("v", ("kv_heads", "dim"), Role.MATRIX, "qkv", bias="qkv_bias"),
    _Part("q_norm", ("head_dim",), Role.NORM, "q_norm", switch="qk_norm"),
    _Part("k_norm", ("head_dim",), Role.NORM, "k_norm", switch="qk_norm"),
    _Part("head_q_norm", ("head_dim",), Role.NORM, "q_norm", switch="head_qk_norm"),
    _Part("head_k_norm", ("head_dim",), Role.NORM, "k_norm", switch="head_qk_norm"),
    _Part("sinks", ("each_head",), Role.SINKS, "sinks", switch="sinks"),
    _Part("o", ("dim", "heads"), Role.MATRIX, "o", bias="o_bias"),
    _Part("attention_post_norm", ("dim",), Role.NORM, "attention_post_norm", switch="post_norms"),
    _Part("ffn_norm", ("dim",), Role.NORM, "ffn_norm", bias="layer_norm", switch="two_norms"),
)
_OVER_ALL_HEADS = {
    "q_norm": ("heads",),
    "k_norm": ("kv_heads",),
}  # axes of the norms of q and k if `wide_qk_norm` is on
_FEED_FORWARD = (
    _Part("gate", ("ffn", "dim"), Role.MATRIX, "gate_up", bias="ffn_bias", switch="gated"),
    _Part("up", ("ffn", "dim"), Role.MATRIX, "gate_up", bias="ffn_bias"),
    _Part("down", ("dim", "ffn"), Role.MATRIX, "down", bias="ffn_bias"),
)
_ROUTER = _Part("router", ("experts", "dim"), Role.ROUTER, "router", bias="expert_bias")
_EXPERT = (
    _Part("expert_gate", ("ffn", "dim"), Role.EXPERT, "gate_up", bias="expert_bias"),
    _Part("expert_up", ("ffn", "dim"), Role.EXPERT, "gate_up", bias="expert_bias"),
    _Part("expert_down", ("dim", "ffn"), Role.EXPERT, "down", bias="expert_bias"),
)
_SHARED = (
    _Part("shared_score", ("one", "dim"), Role.ROUTER, "shared_score", switch="shared_ffn"),
    _Part("shared_gate", ("shared", "dim"), Role.MATRIX, "shared_gate_up", switch="shared_ffn"),
    _Part("shared_up", ("shared", "dim"), Role.MATRIX, "shared_gate_up", switch="shared_ffn"),
    _Part("shared_down", ("dim", "shared"), Role.MATRIX, "shared_down", switch="shared_ffn"),
)
_POST_NORM = _Part("ffn_post_norm", ("dim",), Role.NORM, "ffn_post_norm", switch="post_norms")
_NORM = _Part("norm", ("dim",), Role.NORM, "norm", bias="layer_norm")
_HEAD = _Part("head", ("vocab", "dim"), Role.HEAD, "head")


def weights(config: Config) -> Iterator[Weight]:
    """Yield every weight of a model with this configuration, in the order of use.

    >>> config = Config(4, 1, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4)
    >>> [weight.part for weight in weights(config)][:5]
    ['embedding', 'attention_norm', 'q', 'k', 'v']
    """
    yield from _weights_of(_EMBEDDING, config)
    for layer in range(config.layers):
        for part in _ATTENTION:
            heads = {"head_q_norm": config.heads, "head_k_norm": config.kv_heads}.get(part.part)
            for head in (None,) if heads is None else range(heads):
                yield from _weights_of(part, config, layer, head=head)
        for part in () if config.experts else _FEED_FORWARD:
            yield from _weights_of(part, config, layer)
        if config.experts:
            yield from _weights_of(_ROUTER, config, layer)
        for expert in range(config.experts):
            for part in _EXPERT:
                yield from _weights_of(part, config, layer, expert)
        for part in (*_SHARED, _POST_NORM):
            yield from _weights_of(part, config, layer)
    yield from _weights_of(_NORM, config)
    if not config.tied:
        yield from _weights_of(_HEAD, config)


def _weights_of(
    part: _Part, config: Config, layer: int | None = None, expert: int | None = None, head: int | None = None
) -> Iterator[Weight]:
    if part.switch and not getattr(config, part.switch):
        return
    sizes = {
        "vocab": config.vocab,
        "dim": config.dim,
        "heads": config.heads * config.head_dim,
        "kv_heads": config.kv_heads * config.head_dim,
        "head_dim": config.head_dim,
        "one": 1,
        "each_head": config.heads,
        "shared": config.shared_ffn,
        "ffn": config.ffn,
        "experts": config.experts,
    }
    axes = _OVER_ALL_HEADS.get(part.part, part.axes) if config.wide_qk_norm else part.axes
    shape = tuple(sizes[axis] for axis in axes)
    weight = Weight("", part.part, shape, axes, part.role, part.field, layer, expert, head)
    yield weight._replace(name=weight.named(NAMES))
    if part.bias and getattr(config, part.bias):
        bias = weight._replace(shape=shape[:1], axes=axes[:1], role=Role.BIAS)
        yield bias._replace(name=bias.named(NAMES))


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a checkpoint, in the order of use."""
    return {weight.name: weight.shape for weight in weights(config)}


def weight_count(config: Config) -> int:
    """Count the weights of a model with this configuration.

    >>> weight_count(Config(4, 0, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4, tied=True))
    44
    """
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def quantizable(config: Config) -> frozenset[str]:
    """Return the names of the matrices to quantize: all matrices that multiply activations, except routers.

    >>> config = Config(4, 1, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4, experts=2, experts_per_token=1)
    >>> sorted(set(tensor_shapes(config)) - quantizable(config))[:2]
    ['model.embed_tokens.weight', 'model.layers.0.block_sparse_moe.gate.weight']
    """
    return frozenset(weight.name for weight in weights(config) if weight.role in QUANTIZABLE)


def stacks(config: Config) -> list[Stack]:
    """Return the stacks of weights to load, in the order of use. For example, q, k and v form one stack, and gate and
    up another.

    >>> config = Config(4, 1, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4)
    >>> [(stack.field, len(stack.weights)) for stack in stacks(config)][1:4]
    [('attention_norm', 1), ('qkv', 3), ('o', 1)]
    """
    stacked = []
    for (layer, expert, field), group in groupby(
        weights(config), lambda weight: (weight.layer, weight.expert, weight.field)
    ):
        members = list(group)
        biases = [weight for weight in members if weight.role is Role.BIAS]
        stacked.append(
            Stack(field, layer, expert, [weight for weight in members if weight.role is not Role.BIAS], biases)
        )
    return stacked


def fused_rows(
    config: Config, fused: Mapping[str, tuple[str, ...]], names: Mapping[str, str]
) -> Iterator[tuple[str, list[str], list[int]]]:
    """Yield the name of each tensor in which a format joins several matrices, and the names and rows of these matrices.

    `fused` maps each common name, which may contain {layer}, to the parts that it joins.

    >>> config = Config(4, 1, 2, 1, 2, 8, vocab=10, context=8, eps=1e-5, theta=1e4)
    >>> next(fused_rows(config, {"blk.{layer}.attn_qkv": ("q", "k")}, {"q": "q.{layer}", "k": "k.{layer}"}))
    ('blk.0.attn_qkv', ['q.0', 'k.0'], [4, 2])
    """
    by_part = {part: weight for part, [weight] in by_layer(replace(config, experts=0))[0].items()} if fused else {}
    for layer in range(config.layers) if fused else ():
        for name, parts in fused.items():
            rows = [by_part[part].shape[0] for part in parts]
            yield name.format(layer=layer), [names[part].format(layer=layer) for part in parts], rows


def by_layer(config: Config) -> dict[int | None, dict[str, list[Weight]]]:
    """Group the weights, except biases, by block and part. Weights outside the blocks have the key None."""
    matches: dict[int | None, dict[str, list[Weight]]] = {}
    for weight in weights(config):
        if weight.role is not Role.BIAS:
            matches.setdefault(weight.layer, {}).setdefault(weight.part, []).append(weight)
    return matches


def rotated_heads(weight: Weight, config: Config) -> int:
    """Return how many heads the rows of a weight form if the weight is q or k, otherwise 0.

    RoPE rotates pairs of rows within these heads, and file formats order the pairs differently.
    """
    return {"q": config.heads, "k": config.kv_heads}.get(weight.part, 0)


def row_order(config: Config, n: int) -> dict[str, Int[np.ndarray, " rows"]]:
    """Order the rows of each stack so that each of `n` equal parts of the stack contains complete heads.

    Returns an array of row indices for each of the stacks "qkv" and "gate_up". Part i of n is [q_i; k_i; v_i], or
    [gate_i; up_i], where x_i is the i-th of n equal parts of x. For one device the order is the identity. Raises
    ValueError if n does not divide the heads, the kv heads or the feed-forward width.

    >>> config = Config(4, 1, 2, 2, 2, 2, vocab=10, context=8, eps=1e-5, theta=1e4)
    >>> row_order(config, 2)["qkv"].tolist(), row_order(config, 2)["gate_up"].tolist()
    ([0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11], [0, 2, 1, 3])
    """
    for what, size in (("heads", config.heads), ("kv heads", config.kv_heads), ("ffn", config.ffn)):
        if n < 1 or size % n:
            raise ValueError(f"{size} {what} cannot be cut into {n} equal parts")
    return {
        stack.field: _interleaved([weight.shape[0] for weight in stack.weights], n)
        for stack in stacks(config)
        if stack.field in ("qkv", "gate_up")
    }


def _interleaved(sizes: Sequence[int], n: int) -> Int[np.ndarray, " rows"]:
    """Return an order of the rows of stacked matrices with these sizes, so that part i of n has part i of each
    matrix.
    """
    starts = np.cumsum([0, *sizes[:-1]])
    parts = [np.split(start + np.arange(size), n) for start, size in zip(starts, sizes, strict=True)]
    return np.concatenate([part[i] for i in range(n) for part in parts])
