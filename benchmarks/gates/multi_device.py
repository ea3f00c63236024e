"""Compiles decode steps for several H200s without a GPU, and checks their kernels, all-reduces and copies."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from llamaspec.benchmarks.gates.compiler import mesh

import jax  # isort: skip  # after the compiler's module, which sets variables that JAX reads when it is imported
import numpy as np

from llamaspec.benchmarks.gates.checks import LARGE
from llamaspec.benchmarks.gates.decode_steps import CAPACITY, DTYPES, FEW_LAYERS
from llamaspec.benchmarks.gates.program import Launch, launches
from llamaspec.model.forward import decode
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.parallel.partition import Partition, cache_layout, layouts
from llamaspec.model.parallel.reading import empty_share
from llamaspec.model.parallel.share import share
from llamaspec.model.parallel.tensor import AXIS, tensor_parallel
from llamaspec.model.running.compile import LOOPS_IN_GRAPHS
from llamaspec.model.running.programs import Layout, decode_shapes
from llamaspec.model.weights.loading import abstract_params

STEPS = {"llama-3.1-8b on 2": ("llama-3.1-8b", 2), "llama-3.1-70b on 8": ("llama-3.1-70b", 8)}  # model and devices
SUMS_A_LAYER = 2


class SharedStep(NamedTuple):
    """Facts of a compiled step on one device."""

    layers: int
    launches: list[Launch]
    aliased: int  # bytes of the cache that are updated in place
    cache: int  # bytes
    refused: list[str]  # ops without a kernel

    def count(self, kind: str) -> int:
        """Count the collectives with names that begin with `kind`."""
        return sum(launch.kind.startswith(kind) for launch in self.launches)


def compile_shared(name: str, *, layers: int = FEW_LAYERS) -> SharedStep:
    """Compile the greedy decode step `STEPS[name]` in bfloat16, with `layers` of the model's layers."""
    model, devices = STEPS[name]
    config, dtype = replace(SHAPES[model], layers=layers), DTYPES["bfloat16"]
    config = share(config, devices)
    h200s = mesh(devices=devices, axis=AXIS)
    shapes = abstract_params(config, dtype=dtype, positions=CAPACITY, tensors=empty_share(config, devices, dtype))
    ops, reasons = pallas_ops(config, shapes, capacity=CAPACITY)
    partition = Partition(h200s, layouts(shapes, config), cache_layout(layers))
    layout = Layout(batch=1, capacity=CAPACITY, chunk=0, burst=128, cache_dtype=dtype)
    cache = jax.eval_shape(partial(layout.empty_cache, config))
    fixed: dict[str, Any] = {"config": config, "ops": tensor_parallel(ops), "greedy": True, "burst": layout.burst}
    with jax.sharding.use_abstract_mesh(h200s.abstract_mesh):
        lowered = partition.jit(partial(decode, **fixed)).lower(shapes, *decode_shapes(config, cache))
    compiled = lowered.compile(LOOPS_IN_GRAPHS)
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory and hlo
    size = sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(cache.layers))
    refused = [name for name in ops._fields if reasons.get(name)]
    return SharedStep(layers, launches(hlo), memory.alias_size_in_bytes, size, refused)


def broken_by_shared_step(step: SharedStep) -> list[str]:
    """List the broken gates of a step."""
    faults = []
    if (sums := step.count("all-reduce")) != SUMS_A_LAYER * step.layers:
        faults.append(f"expected {SUMS_A_LAYER * step.layers} all-reduces, got {sums}")
    if (gathers := step.count("all-gather")) != 1:
        faults.append(f"expected 1 all-gather (of the logits), got {gathers}")
    if not any(launch.by_us for launch in step.launches):
        faults.append("expected our kernels in the step, got none")
    faults += [f"our kernels refuse the op {name}" for name in step.refused]
    for launch in step.launches:
        if not launch.by_us and launch.bytes >= LARGE and not launch.kind.startswith("all-gather"):
            faults.append(f"{launch.kind} of the compiler writes {launch.bytes} bytes; expected less than {LARGE}")
    if step.aliased < step.cache:
        faults.append(f"expected {step.cache} bytes of the cache to be updated in place, got {step.aliased}")
    return faults
