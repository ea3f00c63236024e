"""Prompts in chunks of several lengths, on a GPU: what `model.running.programs.wide_chunks` is chosen by.

python -m llamaspec.benchmarks.prompt_chunks [--shape llama-3.1-8b] [--quantize q8] [--json FILE]

Weights are random, activations bfloat16, ops those that the model runs with. Each prompt is read in chunks of one
length, the last one padded.
"""

import json
from functools import partial
from pathlib import Path
from time import perf_counter

import click
import jax
import numpy as np

from llamaspec.benchmarks.model_speed import Programs, prefill_seconds
from llamaspec.benchmarks.random_model import random_params, random_shapes
from llamaspec.benchmarks.report import write_report
from llamaspec.model.cache import empty_cache
from llamaspec.model.device import default_device
from llamaspec.model.forward import prefill
from llamaspec.model.insight.machine import about
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.insight.timing import Effort
from llamaspec.model.ops.choice import ops_for
from llamaspec.model.ops.table import Ops
from llamaspec.model.running.compile import model_options
from llamaspec.model.running.programs import CACHE
from llamaspec.model.weights.gpu_codes import arranged
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

EFFORT = Effort(repeats=5, warm=2)


def reading(params: Params, config: Config, ops: Ops, *, capacity: int, chunk: int) -> Programs:
    """Compile the program that reads a prompt, and no other."""
    began, dtype = perf_counter(), params.embedding.dtype
    cache = jax.eval_shape(partial(empty_cache, config, batch=1, capacity=capacity, dtype=dtype))
    shapes = jax.eval_shape(lambda params: params, params)
    counts = jax.ShapeDtypeStruct((1,), np.int32)
    prompt = jax.ShapeDtypeStruct((1, chunk), np.int32)
    jitted = jax.jit(partial(prefill, config=config, ops=ops), donate_argnums=CACHE)
    options = model_options(jax.default_backend(), shapes, config, ops=ops, batch=1)
    program = jitted.lower(shapes, prompt, cache, counts).compile(options)
    sizes = {"capacity": capacity, "chunk": chunk, "burst": 0, "batch": 1, "seconds": perf_counter() - began}
    return Programs(program, lambda greedy: None, config, **sizes)


@click.command()
@click.option("--shape", "names", multiple=True, default=("tinyllama-1.1b", "llama-3.1-8b"), show_default=True)
@click.option("--quantize", "schemes", multiple=True, default=("", "q8"), help='By default "" (bfloat16) and q8.')
@click.option("--chunk", "chunks", multiple=True, type=int, default=(256, 512, 1024, 2048), show_default=True)
@click.option("--prompt", "prompts", multiple=True, type=int, default=(512, 4096, 16_384), show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--json", "raw", type=click.Path(path_type=Path), help="Write every figure to this file.")
def main(
    names: tuple[str, ...],
    schemes: tuple[str, ...],
    chunks: tuple[int, ...],
    prompts: tuple[int, ...],
    dtype: str,
    raw: Path | None,
):
    """Print milliseconds and tokens a second of each prompt, in chunks of each length."""
    rows, device = [], default_device()
    capacity = max(prompts) + max(chunks)
    for name in names:
        config = SHAPES[name]
        for scheme in schemes:
            shapes = random_shapes(config, dtype=np.dtype(dtype), positions=capacity, quantize=scheme or None)
            shapes = jax.eval_shape(arranged, shapes) if device.has_kernels else shapes
            params = random_params(shapes, config)
            sizes = {"batch": 1, "capacity": capacity, "cache_dtype": np.dtype(dtype)}
            ops = ops_for("auto", config, shapes, device=device, **sizes).ops
            for chunk in chunks:
                programs = reading(params, config, ops, capacity=capacity, chunk=chunk)
                for tokens in prompts:
                    seconds = prefill_seconds(programs, params, tokens=tokens, effort=EFFORT)
                    row = {
                        "model": name,
                        "quantize": scheme or dtype,
                        "chunk": chunk,
                        "prompt": tokens,
                        "compiling": programs.seconds,
                    }
                    rows.append({**row, "ms": seconds.median * 1e3, "tokens_per_second": tokens / seconds.median})
                    print(json.dumps(rows[-1]), flush=True)
            del params
    if raw:
        write_report({"about": about(), "rows": rows}, raw)


if __name__ == "__main__":
    main()
