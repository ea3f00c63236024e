"""Measures several devices: the cost of an all-reduce, and decoding compared with one device.

    python -m llamaspec.benchmarks.suites.multi_device --devices 2 --shape llama-3.1-8b --quantize q4 --json FILE

Weights of a shape are random, drawn on each device. `llamaspec bench --devices N` measures the same.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from llamaspec.benchmarks.common.random_model import random_params
from llamaspec.benchmarks.suites.model_suite import prompt_tokens
from llamaspec.benchmarks.suites.timed_model import TimedModel, choose_model
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.codes import quantized
from llamaspec.model.device import default_device
from llamaspec.model.insight.machine import about
from llamaspec.model.insight.plan import Link
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.llama import load_backend
from llamaspec.model.options import RunOptions, SamplingOptions
from llamaspec.model.parallel.backend import ParallelBackend
from llamaspec.model.parallel.load import plan_parallel
from llamaspec.model.parallel.partition import mesh
from llamaspec.model.parallel.reading import empty_share
from llamaspec.model.parallel.share import share
from llamaspec.model.parallel.tensor import AXIS
from llamaspec.model.running.jax_backend import JaxBackend
from llamaspec.model.running.programs import Layout, compile_programs, longest_burst, prompt_chunk
from llamaspec.model.weights.loading import Progress, abstract_params, no_progress

SIZES = tuple(4096 << (2 * i) for i in range(8))  # bytes: 4 KB to 64 MB
LOOP = 50  # all-reduces per call; fewer for large arrays
MOVED = 256 << 20  # most bytes that a call sums, unless it sums only two arrays
ROUNDS = 5


def all_reduce_rows(devices: int) -> list[dict[str, float]]:
    """Time an all-reduce of a float32 array of each of `SIZES` bytes. One program runs many all-reduces in a row."""
    over, rows = mesh(devices), []

    def many(x: jax.Array, times: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda _, x: lax.psum(x, AXIS) / devices, x)

    spread = jax.jit(jax.shard_map(many, mesh=over, in_specs=(P(), P()), out_specs=P(), check_vma=False))
    for size in SIZES:
        times = max(2, min(LOOP, MOVED // size))
        x = jnp.ones(size // 4, jnp.float32)
        jax.block_until_ready(spread(x, np.int32(times)))
        seconds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            jax.block_until_ready(spread(x, np.int32(times)))
            seconds.append((time.perf_counter() - began) / times)
        rows.append({"bytes": size, "seconds": statistics.median(seconds)})
    return rows


def constants(rows: Sequence[dict[str, float]], devices: int) -> dict[str, float]:
    """Fit the time 2 (n - 1) (alpha + beta m / n) of an all-reduce of m bytes in a ring of n devices.

    alpha comes from the least time of all rows. beta comes from the time of the largest array, minus this least time.
    On a busy machine the largest array may be the fastest. Then beta comes from its time without the subtraction.

    >>> fitted = constants([{"bytes": 0, "seconds": 2e-6}, {"bytes": 10**9, "seconds": 0.01}], 2)
    >>> round(fitted["alpha"] * 1e6, 3), round(1 / fitted["beta"] / 1e9)
    (1.0, 100)
    >>> round(1 / constants([{"bytes": 0, "seconds": 1.0}, {"bytes": 10**9, "seconds": 0.01}], 2)["beta"] / 1e9)
    100
    """
    steps, largest = 2 * (devices - 1), rows[-1]
    fastest = min(row["seconds"] for row in rows)
    beyond = largest["seconds"] - fastest or largest["seconds"]
    return {"alpha": fastest / steps, "beta": beyond / steps * devices / largest["bytes"]}


def running_on(subject: TimedModel, *, devices: int, context: int) -> JaxBackend:
    """Load a model onto several devices, or draw random weights there, for sequences of `context` tokens."""
    if subject.random:
        return random_backend(subject, devices=devices, context=context)
    how: dict[str, Any] = {"kernels": subject.kernels, "quantize": subject.quantize, "dtype": subject.dtype}
    backend = load_backend(
        subject.checkpoint(), RunOptions(context=context, devices=devices, greedy=True, own_process=True, **how)
    )
    assert isinstance(backend, JaxBackend)
    return backend


def random_backend(subject: TimedModel, *, devices: int, context: int) -> ParallelBackend:
    """Make a backend of random weights on several devices."""
    config, dtype = subject.config, np.dtype(subject.dtype)
    device, local = default_device(), share(config, devices)
    tensors = empty_share(config, devices, dtype)
    checkpoint = Checkpoint("random", "memory", local, tensors, bos=None, stops=frozenset())
    run = quantized(checkpoint, subject.quantize) if subject.quantize else checkpoint
    layout = Layout(
        1, context, min(prompt_chunk(config, device.platform), context), longest_burst(device.platform), dtype
    )
    shapes = abstract_params(local, dtype=dtype, positions=layout.rows, tensors=run.tensors)
    where = {"devices": devices, "layout": layout, "device": device}
    partition, choice = plan_parallel(local, shapes, **where, kernels=subject.kernels)
    how: dict[str, Any] = {"ops": choice.ops, "layout": layout, "platform": device.platform, "greedy": True}
    programs = compile_programs(shapes, local, **how, jit=partition.jit)
    shares = []
    for each_device in partition.mesh.devices:
        with jax.default_device(each_device):
            shares.append(random_params(shapes, local))
    params = partition.joined(partition.weights, shares)
    parts = {"partition": partition, "choice": choice, "layout": layout, "device": device}
    return ParallelBackend(params, programs, local, local=shapes, **parts)


def decode_row(backend: JaxBackend, *, position: int, vocab: int) -> dict[str, Any]:
    """Time greedy decoding steps after `position` tokens, and one prefill chunk at position 0."""
    options, seen = SamplingOptions(temperature=0), np.zeros(vocab, bool)
    cache, burst = backend.start(), min(backend.burst, backend.capacity - position)
    began = time.perf_counter()
    cache = jax.block_until_ready(backend.extend(cache, [1] * backend.chunk))
    cold = time.perf_counter() - began
    chunks, steps = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        cache = jax.block_until_ready(backend.extend(backend.rewind(cache, 0), [1] * backend.chunk))
        chunks.append(time.perf_counter() - began)
    for _ in range(ROUNDS + 1):
        cache = backend.rewind(cache, position)
        drawing = backend.begin(1, seen=seen, seed=0, options=options, stops=[])
        began = time.perf_counter()
        read, _, cache = backend.decode(cache, drawing, steps=burst)
        drawn = len(read())
        steps.append((time.perf_counter() - began) / drawn)
    step, chunk, bytes_read = (
        *map(statistics.median, (steps[1:], chunks)),
        backend.bytes_read(position + burst / 2),
    )
    return {
        "run": backend.describe(),
        "tokens_a_second": 1 / step,
        "prompt_tokens_a_second": backend.chunk / chunk,
        "bytes_a_device": bytes_read,
        "bytes_a_second": bytes_read / step,
        "cold_chunk_seconds": cold,
    }


def measure_several(
    numbers: Sequence[int],
    *,
    decoding: bool,
    context: int | None = None,
    progress: Progress = no_progress,
    **chosen: Any,
) -> dict[str, Any]:
    """Time all-reduces, for each number of devices in `numbers`. If `decoding`, also time the model of `choose_model`.

    Steps come after `context` tokens, by default 512 or half of the model's context. Raises ValueError for unknown
    names, for a context that the model cannot hold, for more devices than JAX has, and for a number of devices that
    cannot share the model.
    """
    report: dict[str, Any] = {"about": about(), "all_reduce": {}, "decode": []}
    subject = choose_model(**chosen) if decoding else None
    if subject:  # refused before anything is measured
        prompt_tokens(subject, context)
        for devices in numbers:
            share(subject.config, devices)
    for i, devices in enumerate(numbers):
        progress(f"{devices} device{'s' * (devices > 1)}", i / len(numbers))
        link = None
        if devices > 1:
            rows = all_reduce_rows(devices)
            all_reduce = constants(rows, devices)
            report["all_reduce"][devices], link = {"rows": rows, **all_reduce}, Link(**all_reduce)
        if subject:
            config, position = subject.config, prompt_tokens(subject, context)
            capacity = min(config.context, 1 << (position + 512).bit_length())
            backend = running_on(subject, devices=devices, context=capacity)
            row = decode_row(backend, position=position, vocab=config.vocab)
            sums = 2 * config.layers * link.all_reduce_seconds(devices, 4 * config.dim) if link else 0.0
            place = {**subject.about(), "devices": devices, "position": position}
            report["decode"].append({**place, **row, "seconds_of_sums": sums})
    return report


def as_text(report: Mapping[str, Any]) -> str:
    """Render the report as text."""
    lines = []
    for devices, measured in report["all_reduce"].items():
        lines.append(f"all-reduce over {devices} devices: {measured['alpha'] * 1e6:.1f} us per message, ")
        lines[-1] += f"{1 / measured['beta'] / 1e9:.1f} GB/s"
        for row in measured["rows"]:
            lines.append(f"  {row['bytes']:12,} bytes {row['seconds'] * 1e6:12,.1f} us")
    for row in report["decode"]:
        scheme, several = f" {row['quantize']}" if row["quantize"] else "", row["devices"] > 1
        lines.append(f"{row['name']}{scheme}, {row['devices']} device{'s' * several}: {row['run']}")
        lines.append(f"  a prompt       {row['prompt_tokens_a_second']:10,.0f} tokens/s")
        lines.append(f"  decoding       {row['tokens_a_second']:10,.1f} tokens/s after {row['position']}, ")
        suffix = " by each device" if several else ""
        lines[-1] += f"{row['bytes_a_device'] / 1e6:,.1f} MB read{suffix} at {row['bytes_a_second'] / 1e9:,.1f} GB/s"
        if several:
            share_of_step = row["seconds_of_sums"] * row["tokens_a_second"]
            lines.append(f"  sums           {share_of_step:10.0%} of a step, by the all-reduces above")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command line: measure, and write a report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shape", choices=SHAPES, help="also time decoding, with random weights of this shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--quantize")
    parser.add_argument("--context", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    of = {name: getattr(options, name) for name in ("shape", "dtype", "quantize", "context")}
    report = measure_several(options.devices, decoding=bool(options.shape), model="", **of)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    print(as_text(report), end="")


if __name__ == "__main__":
    main()
