"""Loads an engine for a checkpoint: chooses sizes, checks the memory, compiles the programs, and loads the weights."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from llamaspec.model.cache import Pages, position_bytes
from llamaspec.model.checkpoints.adapter import Adapter, adapted, joined
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.device import default_device, free_bytes
from llamaspec.model.llama import choose_dtype
from llamaspec.model.ops.choice import ops_for
from llamaspec.model.options import RunOptions, choose_context
from llamaspec.model.parallel.backend import load_shares
from llamaspec.model.parallel.load import in_one_memory
from llamaspec.model.parallel.partition import Partition, mesh
from llamaspec.model.parallel.sharding import TENSOR, Parts
from llamaspec.model.running.memory import check_fits, gigabytes, memory_of, shortage_named
from llamaspec.model.running.programs import MIDDLE, longest_burst, prompt_chunk
from llamaspec.model.weights.loading import Progress, abstract_params, check_weights, load_params, no_progress
from llamaspec.reference.config import Config, for_sequences
from llamaspec.serving.engine import BatchingEngine
from llamaspec.serving.executor import JaxExecutor
from llamaspec.serving.multi_device import EngineDevices
from llamaspec.serving.programs import ProgramSizes, compile_serving
from llamaspec.serving.scheduler import Limits
from llamaspec.serving.watchdog import STEP_SECONDS

WIDTH = 16  # default number of requests that decode at once
PAGE = 64  # tokens per page
SHARE = 0.5  # the cache may use this share of the memory that the weights leave free


def engine_chunk(config: Config, platform: str) -> int:
    """Choose the chunk size: how many prompt tokens a plan of the scheduler prefills. An engine has only one size.

    A matrix product of a different size may round keys and values differently. With several sizes, the chunks of a
    prompt would depend on the content of the prefix cache, so the same prompt could give different values later. On an
    H100, Llama 3.1 8B prefills 512 tokens in 16 ms and 256 tokens in 9 ms (24 and 19 ms with 8-bit weights), so chunks
    of 512 tokens take less time per token.
    """
    return prompt_chunk(config, platform) if platform == "cpu" else MIDDLE


def load_engine(
    checkpoint: Checkpoint,
    options: RunOptions = RunOptions(),  # noqa: B008
    *,
    width: int = WIDTH,
    cached_tokens: int | None = None,
    waiting: int = 256,
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
    step_seconds: float = STEP_SECONDS,
    progress: Progress = no_progress,
) -> BatchingEngine:
    """Load a model and start an engine.

    - `options` has the options of `model.llama.load_backend`. The engine uses the fields `context`, `dtype`, `kernels`,
      `quantize`, `cache` and `devices`. Several devices share the model by tensor parallelism.
    - `width` is the number of requests that decode at once. For a given request, seed and model, all engines with the
      same width on the same kind of machine give the same text. An engine with a different width may round differently.
    - `cached_tokens` is the size of the KV cache in tokens, for all requests and the prefix cache together. None means
      `width` times the context, or less if this needs more than half of the memory that the weights leave free.
    - `waiting` is the number of requests that may wait; `submit` refuses more.
    - `adapters` are the adapters that requests may choose, by name. All of them stay on the device.
    - `step_seconds` is how long a step may take before we decide that the device hangs.

    Raises ValueError and MemoryError as `load_backend` does. Also raises ValueError if `options` asks for the NumPy
    reference, for emulated activations, for speculation, or for a parallelism other than tensor parallelism.
    """
    if options.speculate:
        raise ValueError("an engine does not speculate: load the model with speculate=False")
    if options.backend != "jax" or options.emulate_activations or options.parallel != "tensor":
        raise ValueError(
            "an engine needs backend=jax, parallel=tensor and no emulate_activations, got "
            f"{options.backend}, {options.parallel} and {options.emulate_activations}"
        )
    devices = options.devices
    capacity = choose_context(options.context, checkpoint.config.context)
    checkpoint = replace(checkpoint, config=for_sequences(checkpoint.config, capacity))
    ranks = {name: adapter.rank for name, adapter in adapters.items()}
    if adapters:
        checkpoint = adapted(checkpoint, joined([*adapters.values()]), merges=False)
    if width < 1:
        raise ValueError(f"width (--max-batch): expected 1 or more, got {width}")
    over, parts = mesh(devices), Parts(checkpoint, devices, options.quantize)
    shares = [parts.of(i) for i in range(devices)]
    run, config = shares[0], shares[0].config
    device = default_device()
    weights = choose_dtype(options.dtype, run, platform=device.platform)
    cache_dtype = np.dtype(np.int8) if options.cache == "int8" else weights
    chunk, burst = min(engine_chunk(config, device.platform), capacity), min(longest_burst(device.platform), capacity)
    shapes = abstract_params(config, dtype=weights, positions=capacity + chunk, tensors=run.tensors, device=device)
    memory = memory_of(
        shapes, config, batch=1, context=capacity, chunk=chunk, platform=device.platform, cache_dtype=cache_dtype
    )
    memory = in_one_memory(memory, devices, device)
    check_fits(memory, context=capacity, available=free_bytes())
    room = int(SHARE * (free_bytes() - memory.peak + memory.process_bytes))
    position = position_bytes(config, dtype=cache_dtype) * (devices if device.platform == "cpu" else 1)
    tokens = min(width * capacity, room // position)
    tokens = max(capacity, tokens if cached_tokens is None else cached_tokens) + burst
    limits = Limits(1 - (-tokens // PAGE), PAGE, width, chunk, burst, capacity, waiting=waiting)
    sizes = ProgramSizes(width, chunk, burst, limits.pages, PAGE, limits.blocks, cache_dtype, sum(ranks.values()))
    choice = ops_for(
        options.kernels,
        config,
        shapes,
        batch=width,
        capacity=limits.blocks * PAGE,
        cache_dtype=cache_dtype,
        device=device,
        pages=Pages(limits.pages, PAGE),
    )
    check_weights(checkpoint, progress=progress)
    progress("compiling", 0.0)
    compiling: dict[str, Any] = {"sizes": sizes, "platform": device.platform}
    reading: dict[str, Any] = {
        "dtype": weights,
        "positions": capacity + chunk,
        "device": device,
        "progress": progress,
    }
    if devices == 1:
        programs, spread = compile_serving(shapes, config, ops=choice.ops, **compiling), None
    else:
        spread = EngineDevices(Partition(over, TENSOR.weights(shapes, config), TENSOR.cache(config.layers)), config)
        programs = compile_serving(shapes, config, ops=TENSOR.ops(choice.ops), **compiling, spread=spread.program)
    with shortage_named(f"{gigabytes(memory.weights)} of weights"):
        params = load_shares(shares, spread.partition, **reading) if spread else load_params(run, **reading)
    with shortage_named(f"a KV cache of {tokens} tokens"):
        state = spread.empty_state(sizes) if spread else None
        executor = JaxExecutor(params, programs, config, sizes=sizes, eos=checkpoint.stops, state=state, adapters=ranks)
    return BatchingEngine(
        executor,
        limits,
        vocab=config.vocab,
        dim=config.dim,
        eos=checkpoint.stops,
        adapters=ranks,
        step_seconds=step_seconds,
    )
