"""A model on several devices: how each array is sharded, and programs that run on all devices at once.

Every program is one `jax.shard_map`. In it, each device sees its own part of each array, and ops call collectives
explicitly. We do not use XLA's partitioner, because it cannot look into a kernel. It would therefore gather a complete
matrix before each kernel.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llamaspec.model.cache import Cache, LayerCache
from llamaspec.model.device import devices as all_devices
from llamaspec.model.forward import decode, forward, prefill
from llamaspec.model.parallel.share import cut_axis
from llamaspec.model.parallel.tensor import AXIS
from llamaspec.model.tensors import weights
from llamaspec.model.weights.adapted import Adapted
from llamaspec.model.weights.params import Names, Params, array_names
from llamaspec.reference.config import Config

CACHE = 2  # index of the cache among a program's arguments; the program donates the cache
HEADS = P(None, AXIS)  # sharding of keys and values [batch, kv_heads, rows, head_dim] by heads


def mesh(devices: int) -> Mesh:
    """Make a mesh of the first `devices` of JAX's devices. Raises ValueError if JAX has fewer devices."""
    available = all_devices()
    if len(available) < devices:
        hint = "; XLA_FLAGS=--xla_force_host_platform_device_count=N makes N virtual devices of a CPU"
        raise ValueError(
            f"expected {devices} devices, but JAX has {len(available)}{hint * (available[0].platform == 'cpu')}"
        )
    return Mesh(np.array(available[:devices]), (AXIS,))


def layouts(params: Params, config: Config) -> Params:
    """Return a PartitionSpec for each array of `params`. `config` describes the share of one device.

    `params` are the weights of a share, or their shapes. Codes, scales, zero points and minima of a matrix are sharded
    along the same axis. If columns are sharded, each device has a copy of a scale that belongs to a complete row. Norms
    of single heads are stacked, and sharded by heads. In an adapter, A is sharded like the columns of its matrix, and B
    like the rows.
    """
    axes = {weight.name: cut_axis(weight) if weight.head is None else 0 for weight in weights(config)}

    def layout(place: Any, array: Any) -> Any:
        axis = axes[place.names[0]] if isinstance(place, Names) else None
        spec = P() if axis is None else P(*[None] * axis, AXIS)
        if isinstance(array, Adapted):
            a: Any = [spec if axis == 1 else P()] * len(array.a)
            b: Any = [spec if axis == 0 else P()] * len(array.b)
            return Adapted(jax.tree.map(lambda _: spec, array.matrix), tuple(a), tuple(b))
        return jax.tree.map(lambda _: spec, array)

    return jax.tree.map(layout, array_names(config, params.rope), params)


def _replicated(tree: Any) -> Any:
    return jax.tree.map(lambda _: P(), tree)


class Partition(NamedTuple):
    """The devices that share one model, and how its weights and its cache are sharded."""

    mesh: Mesh
    weights: Params  # a PartitionSpec in place of each array
    cache: Cache  # a PartitionSpec in place of each array

    @property
    def devices(self) -> int:
        """The total number of devices."""
        return self.mesh.size

    @property
    def local(self) -> list[int]:
        """The indices of this process's devices in the mesh."""
        return [i for i, device in enumerate(self.mesh.devices) if device.process_index == jax.process_index()]

    def joined(self, layout: Any, parts: Sequence[Any]) -> Any:
        """Make a tree of global arrays. `parts` has one tree for each device of this process."""

        def join(spec: P, *shards: jax.Array) -> jax.Array:
            shape = self._global_shape(shards[0].shape, spec)
            return jax.make_array_from_single_device_arrays(shape, NamedSharding(self.mesh, spec), list(shards))

        return jax.tree.map(join, layout, *parts)

    def shapes(self, layout: Any, local: Any) -> Any:
        """Return the global shapes and shardings of arrays that have the shapes `local` on each device."""

        def shape(spec: P, leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(self._global_shape(leaf.shape, spec), leaf.dtype, sharding=sharding)

        return jax.tree.map(shape, layout, local)

    def replicated(self, tree: Any) -> Any:
        """Copy complete arrays to every device. Every process must pass the same arrays."""
        sharding = NamedSharding(self.mesh, P())

        def place(array: Any) -> jax.Array:
            host_array = np.asarray(array)
            return jax.make_array_from_callback(host_array.shape, sharding, lambda index: host_array[index])

        return jax.tree.map(place, tree)

    def zeros(self, layout: Any, local: Any) -> Any:
        """Make global arrays of zeros that have the shapes `local` on each device."""

        def make(shape: jax.ShapeDtypeStruct) -> jax.Array:
            assert shape.sharding is not None
            part = np.zeros(shape.sharding.shard_shape(shape.shape), shape.dtype)
            return jax.make_array_from_callback(shape.shape, shape.sharding, lambda _: part)

        return jax.tree.map(make, self.shapes(layout, local))

    def jit(self, program: partial) -> "Program":
        """Turn a function of `model.forward`, with its static arguments bound, into a program for all devices."""
        return Program(self, program)

    def _global_shape(self, local: tuple[int, ...], spec: P) -> tuple[int, ...]:
        return tuple(size * (self.devices if i < len(spec) and spec[i] else 1) for i, size in enumerate(local))


class Program(NamedTuple):
    """A program for all devices, which we lower for the shapes that one device sees."""

    partition: Partition
    program: partial

    @property
    def jitted(self) -> Any:
        """The program as a jitted function, which takes global arrays and donates the cache."""
        mesh, weights, cache = self.partition.mesh, self.partition.weights, self.partition.cache
        arguments, results = {
            prefill: (4, cache),
            forward: (4, (P(), cache)),
            decode: (7, (P(), P(), P(), cache)),
        }[self.program.func]
        layout = (weights, P(), cache, *[P()] * (arguments - 3))
        run = _agreeing(self.program) if self.program.func is decode else self.program
        if self.program.func is forward:
            run = partial(_with_lengths, self.program)
        spread = jax.shard_map(run, mesh=mesh, in_specs=layout, out_specs=results, check_vma=False)
        return jax.jit(spread, donate_argnums=CACHE)

    def lower(self, params: Params, *arguments: Any) -> jax.stages.Lowered:
        """Lower the program for arguments that have these shapes on each device."""
        partition = self.partition
        first, cache, *more = arguments
        layout_of_all = partition.shapes(_replicated((first, more)), (first, more))
        shapes = (
            partition.shapes(partition.weights, params),
            layout_of_all[0],
            partition.shapes(partition.cache, cache),
        )
        return self.jitted.lower(*shapes, *layout_of_all[1])


def _with_lengths(run: Callable, params: Params, tokens: Any, cache: Cache, lengths: Any) -> Any:
    return run(params, tokens, cache, lengths=lengths)


def _agreeing(run: Callable) -> Callable:
    """Wrap a decoding program so that all processes take the smallest number of steps that a process asks for.

    Processes may ask for different numbers, because each process measures by its own clock how long a token takes.
    """
    if jax.process_count() == 1:
        return run
    return lambda *arguments: run(*arguments[:-1], lax.pmin(arguments[-1], AXIS))


def cache_layout(layers: int, rows: P = HEADS) -> Cache:
    """Return the sharding of a cache. By default each device holds its own kv heads."""
    return Cache([LayerCache(rows, rows)] * layers, P())  # type: ignore[arg-type]  # shardings for arrays
