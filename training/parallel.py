"""Training on several devices: data parallelism, with whole weights on each device or with a part of them (FSDP).

The documents of a batch are spread over devices. The loss is one `jax.shard_map` that ends in a sum over devices, and
`jax.grad` goes around it: inside, a sum would be its own transpose, and gradients would be too large without a word.

The devices may belong to several processes. Each makes all documents and weights, and hands over what its devices take.
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
    """The devices of a training, and how its tensors are cut."""

    mesh: Mesh
    layout: dict[str, P]  # by the names of tensors

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.mesh.size

    def shardings(self, tree: Any) -> Any:
        """Give the shardings of tensors, of gradients, or of an optimizer's state; what has no name is everywhere."""

        def sharding(path: tuple[Any, ...], _: Any) -> NamedSharding:
            name = str(getattr(path[-1], "key", "")) if path else ""
            return NamedSharding(self.mesh, self.layout.get(name, P()))

        return jax.tree_util.tree_map_with_path(sharding, tree)

    def place(self, tree: Any) -> Any:
        """Put arrays, which every process has, where they belong."""
        return jax.tree.map(_placed, tree, self.shardings(tree))

    def documents(self, array: np.ndarray) -> jax.Array:
        """Put the rows of a batch, which every process has, on devices, as many on each."""
        return _placed(array, NamedSharding(self.mesh, P(AXIS)))

    def whole(self, tree: Any) -> Any:
        """Give every process whole copies of arrays that lie in parts on the devices of several."""
        if jax.process_count() == 1:
            return tree
        return multihost_utils.process_allgather(tree, tiled=True)

    def loss(self, summed_loss: Callable, *, config: Config, ops: Ops, dtype: np.dtype) -> Callable:
        """Make `training.objective.summed_loss` that of documents on all devices, as many on each."""
        table = gathered(ops, config)

        def on_each(tensors, ids, importance):
            whole = {**tensors, EMBEDDING: gathered_rows(tensors[EMBEDDING], (config.vocab,))}
            loss, (plain, likeliest) = summed_loss(whole, ids, importance, config=config, ops=table, dtype=dtype)
            each = lax.all_gather(likeliest, AXIS, tiled=True)  # so that every process has the answers to questions
            return lax.psum(loss, AXIS), (lax.psum(plain, AXIS), each)

        layouts = (self.layout, P(AXIS), P(AXIS))
        results = (P(), (P(), P()))
        return jax.shard_map(on_each, mesh=self.mesh, in_specs=layouts, out_specs=results, check_vma=False)


def spread(config: Config, *, devices: int, fsdp: bool) -> Spread:
    """Choose where the tensors of a training lie: cut by rows, or whole on every device.

    Raises ValueError where JAX has fewer devices.
    """
    layout = row_layouts(config, devices)
    return Spread(mesh(devices), layout if fsdp else dict.fromkeys(layout, P()))


def _placed(array: Any, sharding: NamedSharding) -> jax.Array:
    held = np.asarray(array)
    return jax.make_array_from_callback(held.shape, sharding, lambda index: held[index])


def even(rows: int, devices: int) -> int:
    """Round a number of documents up to as many on each device.

    >>> even(5, 4)
    8
    """
    return -(-rows // devices) * devices
