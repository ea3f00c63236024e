"""Training on several devices: data parallelism, with all weights on each device or with sharded weights (FSDP).

The devices share the documents of a batch. The loss is one `jax.shard_map` that ends in a sum over devices, and
`jax.grad` differentiates the whole `shard_map`. Inside the `shard_map`, `jax.grad` would treat that sum as its own
transpose, and silently return gradients that are too large.

The devices may belong to several processes. Each process makes all documents and weights, and copies to each of its own
devices only the part for this device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llamaspec.model.ops.table import Ops
from llamaspec.model.parallel.gathered import gathered, gathered_rows, row_layouts
from llamaspec.model.parallel.partition import mesh
from llamaspec.model.parallel.tensor import AXIS
from llamaspec.model.tensors import EMBEDDING
from llamaspec.reference.config import Config


class Spread(NamedTuple):
    """The devices of a training, and the sharding of its tensors."""

    mesh: Mesh
    layout: dict[str, P]  # tensor name: sharding

    @property
    def devices(self) -> int:
        """The total number of devices."""
        return self.mesh.size

    def shardings(self, tree: Any) -> Any:
        """Return the shardings of tensors, gradients or optimizer state.

        Arrays without a name in `layout` are replicated.
        """

        def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
            name = str(getattr(path[-1], "key", "")) if path else ""
            return NamedSharding(self.mesh, self.layout.get(name, P()))

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def place(self, tree: Any) -> Any:
        """Put complete arrays, which every process has, on the devices according to `shardings`."""
        return jax.tree.map(_placed, tree, self.shardings(tree))

    def documents(self, array: np.ndarray) -> jax.Array:
        """Distribute the rows of a batch evenly over the devices. Every process has a complete copy of the batch."""
        return _placed(array, NamedSharding(self.mesh, P(AXIS)))

    def gather(self, tree: Any) -> Any:
        """Return complete copies of arrays that are sharded over several processes. Every process must call this."""
        if jax.process_count() == 1:
            return tree
        return multihost_utils.process_allgather(tree, tiled=True)

    def loss(self, summed_loss: Callable, *, config: Config, ops: Ops, dtype: np.dtype) -> Callable:
        """Turn `training.objectives.supervised.summed_loss` into a sum over the documents on all devices."""
        table = gathered(ops, config)

        def on_each(tensors, ids, importance):
            all_tensors = {**tensors, EMBEDDING: gathered_rows(tensors[EMBEDDING], (config.vocab,))}
            loss, (plain, likeliest) = summed_loss(all_tensors, ids, importance, config=config, ops=table, dtype=dtype)
            # Every process needs the predicted ids of all documents.
            all_likeliest = lax.all_gather(likeliest, AXIS, tiled=True)
            return lax.psum(loss, AXIS), (lax.psum(plain, AXIS), all_likeliest)

        layouts = (self.layout, P(AXIS), P(AXIS))
        results = (P(), (P(), P()))
        return jax.shard_map(on_each, mesh=self.mesh, in_specs=layouts, out_specs=results, check_vma=False)

    def sums(self, loss: Callable) -> Callable:
        """Turn the loss of an objective into its sum over the rows of a batch on all devices.

        The trained and the frozen arrays are replicated.
        """

        def on_each(tensors, frozen, *batch):
            return lax.psum(loss(tensors, frozen, *batch), AXIS)

        def total(tensors, frozen, *batch):
            layouts = (P(), P(), *(P(AXIS) for _ in batch))
            on_all = jax.shard_map(on_each, mesh=self.mesh, in_specs=layouts, out_specs=P(), check_vma=False)
            return on_all(tensors, frozen, *batch)

        return total


def replicated(devices: int) -> Spread:
    """Choose `devices` devices, each with a copy of all arrays. Raises ValueError if JAX has fewer."""
    return Spread(mesh(devices), {})


def spread(config: Config, *, devices: int, fsdp: bool) -> Spread:
    """Choose the sharding of a training's tensors: by rows with `fsdp`, otherwise replicated.

    Raises ValueError if JAX has fewer than `devices` devices.
    """
    layout = row_layouts(config, devices)
    return Spread(mesh(devices), layout if fsdp else dict.fromkeys(layout, P()))


def _placed(array: Any, sharding: NamedSharding) -> jax.Array:
    values = np.asarray(array)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def round_up(rows: int, devices: int) -> int:
    """Round a number of rows up to a multiple of the number of devices.

    >>> round_up(5, 4)
    8
    """
    return -(-rows // devices) * devices
