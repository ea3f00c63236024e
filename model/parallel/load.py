"""A model loaded onto several devices: the counterpart of `model.llama.load_backend`."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np

from model.checkpoints.checkpoint import Checkpoint
from model.checkpoints.codes import quantized
from model.ops.choice import Choice, ops_for
from model.parallel.backend import ParallelBackend, load_shares
from model.parallel.partition import Partition, cache_layout, layouts, mesh
from model.parallel.reading import share_of
from model.parallel.share import share
from model.parallel.tensor import tensor_parallel
from model.running.device import Device, free_bytes
from model.running.memory import Memory, check_fits, gigabytes, memory_of, shortage_named
from model.running.process import give_back_compilers_memory, keep_heaps_small
from model.running.programs import Layout, compile_programs
from model.running.start_clock import StartClock
from model.weights.params import Params, Progress, abstract_params, check_weights
from reference.config import Config
from reference.quantizers.schemes import scheme


class Parts:
    """The shares of a checkpoint for the devices of this process, perhaps quantized as they are read."""

    def __init__(self, checkpoint: Checkpoint, devices: int, quantize: str | None):
        """Raises ValueError where `devices` cannot share the model, or would cut a group of quantized columns."""
        self._checkpoint, self._devices, self._quantize = checkpoint, devices, quantize
        share(checkpoint.config, devices)

    def of(self, device: int) -> Checkpoint:
        """Give the share of a device.

        A scheme with groups of columns quantizes a share as it quantizes the whole, so only the share is read. A scale
        for a whole row needs the whole row.
        """
        cut = partial(share_of, device=device, devices=self._devices)
        if self._quantize is None:
            return cut(self._checkpoint)
        whole = cut(quantized(self._checkpoint, self._quantize))  # also refuses a cut within a group
        if scheme(self._quantize).group is None:
            return whole
        part = cut(self._checkpoint)
        # A head that is tied in the whole model is not quantized.
        tied = replace(part, config=replace(part.config, tied=self._checkpoint.config.tied))
        return replace(quantized(tied, self._quantize), config=part.config)


def load_parallel(
    checkpoint: Checkpoint,
    *,
    devices: int,
    capacity: int,
    layout: Layout,
    dtype: np.dtype,
    device: Device,
    kernels: str,
    quantize: str | None,
    greedy: bool,
    own_process: bool,
    progress: Progress,
    clock: StartClock,
) -> ParallelBackend:
    """Load a model onto the first `devices` of JAX's devices, which may belong to several processes.

    Each process reads and checks the shares of its own devices. `layout`, `dtype` and `device` are those that one
    device would have. Raises ValueError where the devices cannot share the model, MemoryError where a share does not
    fit, CheckpointError for files that cannot be used. `clock` measures the phases, one after the other.
    """
    parts, over = Parts(checkpoint, devices, quantize), mesh(devices)
    mine = [i for i, one in enumerate(over.devices) if one.process_index == jax.process_index()]
    if not mine:
        raise ValueError(f"none of the {devices} devices belongs to process {jax.process_index()}")
    shares = [parts.of(i) for i in mine]
    config = share(checkpoint.config, devices)
    shapes = abstract_params(config, dtype=dtype, positions=layout.rows, tensors=shares[0].tensors)
    partition, choice = plan_parallel(config, shapes, devices=devices, layout=layout, device=device, kernels=kernels)
    sizes = {"batch": layout.batch, "cache_dtype": layout.cache_dtype}
    memory = memory_of(shapes, config, context=capacity, chunk=layout.chunk, platform=device.platform, **sizes)
    check_fits(in_one_memory(memory, len(mine), device), context=capacity, available=free_bytes())
    if len(mine) == devices:
        check_weights(checkpoint, progress=progress)
    else:
        for part in shares:
            check_weights(part, progress=progress)
    progress("compiling", 0.0)
    clock.begin("compile")
    if own_process:
        keep_heaps_small(config, platform=device.platform)
    programs = compile_programs(
        *(shapes, config),
        **{"ops": choice.ops, "layout": layout, "platform": device.platform, "greedy": greedy},
        compiled=partial(give_back_compilers_memory, config, platform=device.platform) if own_process else None,
        jit=partition.jit,
    )
    clock.begin("read")
    with shortage_named(f"{gigabytes(memory.weights)} of weights"):
        params = load_shares(shares, partition, dtype=dtype, positions=layout.rows, progress=progress)
        clock.begin("upload")
        jax.block_until_ready(params)
    clock.end()
    how = {"choice": choice, "layout": layout, "device": device}
    return ParallelBackend(params, programs, config, local=shapes, partition=partition, **how)


def plan_parallel(
    config: Config, shapes: Params, *, devices: int, layout: Layout, device: Device, kernels: str
) -> tuple[Partition, Choice]:
    """Choose where arrays are cut and which ops run on each device, for a share of these shapes."""
    sizes = {"batch": layout.batch, "cache_dtype": layout.cache_dtype}
    choice = ops_for(kernels, config, shapes, capacity=layout.rows, device=device, **sizes)
    partition = Partition(mesh(devices), layouts(shapes, config), cache_layout(config.layers))
    return partition, choice._replace(ops=tensor_parallel(choice.ops))


def in_one_memory(memory: Memory, devices: int, device: Device) -> Memory:
    """Plan for so many shares in the memory that `device` has: devices that are parts of a CPU have one in common."""
    if device.platform != "cpu":
        return memory
    shared = ("weights", "cache", "activations", "logits")
    return memory._replace(**{name: devices * getattr(memory, name) for name in shared})
