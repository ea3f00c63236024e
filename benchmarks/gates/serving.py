"""Compiles the programs of `serve` without a GPU, with llamaspec's options. They must write pages by stores."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from llamaspec.benchmarks.gates.compiler import mesh, placed

import jax  # isort: skip  # after the compiler's module, which sets variables that JAX reads when it is imported

from llamaspec.benchmarks.common.random_model import random_shapes
from llamaspec.benchmarks.gates.decode_steps import CAPACITY, DTYPES, FEW_LAYERS
from llamaspec.benchmarks.gates.program import Launch, launches, swaps
from llamaspec.model.cache import Pages
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.running.programs import MIDDLE, longest_burst
from llamaspec.model.weights.gpu_codes import arranged
from llamaspec.serving.loading import PAGE, WIDTH
from llamaspec.serving.programs import ProgramSizes, compile_serving

SERVED = ("tinyllama-1.1b bfloat16",)
PAGES = 10_001  # with so many pages, no other array is as large as the keys of a layer


class Serving(NamedTuple):
    """Facts of the programs that serve a model, by the names of the programs."""

    pages: int  # the bytes of a layer's keys
    launches: dict[str, list[Launch]]
    swaps: dict[str, int]  # number of writes to pages by operations that wait for each other


def compile_served(name: str) -> Serving:
    """Compile the programs that serve `name`, with `FEW_LAYERS` of the model's layers. `name` must be in `SERVED`."""
    model, dtype = name.split()
    config, number = replace(SHAPES[model], layers=FEW_LAYERS), DTYPES[dtype]
    blocks = CAPACITY // PAGE
    sizes = ProgramSizes(WIDTH, MIDDLE, longest_burst("gpu"), PAGES, PAGE, blocks, number)
    params = jax.eval_shape(arranged, random_shapes(config, dtype=number, positions=CAPACITY + MIDDLE))
    cache_options: dict[str, Any] = {"capacity": CAPACITY, "cache_dtype": number, "pages": Pages(PAGES, PAGE)}
    ops, _ = pallas_ops(config, params, batch=WIDTH, **cache_options)

    def on_h200(run: Callable, arguments: Sequence[Any]) -> tuple[Callable, Sequence[Any]]:
        return run, placed(arguments)

    with jax.sharding.use_abstract_mesh(mesh().abstract_mesh):
        programs = compile_serving(params, config, ops=ops, sizes=sizes, platform="gpu", spread=on_h200)
    size = PAGES * config.kv_heads * PAGE * config.head_dim * number.itemsize
    compiled: dict[str, Any] = programs._asdict()  # JAX's compiled programs, though their type is only `Callable`
    texts: dict[str, str] = {name: program.as_text() for name, program in compiled.items()}
    return Serving(
        size,
        {name: launches(text) for name, text in texts.items()},
        {name: swaps(text, size) for name, text in texts.items()},
    )


def broken_by_serving(serving: Serving) -> list[str]:
    """List the broken gates of the programs."""
    faults = [
        f"{name}: expected only stores to pages, got {count} other writes"
        for name, count in serving.swaps.items()
        if count
    ]
    for name, launched in serving.launches.items():
        for launch in launched:
            if not launch.by_us and launch.bytes >= serving.pages:
                faults.append(f"{name}: {launch.kind} writes {launch.bytes} bytes; expected less than a layer's keys")
    return faults
