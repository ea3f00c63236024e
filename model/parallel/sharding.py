"""Ways to share a model between devices for generation: by heads and columns, or by the rows of the cache."""

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
    """A way to share a model between devices.

    It says which part of each array a device holds, and has the ops that join the results of the devices.
    """

    name: ParallelName
    ops: Callable[[Ops], Ops]  # adds communication to a table of ops that compute on a share
    kv_layout: P  # sharding of keys and values [batch, kv_heads, rows, head_dim]
    hidden: P  # sharding of queries, of attention's results, and of gate and up [batch, seq, ...]

    @property
    def cuts_weights(self) -> bool:
        """True if the matrices are sharded, and False if the rows of the cache are sharded."""
        return self.name == "tensor"

    def config(self, config: Config, devices: int) -> Config:
        """Return the configuration with which each device computes. Raises ValueError as `share` does."""
        return share(config, devices) if self.cuts_weights else config

    def part(self, checkpoint: Checkpoint, *, device: int, devices: int) -> Checkpoint:
        """Return the part of a checkpoint that a device reads. Raises the errors of `share_of`."""
        return share_of(checkpoint, device=device, devices=devices) if self.cuts_weights else checkpoint

    def weights(self, params: Params, config: Config) -> Params:
        """Return a PartitionSpec for each array of `params`, the weights (or shapes) that one device holds."""
        return layouts(params, config) if self.cuts_weights else jax.tree.map(lambda _: P(), params)

    def cache(self, layers: int) -> Cache:
        """Return the sharding of a cache with `layers` layers."""
        return cache_layout(layers, self.kv_layout)

    def rows_spread(self, devices: int) -> int:
        """Return the number of devices over which the rows of a cache are sharded."""
        return 1 if self.cuts_weights else devices


TENSOR = Sharding("tensor", tensor_parallel, kv_layout=HEADS, hidden=P(None, None, AXIS))
CONTEXT = Sharding("context", context_parallel, kv_layout=P(None, None, AXIS), hidden=P())


def sharding_named(name: str) -> Sharding:
    """Return the sharding with this name. Raises ValueError for an unknown name."""
    for sharding in (TENSOR, CONTEXT):
        if sharding.name == name:
            return sharding
    raise ValueError(f"parallel must be tensor or context, got {name}")


class Parts:
    """The parts of a checkpoint that the devices read. With `quantize`, they are quantized while we read them."""

    def __init__(self, checkpoint: Checkpoint, devices: int, quantize: str | None, sharding: Sharding = TENSOR):
        """Store the arguments. Raises ValueError if `devices` cannot share the model."""
        self._checkpoint, self._devices, self._quantize, self._sharding = checkpoint, devices, quantize, sharding
        sharding.config(checkpoint.config, devices)

    def of(self, device: int) -> Checkpoint:
        """Return the share of a device. Raises CheckpointError if a cut would split a group of quantized columns.

        If we quantize by groups of columns, the codes of a share do not depend on the other columns, so we read only
        the share. If we quantize with one scale per row, we must read complete rows.
        """
        cut = partial(self._sharding.part, device=device, devices=self._devices)
        if self._quantize is None:
            return cut(self._checkpoint)
        share_of_codes = cut(quantized(self._checkpoint, self._quantize))  # this also refuses a cut within a group
        if scheme(self._quantize).group is None:
            return share_of_codes
        part = cut(self._checkpoint)
        # If the complete model ties the head to the embedding, we do not quantize the head.
        tied = replace(part, config=replace(part.config, tied=self._checkpoint.config.tied))
        return replace(quantized(tied, self._quantize), config=part.config)
