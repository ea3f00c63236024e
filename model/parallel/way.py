"""The ways in which devices share a model that generates: by its heads and columns, or by the rows of its cache."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from llamaspec.model.cache import Cache
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.ops.table import Ops
from llamaspec.model.parallel.context import context_parallel
from llamaspec.model.parallel.partition import HEADS, cache_layout, layouts
from llamaspec.model.parallel.reading import share_of
from llamaspec.model.parallel.share import share
from llamaspec.model.parallel.tensor import AXIS, tensor_parallel
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.schemes import scheme

WayName = Literal["tensor", "context"]


class Way(NamedTuple):
    """A way to share a model: which parts of arrays a device holds, and which ops join the devices."""

    name: WayName
    ops: Callable[[Ops], Ops]  # from a table that computes on a share
    kept: P  # the layout of keys and values [batch, kv_heads, rows, head_dim]
    hidden: P  # that of queries, and of what attention and the first feed-forward products give [batch, seq, ...]

    @property
    def cuts_weights(self) -> bool:
        """Whether a device holds a part of each matrix and all rows of the cache, or the other way around."""
        return self.name == "tensor"

    def config(self, whole: Config, devices: int) -> Config:
        """Give the configuration that each device computes with. Raises ValueError as `share` does."""
        return share(whole, devices) if self.cuts_weights else whole

    def part(self, checkpoint: Checkpoint, *, device: int, devices: int) -> Checkpoint:
        """Give what a device reads of a checkpoint. Raises as `share_of` does."""
        return share_of(checkpoint, device=device, devices=devices) if self.cuts_weights else checkpoint

    def weights(self, params: Params, config: Config) -> Params:
        """Give a PartitionSpec for each array of the weights that a device holds, or of their shapes."""
        return layouts(params, config) if self.cuts_weights else jax.tree.map(lambda _: P(), params)

    def cache(self, layers: int) -> Cache:
        """Give the layout of a cache."""
        return cache_layout(layers, self.kept)

    def rows_spread(self, devices: int) -> int:
        """Give the number of devices that the rows of a cache are dealt to."""
        return 1 if self.cuts_weights else devices


TENSOR = Way("tensor", tensor_parallel, kept=HEADS, hidden=P(None, None, AXIS))
CONTEXT = Way("context", context_parallel, kept=P(None, None, AXIS), hidden=P())


def way_named(name: str) -> Way:
    """Find a way. Raises ValueError for another name."""
    for way in (TENSOR, CONTEXT):
        if way.name == name:
            return way
    raise ValueError(f"no way to share a model is named {name}: choose tensor or context")


class Parts:
    """Parts of a checkpoint that each device reads, perhaps quantized as they are read."""

    def __init__(self, checkpoint: Checkpoint, devices: int, quantize: str | None, way: Way = TENSOR):
        """Raises ValueError where `devices` cannot share the model, or would cut a group of quantized columns."""
        self._checkpoint, self._devices, self._quantize, self._way = checkpoint, devices, quantize, way
        way.config(checkpoint.config, devices)

    def of(self, device: int) -> Checkpoint:
        """Give the share of a device.

        A scheme with groups of columns quantizes a share as it quantizes the whole, so only the share is read. A scale
        for a whole row needs the whole row.
        """
        cut = partial(self._way.part, device=device, devices=self._devices)
        if self._quantize is None:
            return cut(self._checkpoint)
        whole = cut(quantized(self._checkpoint, self._quantize))  # also refuses a cut within a group
        if scheme(self._quantize).group is None:
            return whole
        part = cut(self._checkpoint)
        # A head that is tied in the whole model is not quantized.
        tied = replace(part, config=replace(part.config, tied=self._checkpoint.config.tied))
        return replace(quantized(tied, self._quantize), config=part.config)
