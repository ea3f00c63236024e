"""A model on several devices for `verify.judging.walk`. Each op is a program for all devices.

The walk calls the ops of a model one at a time, and judges each result. It passes complete arrays to the ops and reads
complete results, so it judges several devices as it judges one. If several devices hold the same kv head, its keys and
values are read from the first of these devices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from llamaspec.model.cache import Cache, LayerCache
from llamaspec.model.candidates.walking import WalkableModel
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.ops.table import Ops, Positions
from llamaspec.model.parallel.backend import cache_shapes, load_shares
from llamaspec.model.parallel.partition import Partition, mesh
from llamaspec.model.parallel.sharding import TENSOR, Parts, Sharding
from llamaspec.model.parallel.tensor import AXIS
from llamaspec.model.running.programs import Layout
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.weights.loading import abstract_params
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

OpsFor = Callable[
    [Config, Params, int], Ops
]  # makes a table from a share's configuration and weights, and the cache's length


@dataclass(frozen=True)
class ShardedCache:
    """The cache of a layer on several devices.

    Iterating over it gives keys and values with each kv head once, in order.
    """

    cache: LayerCache
    copies: int  # number of devices that hold each kv head
    dealt: int  # number of devices over which the positions are sharded

    def __iter__(self) -> Iterator[np.ndarray]:
        for a in self.cache:
            batch, heads, rows, width = a.shape
            rows_by_device = np.asarray(a).reshape(batch, heads, self.dealt, rows // self.dealt, width)
            yield rows_by_device.swapaxes(2, 3).reshape(a.shape)[:, :: self.copies]


def walkable_on(
    checkpoint: Checkpoint,
    table: Ops | OpsFor,
    *,
    devices: int,
    dtype: np.dtype,
    rows: int,
    quantize: str | None = None,
    sharding: Sharding = TENSOR,
) -> WalkableModel:
    """Make the model of `checkpoint` in `dtype`, shared by `devices`, for a sequence of `rows` tokens.

    The ops of `table` compute on one share. `sharding` adds the communication between devices.
    """
    parts, over = Parts(checkpoint, devices, quantize, sharding), mesh(devices)
    config = sharding.config(checkpoint.config, devices)
    shares = [parts.of(i) for i in range(devices)]
    shapes = abstract_params(config, dtype=dtype, positions=rows, tensors=shares[0].tensors)
    partition = Partition(over, sharding.weights(shapes, config), sharding.cache(config.layers))
    params = load_shares(shares, partition, dtype=dtype, positions=rows)
    copies = max(1, devices // checkpoint.config.kv_heads) if sharding.cuts_weights else 1
    dealt = sharding.rows_spread(devices)
    layout = Layout(batch=1, capacity=rows, chunk=0, burst=1, cache_dtype=dtype, devices=dealt)
    ops = sharding.ops(table if isinstance(table, Ops) else table(config, shapes, layout.rows_held))
    of_weights = {id(params): partition.weights}  # `id` of a tree that the walk passes: shardings of its weights
    of_weights |= {id(layer): spec for layer, spec in zip(params.layers, partition.weights.layers, strict=True)}

    def spread(op: Callable, *layout: Any, results: Any) -> Callable:
        """Turn an op into a program for all devices. `layout` has the sharding of each argument, None for weights."""
        compiled: dict[Any, Callable] = {}

        def call(*arguments: Any, **static: Any) -> Any:
            static = {name: config if name == "config" else value for name, value in static.items()}
            plain = [a.cache if isinstance(a, ShardedCache) else a for a in arguments]
            specs = tuple(
                of_weights[id(a)] if spec is None else spec for a, spec in zip(arguments, layout, strict=True)
            )
            key = (static.get("window"), jax.tree.structure(plain))
            if key not in compiled:
                on_each = partial(op, **static)
                compiled[key] = jax.jit(
                    jax.shard_map(on_each, mesh=over, in_specs=specs, out_specs=results, check_vma=False)
                )
            return compiled[key](*plain)

        return call

    def with_sinks(q: Any, cache: Any, positions: Any, sinks: Any, **static: Any) -> Any:
        return ops.attend(q, cache, positions, **static, **({} if sinks is None else {"sinks": sinks}))

    # shardings in the place of arrays
    kv, hidden = LayerCache(sharding.kv_layout, sharding.kv_layout), sharding.hidden  # type: ignore[arg-type]
    norm_qkv: Any = spread(ops.norm_qkv, P(), None, kv, P(), results=(hidden, kv))

    def sharded_qkv(*arguments: Any, **static: Any) -> Any:
        q, cache = norm_qkv(*arguments, **static)
        assert isinstance(cache, LayerCache)
        return q, ShardedCache(cache, copies, dealt)

    attend = spread(with_sinks, hidden, kv, P(), P(AXIS) if sharding.cuts_weights else P(), results=hidden)
    walked: Any = Ops(
        norm_qkv=sharded_qkv,
        attend=lambda q, cache, at, *, sinks=None, **static: attend(q, cache, at, sinks, **static),
        project_add=spread(ops.project_add, hidden, None, P(), results=P()),
        norm_gate_up=spread(ops.norm_gate_up, P(), None, results=hidden),
        down_add=spread(ops.down_add, hidden, None, P(), results=P()),
        moe_add=spread(ops.moe_add, P(), None, results=P()),
        norm_logits=spread(ops.norm_logits, P(), None, results=P()),
    )

    def positions(at: np.ndarray) -> Positions:
        return Positions(*map(partition.replicated, (at, *params.rope.on_host(at))))

    def cache(capacity: int) -> list[Any]:
        empty: Cache = partition.zeros(partition.cache, cache_shapes(layout._replace(capacity=capacity), config))
        return [ShardedCache(layer, copies, dealt) for layer in empty.layers if isinstance(layer, LayerCache)]

    run = quantized(checkpoint, quantize) if quantize else checkpoint
    rounded_tensors = {
        name: tensor._replace(read=lambda tensor=tensor: tensor.read().astype(dtype))
        for name, tensor in run.tensors.items()
    }
    exact = load_reference_params(replace(run, tensors=rounded_tensors), lazily=True)
    return WalkableModel(params, exact, walked, cache, positions, partition.replicated)
