"""Loads a model onto one device. If there is enough memory, we read weights while programs are compiled.

`model.parallel.load` does the same for several devices.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np

from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.device import Device, room
from llamaspec.model.ops.choice import OpsChoice, ops_for
from llamaspec.model.ops.emulated import emulated_ops, with_roundings
from llamaspec.model.options import RunOptions
from llamaspec.model.running.jax_backend import JaxBackend
from llamaspec.model.running.memory import READERS, Memory, check_fits, gigabytes, memory_of, shortage_named
from llamaspec.model.running.process import give_back_compilers_memory, is_large, keep_heaps_small
from llamaspec.model.running.program_store import ProgramStore, facts
from llamaspec.model.running.programs import Layout, Programs, are_stored, compile_programs, first_programs
from llamaspec.model.running.start_clock import StartClock
from llamaspec.model.weights.loading import Progress, abstract_params, check_weights, load_params
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

COMPILERS_ROOM = 4 << 30  # bytes of GPU memory that we leave for the compiler while we read weights


def load_on_one_device(
    checkpoint: Checkpoint,
    run: Checkpoint,
    options: RunOptions,
    *,
    layout: Layout,
    dtype: np.dtype,
    device: Device,
    roundings: dict[str, str],
    progress: Progress,
    clock: StartClock,
) -> JaxBackend:
    """Load `run`, which is `checkpoint` or a quantized copy of it, onto the default device.

    `device` describes the default device. `roundings` come from `model.ops.emulated`, and are empty unless activations
    are emulated. `model.llama.load_backend` chooses `layout` and `dtype`. Raises ValueError for kernels that the device
    lacks, MemoryError for a model that does not fit, and CheckpointError for files that cannot be used.
    """
    config, platform, (free, other_programs) = checkpoint.config, device.platform, room()
    shapes = abstract_params(config, dtype=dtype, positions=layout.rows, tensors=run.tensors, device=device)
    params = with_roundings(shapes, roundings, config=config)
    choice = ops_for(
        options.kernels,
        config,
        shapes,
        batch=layout.batch,
        capacity=layout.rows,
        cache_dtype=layout.cache_dtype,
        device=device,
    )
    if layout.drafts and choice.name != "cpu":
        raise ValueError(
            f"speculate: only a CPU's ops verify a draft with the bits of decoding, and this model runs {choice.name}"
        )
    if roundings:
        choice = choice._replace(ops=emulated_ops(choice.ops))
    plan = partial(plan_memory, params, config, layout, platform)
    layout = layout.fitted(plan, free)
    memory = plan(layout.widest)
    check_fits(memory, context=layout.capacity, available=free, other_programs=other_programs)

    # On a GPU we compile while we read weights, but only if there is enough memory for the compiler. On a CPU we never
    # do.
    on_cpu, roomy = platform == "cpu", memory.running + COMPILERS_ROOM <= free
    prompt = None if on_cpu and is_large(config) else options.prompt
    store = None
    if options.compile_cache is not None:
        store = _store(Path(options.compile_cache), params, config, layout, choice, options.kernels, roundings)
    stored = are_stored(store, first_programs(layout, greedy=options.greedy, prompt=prompt))
    beside = stored or (roomy and not on_cpu)
    # We check the stored weights. If codes are decoded and quantized again, reading `run` would not check the stored
    # ones.
    requantized = run is not checkpoint and any(tensor.stored.codes for tensor in checkpoint.tensors.values())
    checked = not beside or requantized
    if checked:
        check_weights(checkpoint, progress=progress)
    if options.own_process:
        keep_heaps_small(config, platform=platform)
    compiling = partial(
        compile_programs,
        params,
        config,
        ops=choice.ops,
        layout=layout,
        platform=platform,
        greedy=options.greedy,
        prompt=prompt,
        compiled=partial(give_back_compilers_memory, config, platform=platform) if options.own_process else None,
        store=store,
    )
    reading = partial(
        load_params,
        run,
        dtype=dtype,
        positions=layout.rows,
        checked=checked,
        readers=1 if on_cpu or not roomy else READERS,
        device=device,
        progress=progress,
    )
    start = _in_parallel if beside else _in_sequence
    with shortage_named(f"{gigabytes(memory.weights)} of weights"):
        programs, weights = start(compiling, reading, progress=progress, clock=clock)
    weights = with_roundings(weights, roundings, config=config)
    clock.end()
    backend = JaxBackend(weights, programs, config, choice=choice, layout=layout, device=device)
    backend.drafts(greedy=options.greedy)  # checks the program that verifies drafts, if there is one
    return backend


def plan_memory(params: Params, config: Config, layout: Layout, platform: str, widest: int) -> Memory:
    """Plan the memory of a layout in which the widest chunk of a prompt has `widest` tokens."""
    return memory_of(
        params,
        config,
        batch=layout.batch,
        context=layout.capacity,
        chunk=layout.chunk,
        platform=platform,
        cache_dtype=layout.cache_dtype,
        wide=widest,
        drafts=layout.drafts,
    )


def _store(
    folder: Path,
    params: Params,
    config: Config,
    layout: Layout,
    choice: OpsChoice,
    kernels: str,
    roundings: dict[str, str],
) -> ProgramStore:
    """Open the store in `folder` for programs that depend on all of these arguments."""
    layout = layout._replace(drafts=0)  # drafts do not change the other programs
    about = (jax.tree.structure(params), jax.tree.leaves(params), config, layout, choice.kernels, choice.plain, kernels)
    return ProgramStore(folder, facts(*about, roundings))


def _in_sequence(
    compiling: Callable[[], Programs], reading: Callable[[], Params], *, progress: Progress, clock: StartClock
) -> tuple[Programs, Params]:
    """Compile first, and then read the weights. So the compiler can use the memory that the weights will need."""
    progress("compiling", 0.0)
    clock.begin("compile")
    programs = compiling()
    clock.begin("read")
    weights = reading()
    clock.begin("upload")
    jax.block_until_ready(weights)
    return programs, weights


def _in_parallel(
    compiling: Callable[[], Programs], reading: Callable[[], Params], *, progress: Progress, clock: StartClock
) -> tuple[Programs, Params]:
    """Compile programs, or load them from the store, in another thread while this thread reads the weights."""

    def compiled() -> Programs:
        with clock.parallel_work("compile"):
            return compiling()

    with ThreadPoolExecutor(1) as pool:
        programs = pool.submit(compiled)
        clock.begin("read")
        weights = reading()
        clock.begin("upload")
        jax.block_until_ready(weights)
        clock.begin("compile")
        if not programs.done():
            progress("compiling", 0.0)
        return programs.result(), weights
