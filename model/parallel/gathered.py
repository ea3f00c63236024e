"""Fully sharded data parallelism (FSDP): turns a table of ops into a table of ops that gather sharded matrices.

Each device stores a part of the rows of every matrix, and computes on different sequences. An op gathers the matrix
that it needs, and drops the matrix afterwards. The transpose of gathering is a reduce-scatter, so the gradient of a
matrix is summed over devices, and cut into the same parts (ZeRO, https://arxiv.org/abs/1910.02054).
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from llamaspec.model.ops.table import Ops
from llamaspec.model.parallel.tensor import AXIS
from llamaspec.model.tensors import QUANTIZABLE, Role, stacks
from llamaspec.model.weights.params import Experts, FeedForward, Layer, Linear
from llamaspec.reference.config import Config


def row_layouts(config: Config, devices: int) -> dict[str, P]:
    """Return the sharding of each tensor by name.

    A stack of matrices (see `tensors.stacks`) is sharded by rows if `devices` divides the rows of each of its matrices.
    Each device has a copy of all other tensors.
    """
    layouts = {}
    for stack in stacks(config):
        role = stack.weights[0].role
        rows = [weight.shape[0] for weight in stack.weights]
        even = role in (*QUANTIZABLE, Role.EMBEDDING) and not any(count % devices for count in rows)
        layouts |= {weight.name: P(AXIS) if even else P() for weight in stack.weights}
        layouts |= {bias.name: P() for bias in stack.biases}
    return layouts


def gathered(ops: Ops, config: Config) -> Ops:
    """Make the table of ops of one device from the table `ops`, which computes with complete matrices.

    `config` describes the complete model. A matrix that already has all its rows on each device is not gathered.
    """
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def linear(part: Linear, *rows: int) -> Linear:
        assert isinstance(part.weight, jnp.ndarray)
        return part._replace(weight=gathered_rows(part.weight, rows))

    def feed_forward(part: FeedForward, *, up: bool = True, down: bool = True) -> FeedForward:
        gate_up = linear(part.gate_up, config.ffn, config.ffn) if up else part.gate_up
        return FeedForward(gate_up, linear(part.down, config.dim) if down else part.down)

    def norm_qkv(x, layer: Layer, *arguments, config: Config):
        return ops.norm_qkv(
            x, layer._replace(qkv=linear(layer.qkv, width, kv_width, kv_width)), *arguments, config=config
        )

    def project_add(h, layer: Layer, x, *, total=None):
        return ops.project_add(h, layer._replace(o=linear(layer.o, x.shape[-1])), x, total=total)

    def norm_gate_up(x, layer: Layer, *, config: Config):
        assert isinstance(layer.ffn, FeedForward)
        return ops.norm_gate_up(x, layer._replace(ffn=feed_forward(layer.ffn, down=False)), config=config)

    def down_add(g, layer: Layer, x, *, total=None):
        assert isinstance(layer.ffn, FeedForward)
        return ops.down_add(g, layer._replace(ffn=feed_forward(layer.ffn, up=False)), x, total=total)

    def moe_add(x, layer: Layer, *, config: Config, total=None):
        assert isinstance(layer.ffn, Experts)
        experts = [feed_forward(expert) for expert in layer.ffn.experts]
        gathered_layer = layer._replace(ffn=layer.ffn._replace(experts=experts))
        return ops.moe_add(x, gathered_layer, config=config, total=total)

    def norm_logits(x, params, *, config: Config):
        gathered_params = params._replace(head=gathered_rows(params.head, (config.vocab,)))
        return ops.norm_logits(x, gathered_params, config=config)

    return ops._replace(
        norm_qkv=norm_qkv,
        project_add=project_add,
        norm_gate_up=norm_gate_up,
        down_add=down_add,
        moe_add=moe_add,
        norm_logits=norm_logits,
    )


def gathered_rows(part: Float[Array, "part cols"], rows: Sequence[int]) -> Float[Array, "rows cols"]:
    """Gather the rows of stacked matrices from all devices.

    `part` has this device's rows of each matrix, and `rows` the number of rows of each matrix.
    """
    if part.shape[0] == sum(rows):
        return part
    devices = sum(rows) // part.shape[0]
    parts = lax.all_gather(part, AXIS)  # [devices, part, cols]
    ends = [sum(rows[: i + 1]) // devices for i in range(len(rows) - 1)]
    return jnp.concatenate([matrix.reshape(-1, part.shape[1]) for matrix in jnp.split(parts, ends, axis=1)])
