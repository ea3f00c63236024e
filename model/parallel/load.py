"""Loads a model onto several devices. `model.running.load` does the same for one device."""

from functools import partial

import jax
import numpy as np

from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.device import Device, room
from llamaspec.model.ops.choice import OpsChoice, ops_for
from llamaspec.model.ops.xla import XLA
from llamaspec.model.options import RunOptions
from llamaspec.model.parallel.backend import ParallelBackend, load_shares
from llamaspec.model.parallel.partition import Partition, mesh
from llamaspec.model.parallel.processes import all_min
from llamaspec.model.parallel.sharding import TENSOR, Parts, Sharding, sharding_named
from llamaspec.model.running.load import plan_memory
from llamaspec.model.running.memory import Memory, check_fits, gigabytes, shortage_named
from llamaspec.model.running.process import give_back_compilers_memory, keep_heaps_small
from llamaspec.model.running.programs import Layout, compile_programs
from llamaspec.model.running.start_clock import StartClock
from llamaspec.model.weights.loading import Progress, abstract_params, check_weights
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config


def load_parallel(
    checkpoint: Checkpoint,
    options: RunOptions,
    *,
    layout: Layout,
    dtype: np.dtype,
    device: Device,
    progress: Progress,
    clock: StartClock,
) -> ParallelBackend:
    """Load a model onto the first of JAX's devices, which may belong to several processes.

    Each process reads and checks the shares of its own devices. `layout` and `dtype` are chosen as for one device, and
    `device` describes each device. `clock` records the time of each phase. Raises ValueError if the devices cannot
    share the model, MemoryError if a share does not fit, and CheckpointError for files that cannot be used.
    """
    devices, sharding = options.devices, sharding_named(options.parallel)
    parts, over = Parts(checkpoint, devices, options.quantize, sharding), mesh(devices)
    local = [i for i, device_of_mesh in enumerate(over.devices) if device_of_mesh.process_index == jax.process_index()]
    if not local:
        raise ValueError(
            f"--devices {devices}: none of the first {devices} devices belongs to process {jax.process_index()}"
        )
    shares = [parts.of(i) for i in local]
    config = sharding.config(checkpoint.config, devices)
    # Context parallelism keeps all attention scores of a chunk in memory, so it does not use wider chunks.
    layout = layout._replace(devices=sharding.rows_spread(devices), wide=layout.wide if sharding.cuts_weights else ())
    shapes = abstract_params(config, dtype=dtype, positions=layout.rows, tensors=shares[0].tensors, device=device)
    partition, choice = plan_parallel(
        config, shapes, devices=devices, layout=layout, device=device, kernels=options.kernels, sharding=sharding
    )

    def plan(widest: int) -> Memory:
        memory = plan_memory(shapes, config, layout, device.platform, widest)
        if not sharding.cuts_weights:
            scores = 2 * 4 * layout.batch * layout.chunk * config.heads * layout.rows_held  # scores and probabilities
            angles = 4 * layout.rows * config.head_dim  # every device has the RoPE angles of all positions
            cache = -(-(memory.cache - angles) // devices) + angles
            memory = memory._replace(cache=cache, activations=memory.activations + scores)
        return in_one_memory(memory, len(local), device)

    free, other_programs = room()
    layout = layout.fitted(plan, free)
    layout = layout._replace(wide=layout.wide[: all_min(len(layout.wide))])  # all processes must run the same programs
    memory = plan(layout.widest)
    check_fits(memory, context=layout.capacity, available=free, other_programs=other_programs)
    if len(local) == devices:
        check_weights(checkpoint, progress=progress)
    else:
        for part in shares:
            check_weights(part, progress=progress)
    progress("compiling", 0.0)
    clock.begin("compile")
    if options.own_process:
        keep_heaps_small(config, platform=device.platform)
    programs = compile_programs(
        shapes,
        config,
        ops=choice.ops,
        layout=layout,
        platform=device.platform,
        greedy=options.greedy,
        compiled=partial(give_back_compilers_memory, config, platform=device.platform) if options.own_process else None,
        jit=partition.jit,
    )
    clock.begin("read")
    with shortage_named(f"{gigabytes(memory.weights)} of weights"):
        params = load_shares(shares, partition, dtype=dtype, positions=layout.rows, device=device, progress=progress)
        clock.begin("upload")
        jax.block_until_ready(params)
    clock.end()
    return ParallelBackend(
        params,
        programs,
        config,
        local=shapes,
        partition=partition,
        choice=choice,
        layout=layout,
        device=device,
        sharding=sharding,
    )


def plan_parallel(
    config: Config,
    shapes: Params,
    *,
    devices: int,
    layout: Layout,
    device: Device,
    kernels: str,
    sharding: Sharding = TENSOR,
) -> tuple[Partition, OpsChoice]:
    """Choose how to shard arrays, and which ops run on each device. `shapes` are the weights of one device's share."""
    choice = ops_for(
        kernels,
        config,
        shapes,
        batch=layout.batch,
        capacity=layout.rows,
        cache_dtype=layout.cache_dtype,
        device=device,
    )
    if choice.kernels and not sharding.cuts_weights:  # attention kernels need the complete cache
        plain = dict.fromkeys(("norm_qkv", "attend"), "the cache is sharded over several devices")
        choice = choice._replace(
            ops=choice.ops._replace(norm_qkv=XLA.norm_qkv),
            kernels=tuple(name for name in choice.kernels if name not in plain),
            plain={**choice.plain, **plain},
        )
    partition = Partition(mesh(devices), sharding.weights(shapes, config), sharding.cache(config.layers))
    return partition, choice._replace(ops=sharding.ops(choice.ops))


def in_one_memory(memory: Memory, devices: int, device: Device) -> Memory:
    """Plan the memory for all devices from the memory of one share.

    The virtual devices of a CPU use the same memory, so we multiply by `devices`. For other devices, `memory` is
    returned unchanged.
    """
    if device.platform != "cpu":
        return memory
    shared = ("weights", "cache", "activations", "logits")
    return memory._replace(**{name: devices * getattr(memory, name) for name in shared})
