"""The engine's programs on several devices of one process, by tensor parallelism.

Each program is one `jax.shard_map`. A device holds its heads' part of every page, and its share of the weights. Tables
of pages, tokens and what rows need to draw are whole on every device, so that all draw the same.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from llamaspec.model.parallel.partition import HEADS, Partition
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.serving.programs import Sizes, State, empty_state


class EngineDevices(NamedTuple):
    """The devices of an engine. `config` is that of a device's share."""

    partition: Partition
    config: Config

    @property
    def state(self) -> State:
        """Give the layout of the state."""
        whole: Any = (P(), P(), P())
        return State([(HEADS, HEADS)] * self.config.layers, *whole)  # type: ignore[list-item]

    def program(self, run: Callable, arguments: Sequence[Any]) -> tuple[Callable, list[Any]]:
        """Make a program of `serving.programs`, and its arguments' shapes on a device, into those of all devices.

        The first result of each is the state; other results are whole on every device.
        """
        layouts = tuple(self._layout(argument) for argument in arguments)
        shapes = [self.partition.shapes(*both) for both in zip(layouts, arguments, strict=True)]
        alone = isinstance(arguments[0], State)  # it gives nothing but the state
        results = self.state if alone else (self.state, P())
        mesh = self.partition.mesh
        return jax.shard_map(run, mesh=mesh, in_specs=layouts, out_specs=results, check_vma=False), shapes

    def empty_state(self, sizes: Sizes) -> State:
        """Make the state in which nothing is cached."""
        local = jax.eval_shape(partial(empty_state, self.config, sizes))
        shapes = self.partition.shapes(self.state, local)
        where = jax.tree.map(lambda shape: shape.sharding, shapes)
        # Pages may take most of a GPU's memory, so they are made there.
        return jax.jit(lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes), out_shardings=where)()

    def _layout(self, argument: Any) -> Any:
        if isinstance(argument, Params):
            return self.partition.weights
        return self.state if isinstance(argument, State) else jax.tree.map(lambda _: P(), argument)
