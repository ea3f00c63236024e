"""Measures the tokens per second of many requests together, relative to one sequence.

    python -m llamaspec.benchmarks.audits.serve

The engine runs in this process, on random weights of a published shape. A round times three bursts of tokens: one
sequence as `generate` decodes it, the engine with a sequence in every row, and the engine with a sequence in only one
row. Every sequence already has 200 tokens. We report ratios of the fastest rounds, because only ratios carry over to
other machines.
"""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

from llamaspec.benchmarks.common.random_model import random_params, random_shapes
from llamaspec.benchmarks.common.report import write_report
from llamaspec.model.cache import Pages
from llamaspec.model.device import default_device
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.ops.choice import ops_for
from llamaspec.model.options import SamplingOptions
from llamaspec.model.running.jax_backend import JaxBackend
from llamaspec.model.running.programs import Layout, compile_programs, longest_burst, prompt_chunk
from llamaspec.model.weights.gpu_codes import arranged
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.serving.executor import JaxExecutor
from llamaspec.serving.loading import PAGE
from llamaspec.serving.programs import ProgramSizes, compile_serving
from llamaspec.serving.request import Request
from llamaspec.serving.scheduler import Plan, RowPlan

AFTER = 200  # tokens before the timed ones
BURST = 16


def single_stream(params: Params, shapes: Params, config: Config, dtype: np.dtype) -> Callable[[], float]:
    """Make a function that times a greedy call that draws `BURST` tokens after `AFTER` tokens, as `generate` does.

    The function returns the seconds per token.
    """
    device = default_device()
    capacity = AFTER + 8 * BURST
    layout = Layout(
        1, capacity, min(prompt_chunk(config, device.platform), capacity), longest_burst(device.platform), dtype
    )
    choice = ops_for("auto", config, shapes, batch=1, capacity=layout.rows, cache_dtype=dtype)
    programs = compile_programs(shapes, config, ops=choice.ops, layout=layout, platform=device.platform, greedy=True)
    backend = JaxBackend(params, programs, config, choice=choice, layout=layout, device=device)
    cache = backend.start()
    for start in range(0, AFTER, layout.chunk):
        cache = backend.extend(cache, [1] * min(layout.chunk, AFTER - start))
    greedy = SamplingOptions(temperature=0.0)

    def seconds() -> float:
        nonlocal cache
        cache = backend.rewind(cache, AFTER)
        drawing = backend.begin(1, seen=np.zeros(config.vocab, bool), seed=0, options=greedy, stops=[])
        jax.block_until_ready(cache)
        began = perf_counter()
        read, _, cache = backend.decode(cache, drawing, steps=BURST)
        read()
        return (perf_counter() - began) / BURST

    return seconds


def together(params: Params, shapes: Params, config: Config, dtype: np.dtype, width: int) -> Callable[[int], float]:
    """Make a function that times `BURST` steps of an engine with `width` rows.

    The function takes the number of rows in use, and returns the seconds per step. Each row in use has a sequence of
    `AFTER` tokens.
    """
    blocks = -(-(AFTER + BURST) // PAGE)
    sizes = ProgramSizes(width, 128, BURST, 1 + width * blocks, PAGE, blocks, dtype)
    cache_options: dict[str, Any] = {"capacity": blocks * PAGE, "cache_dtype": dtype, "pages": Pages(sizes.pages, PAGE)}
    choice = ops_for("auto", config, shapes, batch=width, **cache_options)
    programs = compile_serving(shapes, config, ops=choice.ops, sizes=sizes, platform=default_device().platform)
    executor = JaxExecutor(params, programs, config, sizes=sizes, eos=frozenset())
    request = Request((1,) * (AFTER + 1), BURST, temperature=0.0)

    def seconds(live: int) -> float:
        rows = tuple(
            RowPlan(i, i, AFTER, (1,), BURST, tuple(range(1 + i * blocks, 1 + (i + 1) * blocks))) for i in range(live)
        )
        began = perf_counter()
        executor.run(Plan(None, rows, ()), dict.fromkeys(range(live), request), {})
        return (perf_counter() - began) / BURST

    return seconds


def measure(config: Config, dtype: str, scheme: str | None, widths: Sequence[int], rounds: int) -> dict[str, float]:
    """Measure tokens per second of an engine of each width, relative to `generate` with one sequence.

    We measure each engine with all of its rows in use, and with one row in use.
    """
    numbers, device = np.dtype(dtype), default_device()
    shapes = random_shapes(config, dtype=numbers, positions=AFTER + 8 * BURST + 128, quantize=scheme)
    if device.has_kernels:
        shapes = jax.eval_shape(arranged, shapes)
    params = random_params(shapes, config)
    # For a GPU we compile all programs at once, because compiling took most of a run. A CPU has memory for one only.
    with ThreadPoolExecutor(1 if device.platform == "cpu" else 1 + len(widths)) as pool:
        single = pool.submit(single_stream, params, shapes, config, numbers)
        batches = {width: pool.submit(together, params, shapes, config, numbers, width) for width in widths}
        time_single, many = single.result(), {width: batch.result() for width, batch in batches.items()}
    least: dict[str, float] = {}
    for _ in range(rounds):
        times = {"one sequence": time_single()}
        for width, seconds in many.items():
            times[f"{width} together"] = seconds(width)
            times[f"1 of {width}"] = seconds(1)
        least = {name: min(value, least.get(name, value)) for name, value in times.items()}
    base = least["one sequence"]
    ratios = {f"{width} together": width * base / least[f"{width} together"] for width in widths}
    single_rows = {f"1 of {width}": base / least[f"1 of {width}"] for width in widths}
    return {"one sequence, ms a token": 1e3 * base, **ratios, **single_rows}


def main() -> None:
    """Measure, and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="stories-110m", choices=sorted(SHAPES))
    parser.add_argument("--forms", nargs="+", default=["float32", "bfloat16", "float32:q8"], metavar="DTYPE[:SCHEME]")
    parser.add_argument("--widths", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    results = {}
    for form in options.forms:
        dtype, _, scheme = form.partition(":")
        results[form] = measure(SHAPES[options.shape], dtype, scheme or None, options.widths, options.rounds)
        print(form, *(f"{name}: {value:.2f}" for name, value in results[form].items()), sep="  ", flush=True)
    if options.json:
        write_report({"shape": options.shape, "figures": results}, Path(options.json))


if __name__ == "__main__":
    main()
