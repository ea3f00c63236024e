"""A Llama model on several devices, which runs one sequence at a time."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import jax
import numpy as np

from llamaspec.model.cache import Cache, cache_bytes
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.device import Device
from llamaspec.model.forward import forward
from llamaspec.model.insight.cost import decode_cost
from llamaspec.model.ops.choice import OpsChoice
from llamaspec.model.parallel.partition import Partition
from llamaspec.model.parallel.sharding import TENSOR, Parts, Sharding
from llamaspec.model.running.jax_backend import Drawing, JaxBackend
from llamaspec.model.running.memory import gigabytes, shortage_named
from llamaspec.model.running.programs import Layout, Programs
from llamaspec.model.weights.loading import Progress, load_params, no_progress
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config


class ParallelBackend(JaxBackend):
    """A `Backend` that runs programs on all devices of a `Partition`. Each device computes on its share."""

    def __init__(
        self,
        params: Params,
        programs: Programs,
        config: Config,
        *,
        local: Params,
        partition: Partition,
        choice: OpsChoice,
        layout: Layout,
        device: Device,
        sharding: Sharding = TENSOR,
    ):
        """Run `programs` on the global arrays `params`.

        `config`, `choice` and the shapes `local` describe the share of one device.
        """
        super().__init__(params, programs, config, choice=choice, layout=layout, device=device)
        if jax.process_count() > 1:
            self.ahead = 0  # all processes must start the same number of bursts
        self._partition, self._local, self._sharding = partition, local, sharding
        program = partition.jit(partial(forward, config=config, ops=choice.ops)).jitted
        self._forward = lambda params, tokens, cache, *, lengths: program(params, tokens, cache, lengths)
        self._put = partition.replicated

    def describe(self) -> str:
        """Describe in one line how the model runs, with the number of devices and processes."""
        devices, processes = self._partition.devices, jax.process_count()
        if devices == 1:
            return super().describe()
        several = f" in {processes} processes" if processes > 1 else ""
        kind, *plain = super().describe().split("; ")
        shared = "" if self._sharding.cuts_weights else ", the cache sharded by positions"
        return "; ".join([f"{kind}, {devices} devices{several}{shared}", *plain])

    def bytes_read(self, position: int | float) -> float:
        """Count the bytes that each device must read in a decoding step after `position` tokens."""
        layout = self._layout
        sizes = {"position": position / layout.devices, "batch": layout.batch, "cache_dtype": layout.cache_dtype}
        return decode_cost(self._local, self._config, **sizes).bytes

    def start(self) -> Cache:
        """Make an empty cache. Raises MemoryError if a device has too little memory for it."""
        layout = self._layout
        size = cache_bytes(self._config, batch=layout.batch, capacity=layout.rows_held, dtype=layout.cache_dtype)
        with shortage_named(f"{gigabytes(size)} of cache"):
            return self._partition.zeros(self._partition.cache, cache_shapes(layout, self._config))

    def decode(self, cache: Cache, drawing: Drawing, *, steps: int) -> tuple[Callable[[], list[int]], Drawing, Cache]:
        """Start to draw up to `steps` tokens. `steps` must be at most `burst`.

        Returns a function that waits for the tokens and returns them; also returns the new state of the completion, and
        the cache.
        """
        step_count = self._put(np.int32(steps)) if jax.process_count() > 1 else np.int32(steps)
        drawn, steps_taken, text, cache = self._programs.decode(drawing.greedy)(
            self._params, drawing.text, cache, *drawing.fixed, step_count
        )
        return lambda: np.asarray(drawn)[: int(steps_taken), 0].tolist(), drawing._replace(text=text), cache

    def with_weights(self, checkpoint: Checkpoint, *, read_from: Checkpoint | None = None) -> "ParallelBackend":
        """Return a backend with the same programs and with the weights of `checkpoint`.

        The tensors of `checkpoint` must have the same shapes and types of codes as before. `read_from` is not used.
        """
        clone, devices = copy(self), self._partition.devices
        parts = Parts(checkpoint, devices, None, self._sharding)
        shares = [parts.of(i) for i in self._partition.local]
        dtype, positions = self._params.embedding.dtype, len(self._params.rope.cos)
        clone._params = load_shares(shares, self._partition, dtype=dtype, positions=positions, device=self.device)
        return clone


def cache_shapes(layout: Layout, config: Config) -> Cache:
    """Return the shapes of the part of the cache on one device."""
    return jax.eval_shape(partial(layout.empty_cache, config))


def load_shares(
    shares: Sequence[Checkpoint],
    partition: Partition,
    *,
    dtype: np.dtype,
    positions: int,
    device: Device | None = None,
    progress: Progress = no_progress,
) -> Params:
    """Read the share of each device of this process, and join the shares to global arrays.

    `shares` are the checkpoints to read, in the order of `Partition.local`. `device` describes each device, as in
    `load_params`.
    """
    parts: list[Any] = []
    for i, checkpoint in zip(partition.local, shares, strict=True):
        done = len(parts)

        def report(stage: str, fraction: float, done: int = done) -> None:
            progress(stage, (done + fraction) / len(shares))

        with jax.default_device(partition.mesh.devices[i]):
            parts.append(load_params(checkpoint, dtype=dtype, positions=positions, device=device, progress=report))
    return partition.joined(partition.weights, parts)
