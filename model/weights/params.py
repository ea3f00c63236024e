"""`Params`, the weights of a model as a tree of JAX arrays, in which matrices with the same input are stacked.

q, k and v have the same input, so one product replaces three. Gate and up have the same input, so one product replaces
two. `Params.layers` is a list of layers, because JAX would copy a slice of one large array at every use.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from llamaspec.model.checkpoints.checkpoint import LowRank, no_pair
from llamaspec.model.tensors import Role, Stack, stacks, tensor_shapes
from llamaspec.model.weights.adapted import Adapted
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.embedding import Embedding
from llamaspec.model.weights.gpu_codes import Stacked
from llamaspec.reference.config import Config
from llamaspec.reference.rope import Rotation, frequencies

Matrix = Float[Array, "rows cols"] | QuantizedMatrix | Stacked | Adapted


class Linear(NamedTuple):
    weight: Matrix
    bias: Float[Array, " rows"] | None


class FeedForward(NamedTuple):
    gate_up: Linear  # [2 ffn, dim]; [ffn, dim] if there is no gate
    down: Linear


class SharedExpert(NamedTuple):
    """The shared expert, which processes every token."""

    score: Float[Array, "one dim"]
    gate_up: Linear
    down: Linear


class Experts(NamedTuple):
    router: Float[Array, "experts dim"]
    experts: Sequence[FeedForward]
    shared: SharedExpert | None = None
    router_bias: Float[Array, " experts"] | None = None


class Layer(NamedTuple):
    attention_norm: Float[Array, " dim"] | None  # None: there is no norm
    qkv: Linear  # [(heads + 2 kv_heads) head_dim, dim]
    q_norm: Float[Array, " q_width"] | None  # head_dim features, or heads * head_dim
    k_norm: Float[Array, " k_width"] | None
    o: Linear
    ffn_norm: Float[Array, " dim"] | None  # the same array as `attention_norm` in a parallel block
    ffn: FeedForward | Experts
    attention_post_norm: Float[Array, " dim"] | None = None
    ffn_post_norm: Float[Array, " dim"] | None = None
    attention_norm_bias: Float[Array, " dim"] | None = None  # for a LayerNorm
    ffn_norm_bias: Float[Array, " dim"] | None = None
    sinks: Float[Array, " heads"] | None = None


class Rope(NamedTuple):
    """Tables of cosines and sines for all positions.

    We compute angles in float64. In float32, their error would be 0.01 at position 100,000.
    """

    cos: Float[Array, "positions pairs"]
    sin: Float[Array, "positions pairs"]
    local_cos: Float[Array, "positions pairs"] | None = None  # for layers that use `config.local_theta`
    local_sin: Float[Array, "positions pairs"] | None = None

    def on_host(self, at: Int[np.ndarray, "*shape"]) -> tuple[np.ndarray, np.ndarray]:
        """Return the cosines and sines of the positions `at` as NumPy arrays.

        They are from the main tables, not from the tables for layers that use `local_theta`.
        """
        return np.asarray(self.cos)[at], np.asarray(self.sin)[at]


class Params(NamedTuple):
    embedding: Float[Array, "vocab dim"] | Embedding
    layers: Sequence[Layer]
    norm: Float[Array, " dim"]
    head: Matrix  # [vocab, dim]; the same arrays as the embedding if the two are tied
    rope: Rope
    norm_bias: Float[Array, " dim"] | None = None  # for a LayerNorm

    @property
    def tied(self) -> bool:
        return jax.tree.leaves(self.head)[0] is jax.tree.leaves(self.embedding)[0]


def rope_table(config: Config, positions: int) -> Rope:
    """Compute the tables of cosines and sines for positions 0 to `positions` - 1, in float32."""
    tables = _angles(config.rotation(), positions)
    if config.local_theta is not None:
        tables += _angles(Rotation(frequencies(config.rotary_features, theta=config.local_theta)), positions)
    return Rope(*map(jax.device_put, tables))


def _angles(rotation: Rotation, positions: int) -> tuple[np.ndarray, np.ndarray]:
    turns, length = rotation
    cos, sin = np.empty((2, positions, len(turns)), np.float32)
    for start in range(0, positions, 4096):  # A whole table in float64 would need several times the memory.
        angles = np.arange(start, min(start + 4096, positions))[:, None] * turns
        cos[start : start + 4096], sin[start : start + 4096] = length * np.cos(angles), length * np.sin(angles)
    return cos, sin


@dataclass(frozen=True)
class Names:
    """The names of the tensors that are stacked into one array of `Params`. `array_names` returns a tree of these."""

    names: tuple[str, ...]
    apart: bool = False  # whether the tensors may be separate arrays, in a `Stacked`


def array_names(config: Config, rope: Rope) -> Params:
    """Build the tree that `load_params` returns, with `Names` instead of arrays; `rope` is included unchanged."""
    return assemble(config, lambda *names, apart=False: Names(names, apart), rope)


def params_of(config: Config, tensors: Mapping[str, Array], rope: Rope) -> Params:
    """Build the tree of weights from arrays by name. JAX can trace and differentiate this function, for training."""
    return assemble(config, lambda *names, apart=False: jnp.concatenate([tensors[name] for name in names]), rope)


def adapted_params(params: Params, config: Config, pairs: Mapping[str, LowRank], *, scale: float) -> Params:
    """Return a tree of weights with adapters: each matrix that contains a weight in `pairs` becomes `Adapted`.

    `scale` is the factor s of LoRA. JAX can trace and differentiate this function.
    """
    shapes = tensor_shapes(config)

    def adapted(place: Any, matrix: Any) -> Any:
        if not isinstance(place, Names) or pairs.keys().isdisjoint(place.names):
            return matrix
        a, b = [], []
        for name in place.names:
            rows, cols = shapes[name]
            pair = pairs.get(name) or no_pair(rows, cols)
            a.append(jnp.asarray(pair.a))
            b.append(scale * jnp.asarray(pair.b))
        return Adapted(matrix, tuple(a), tuple(b))

    return jax.tree.map(adapted, array_names(config, params.rope), params)


def assemble(config: Config, place: Callable[..., Any], rope: Rope) -> Params:
    """Build the tree of weights. `place` takes the names of tensors, and returns an array with their stacked rows.

    For q, k and v, we call `place` with `apart=True`. Then `place` may return a `Stacked` if the tensors have different
    forms of codes, because the kernel for q, k and v can read several matrices.
    """

    def placed(stack: Stack) -> Any:
        array = place(*(weight.name for weight in stack.weights), apart=stack.field == "qkv")
        if stack.weights[0].role not in (Role.MATRIX, Role.EXPERT):
            return array
        return Linear(array, place(*(bias.name for bias in stack.biases)) if stack.biases else None)

    by_block: dict[tuple[int | None, int | None], dict[str, Any]] = {}  # by layer and expert, then by field
    for stack in stacks(config):
        fields = by_block.setdefault((stack.layer, stack.expert), {})
        fields[stack.field] = placed(stack)
        if stack.biases and stack.weights[0].role is Role.NORM:
            fields[f"{stack.field}_bias"] = place(*(bias.name for bias in stack.biases))
        if stack.biases and stack.weights[0].role is Role.ROUTER:
            fields["router_bias"] = place(stack.biases[0].name)

    def feed_forward(fields: dict[str, Any]) -> FeedForward:
        return FeedForward(fields["gate_up"], fields["down"])

    def layer(i: int) -> Layer:
        fields = by_block[i, None]
        second = "attention_norm" if config.parallel_residual else "ffn_norm"
        return Layer(
            attention_norm=fields.get("attention_norm"),
            qkv=fields["qkv"],
            q_norm=fields.get("q_norm"),
            k_norm=fields.get("k_norm"),
            o=fields["o"],
            ffn_norm=fields.get(second),
            ffn=Experts(
                fields["router"],
                [feed_forward(by_block[i, e]) for e in range(config.experts)],
                SharedExpert(fields["shared_score"], fields["shared_gate_up"], fields["shared_down"])
                if config.shared_ffn
                else None,
                fields.get("router_bias"),
            )
            if config.experts
            else feed_forward(fields),
            attention_post_norm=fields.get("attention_post_norm"),
            ffn_post_norm=fields.get("ffn_post_norm"),
            attention_norm_bias=fields.get("attention_norm_bias"),
            ffn_norm_bias=fields.get(f"{second}_bias"),
            sinks=fields.get("sinks"),
        )

    outside = by_block[None, None]
    table, norm = outside["embedding"], outside["norm"]
    return Params(
        embedding=Embedding(table, config.dim, norm.dtype) if isinstance(table, QuantizedMatrix) else table,
        layers=[layer(i) for i in range(config.layers)],
        norm=norm,
        head=table if config.tied else outside["head"],
        rope=rope,
        norm_bias=outside.get("norm_bias"),
    )


def weight_bytes(params: Params) -> int:
    """Count the bytes of the weights; a shared array counts once. `params` may come from `abstract_params`."""
    head = None if params.tied else params.head
    leaves = jax.tree.leaves((params.embedding, params.layers, params.norm, params.norm_bias, head))
    unique = {id(leaf): leaf for leaf in leaves}.values()  # a parallel block has one norm in two places
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in unique)
