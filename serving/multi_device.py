"""The engine's programs on several devices of one process, with tensor parallelism.

Each program is one `jax.shard_map`. A device stores its share of the weights and, for its heads, a part of every page.
Page tables, tokens and sampling state are replicated, so that all devices draw the same tokens.
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
from llamaspec.serving.programs import ProgramSizes, State, empty_state


class EngineDevices(NamedTuple):
    """The devices of an engine. `config` describes the share of the model on one device."""

    partition: Partition
    config: Config

    @property
    def state(self) -> State:
        """The sharding of each array of the engine's state."""
        replicated: Any = (P(), P(), P())
        return State([(HEADS, HEADS)] * self.config.layers, *replicated)  # type: ignore[list-item]  # shardings for arrays

    def program(self, run: Callable, arguments: Sequence[Any]) -> tuple[Callable, list[Any]]:
        """Turn `run`, a program of `serving.programs` for one device, into a program for all devices.

        `arguments` are the shapes of the arguments of `run`. Returns the new program, and the shapes of its arguments
        over all devices together. Every program returns the sharded state. All programs except `set_row` also return a
        second result, which is replicated.
        """
        layouts = tuple(self._layout(argument) for argument in arguments)
        shapes = [self.partition.shapes(*pair) for pair in zip(layouts, arguments, strict=True)]
        returns_state = isinstance(arguments[0], State)  # true only for `set_row`
        results = self.state if returns_state else (self.state, P())
        mesh = self.partition.mesh
        return jax.shard_map(run, mesh=mesh, in_specs=layouts, out_specs=results, check_vma=False), shapes

    def empty_state(self, sizes: ProgramSizes) -> State:
        """Make a state with an empty cache, sharded over the devices."""
        local = jax.eval_shape(partial(empty_state, self.config, sizes))
        shapes = self.partition.shapes(self.state, local)
        where = jax.tree.map(lambda shape: shape.sharding, shapes)
        # Pages may take most of a GPU's memory. So each device makes its own zeros, without a copy on the host.
        return jax.jit(lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes), out_shardings=where)()

    def _layout(self, argument: Any) -> Any:
        if isinstance(argument, Params):
            return self.partition.weights
        return self.state if isinstance(argument, State) else jax.tree.map(lambda _: P(), argument)
