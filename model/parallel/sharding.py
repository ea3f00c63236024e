"""How devices share a model that generates: by its heads and columns, or by the rows of its cache."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from llamaspec.model.cache import Cache
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.ops.table import Ops
from llamaspec.model.options import ParallelName
from llamaspec.model.parallel.context import context_parallel
from llamaspec.model.parallel.partition import HEADS, cache_layout, layouts
from llamaspec.model.parallel.reading import share_of
from llamaspec.model.parallel.share import share
from llamaspec.model.parallel.tensor import AXIS, tensor_parallel
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.schemes import scheme


class Sharding(NamedTuple):
    """How devices share a model: which parts of arrays each device holds, and which ops join the devices."""

    name: ParallelName
    ops: Callable[[Ops], Ops]  # from a table that computes on a share
    kv_layout: P  # the layout of keys and values [batch, kv_heads, rows, head_dim]
    hidden: P  # the layout of queries and of the results of attention and of gate and up [batch, seq, ...]

    @property
    def cuts_weights(self) -> bool:
        """Whether a device holds a part of each matrix and all rows of the cache, or the other way around."""
        return self.name == "tensor"

    def config(self, config: Config, devices: int) -> Config:
        """Give the configuration that each device computes with. Raises ValueError as `share` does."""
        return share(config, devices) if self.cuts_weights else config

    def part(self, checkpoint: Checkpoint, *, device: int, devices: int) -> Checkpoint:
        """Give what a device reads of a checkpoint. Raises as `share_of` does."""
        return share_of(checkpoint, device=device, devices=devices) if self.cuts_weights else checkpoint

    def weights(self, params: Params, config: Config) -> Params:
        """Give a PartitionSpec for each array of the weights that a device holds, or of their shapes."""
        return layouts(params, config) if self.cuts_weights else jax.tree.map(lambda _: P(), params)

    def cache(self, layers: int) -> Cache:
        """Give the layout of a cache."""
        return cache_layout(layers, self.kv_layout)

    def rows_spread(self, devices: int) -> int:
        """Give the number of devices that the rows of a cache are dealt to."""
        return 1 if self.cuts_weights else devices


TENSOR = Sharding("tensor", tensor_parallel, kv_layout=HEADS, hidden=P(None, None, AXIS))
CONTEXT = Sharding("context", context_parallel, kv_layout=P(None, None, AXIS), hidden=P())


def sharding_named(name: str) -> Sharding:
    """Find a sharding by name. Raises ValueError for another name."""
    for sharding in (TENSOR, CONTEXT):
        if sharding.name == name:
            return sharding
    raise ValueError(f"no sharding named {name}: choose tensor or context")


class Parts:
    """Parts of a checkpoint that each device reads, perhaps quantized as they are read."""

    def __init__(self, checkpoint: Checkpoint, devices: int, quantize: str | None, sharding: Sharding = TENSOR):
        """Raises ValueError if `devices` cannot share the model, or would cut a group of quantized columns."""
        self._checkpoint, self._devices, self._quantize, self._sharding = checkpoint, devices, quantize, sharding
        sharding.config(checkpoint.config, devices)

    def of(self, device: int) -> Checkpoint:
        """Give the share of a device.

        A scheme with groups of columns quantizes a share as it quantizes the whole, so only the share is read. A scale
        for a whole row needs the whole row.
        """
        cut = partial(self._sharding.part, device=device, devices=self._devices)
        if self._quantize is None:
            return cut(self._checkpoint)
        share_of_codes = cut(quantized(self._checkpoint, self._quantize))  # also refuses a cut within a group
        if scheme(self._quantize).group is None:
            return share_of_codes
        part = cut(self._checkpoint)
        # A head that is tied in the whole model is not quantized.
        tied = replace(part, config=replace(part.config, tied=self._checkpoint.config.tied))
        return replace(quantized(tied, self._quantize), config=part.config)
