"""Chooses a model to time: a model with files, or a published shape with random weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from llamaspec.benchmarks.common.model_speed import TimedPrograms, compile_programs
from llamaspec.benchmarks.common.random_model import random_checkpoint, random_params, random_shapes
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.device import default_device, free_bytes
from llamaspec.model.insight.profile import named
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.insight.timing import Effort
from llamaspec.model.llama import choose_dtype
from llamaspec.model.ops.choice import OpsChoice, check_kernels, ops_for
from llamaspec.model.parallel.reading import empty_share
from llamaspec.model.parallel.sharding import Parts
from llamaspec.model.parallel.share import share
from llamaspec.model.running.compile import NO_GRAPHS, model_options
from llamaspec.model.running.memory import Memory, check_fits, memory_of
from llamaspec.model.running.programs import longest_burst, prompt_chunk
from llamaspec.model.weights.loading import abstract_params, check_weights, load_params
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

DRAWN = 16  # tokens that one call of the program draws, at least
EFFORT = Effort(5)


@dataclass(frozen=True)
class TimedModel:
    """A model to time. Its weights are shapes until `load` loads or draws them."""

    name: str
    config: Config
    shapes: Callable[[int], Params]  # for a number of positions
    load: Callable[[Params], Params]
    checkpoint: Callable[[], Checkpoint]
    kernels: str  # auto, xla, cpu or pallas
    dtype: str
    quantize: str | None
    random: bool = False  # whether the weights are random, and not from a file
    effort: Effort = EFFORT

    def share_shapes(self, positions: int, devices: int) -> Params:
        """Return the shapes of the weights on one of `devices`, with RoPE tables for `positions`."""
        config, dtype = share(self.config, devices), np.dtype(self.dtype)
        checkpoint = self.checkpoint() if not self.random else None
        if checkpoint:
            tensors = Parts(checkpoint, devices, self.quantize).of(0).tensors
        else:
            tensors = empty_share(self.config, devices, dtype)
            part = Checkpoint("random", "memory", replace(config, tied=self.config.tied), tensors, None, frozenset())
            tensors = (quantized(part, self.quantize) if self.quantize else part).tensors
        return abstract_params(config, dtype=dtype, positions=positions, tensors=tensors)

    def about(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "quantize": self.quantize}

    def memory(self, shapes: Params, *, context: int, batch: int) -> Memory:
        """Compute the memory of sequences of up to `context` tokens on the default device."""
        return memory_of(
            *(shapes, self.config),
            **{"batch": batch, "context": context, "chunk": prompt_chunk(self.config, jax.default_backend())},
            platform=jax.default_backend(),
            cache_dtype=np.dtype(self.dtype),
        )

    @property
    def burst(self) -> int:
        """The number of tokens that one call draws.

        It is smaller for a model with a short context, so that the context also has room for a prompt.
        """
        return min(longest_burst(jax.default_backend()), max(DRAWN, self.config.context // 8))

    def capacity(self, longest: int) -> int:
        """Compute the cache positions for sequences of up to `longest` tokens, with room for a burst and a chunk."""
        chunk = min(prompt_chunk(self.config, jax.default_backend()), longest)
        return -(-(longest + self.burst + chunk) // 8) * 8

    def choice(self, shapes: Params, *, capacity: int, batch: int) -> OpsChoice:
        """Choose the ops for `batch` sequences of up to `capacity` positions."""
        sizes = {"batch": batch, "capacity": capacity, "cache_dtype": shapes.embedding.dtype}
        return ops_for(self.kernels, self.config, shapes, **sizes)

    def compiled(self, *, longest: int, batch: int, shapes: Params | None = None) -> tuple[TimedPrograms, Params]:
        """Compile programs for sequences of up to `longest` tokens.

        Returns the programs, and the shapes of their weights. If `shapes` is None, the RoPE tables
        of the weights have no more positions than the cache. Raises MemoryError if weights and caches do not fit.
        """
        chunk, burst = min(prompt_chunk(self.config, jax.default_backend()), longest), self.burst
        capacity = self.capacity(longest)
        shapes = shapes or self.shapes(capacity)
        memory = self.memory(shapes, context=capacity - chunk, batch=batch)
        # Two caches are in memory while one is read and the next is drawn.
        check_fits(memory._replace(cache=2 * memory.cache), context=longest, available=free_bytes())
        ops = named(self.choice(shapes, capacity=capacity, batch=batch).ops)
        programs = compile_programs(
            shapes, self.config, ops=ops, capacity=capacity, chunk=chunk, burst=burst, batch=batch
        )
        return programs, shapes

    def without_graphs(self, programs: TimedPrograms, shapes: Params) -> TimedPrograms | None:
        """Compile programs for a GPU again, without CUDA graphs: XLA's profiler does not name kernels in graphs.

        Returns None on other platforms, which have no graphs.
        """
        if (platform := jax.default_backend()) != "gpu":
            return None
        sizes: dict[str, Any] = {"capacity": programs.capacity, "batch": programs.batch}
        ops = named(self.choice(shapes, **sizes).ops)
        options = model_options(platform, shapes, self.config, ops=ops, batch=programs.batch) | NO_GRAPHS
        sizes |= {"chunk": programs.chunk, "burst": programs.burst, "options": options}
        return compile_programs(shapes, self.config, ops=ops, **sizes)


def choose_model(
    *, model: str, shape: str | None, dtype: str | None, quantize: str | None, kernels: str = "auto", platform: str = ""
) -> TimedModel:
    """Choose a published shape with random weights, or a model. Raises ValueError for unknown names.

    `platform` is "cpu" or "gpu", or "" for the platform of the default device.
    """
    check_kernels(kernels, default_device())
    platform = platform or jax.default_backend()
    if shape is not None:
        if shape not in SHAPES:
            raise ValueError(f"unknown shape {shape}: expected one of {', '.join(SHAPES)}")
        config = SHAPES[shape]
        published = choose_dtype(dtype, None, platform=platform)
        return TimedModel(
            name=f"{shape}, random weights",
            config=config,
            shapes=lambda rows: random_shapes(config, dtype=published, positions=rows, quantize=quantize),
            load=lambda shapes: random_params(shapes, config),
            checkpoint=lambda: random_checkpoint(config),
            kernels=kernels,
            dtype=published.name,
            quantize=quantize,
            random=True,
        )
    checkpoint = open_checkpoint(model)
    config = checkpoint.config
    run = quantized(checkpoint, quantize) if quantize else checkpoint
    chosen = choose_dtype(dtype, run, platform=platform)

    def load(shapes: Params) -> Params:
        check_weights(checkpoint)
        return load_params(run, dtype=chosen, positions=len(shapes.rope.cos))

    return TimedModel(
        name=model,
        config=config,
        shapes=lambda rows: abstract_params(config, dtype=chosen, positions=rows, tensors=run.tensors),
        load=load,
        checkpoint=lambda: checkpoint,
        kernels=kernels,
        dtype=chosen.name,
        quantize=quantize,
    )
