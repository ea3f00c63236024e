"""Processes that draw the same numbers and decode the same tokens: does one of them ever get others?

python -m llamaspec.benchmarks.determinism [--processes 10] [--repeats 5] [--at-once 2] [--seconds N] [--json FILE]

On a GPU, once, one of ten processes drew another cache for TinyLlama in float32, before any kernel of ours had run.
Each process here draws weights and a cache, decodes after them, and does it again. After each stage the bits of every
array are summed up on the device, as integers, so that the order of a sum cannot matter. A stage whose sums are not the
same in all processes and repeats is printed with the arrays that differ, and the script ends with 1.
"""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryFile
from threading import TIMEOUT_MAX, Timer
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from llamaspec.benchmarks.model_speed import GREEDY, compile_programs, decoding
from llamaspec.benchmarks.random_model import random_cache, random_params, random_shapes
from llamaspec.benchmarks.report import write_report
from llamaspec.model.device import default_device
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.ops.choice import ops_for

ROOT = Path(__file__).parents[2]
STRIDE = np.uint32(2_654_435_761)  # odd, so that no bit of a product is lost
TOKENS, CONTEXT, CAPACITY = 16, 300, 1024

Digests = dict[str, int]  # by the path of an array


@jax.jit
def checksum(array: Array) -> UInt32[Array, ""]:
    """Sum the bits of an array, each word times a number that depends on its place."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    words = lax.bitcast_convert_type(array, unsigned).reshape(-1).astype(jnp.uint32)
    places = jnp.arange(words.size, dtype=jnp.uint32) * STRIDE | 1
    return jnp.sum(words * places, dtype=jnp.uint32)


def digests(tree: Any) -> Digests:
    """Give the checksum of each array of a tree."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): int(checksum(array)) for path, array in paths}


def stages(shape: str, dtype: str, repeats: int) -> Iterator[tuple[str, Digests]]:
    """Yield the checksums of each stage, in the process that runs them."""
    config, device = SHAPES[shape], default_device()
    shapes = random_shapes(config, dtype=np.dtype(dtype), positions=CAPACITY)
    sizes = {"batch": 1, "capacity": CAPACITY, "cache_dtype": np.dtype(dtype)}
    tables = ("xla", "pallas") if device.has_kernels else ("xla",)
    programs = {}
    for _ in range(repeats):
        params = random_params(shapes, config)
        yield "weights", digests(params)
        yield "cache", digests(random_cache(config, dtype=np.dtype(dtype), capacity=CAPACITY))
        for table in tables:
            if table not in programs:
                ops = ops_for("auto" if table == "pallas" else table, config, shapes, device=device, **sizes).ops
                programs[table] = compile_programs(params, config, ops=ops, capacity=CAPACITY, chunk=64, burst=TOKENS)
            drawn, taken = decoding(programs[table], params, context=CONTEXT, options=GREEDY)()
            yield f"tokens by {table}", digests({"drawn": drawn, "taken": taken})
            yield f"weights after {table}", digests(params)
        del params


def found_by(
    processes: int, at_once: int, arguments: list[str], *, seconds: float | None = None
) -> list[tuple[int, str, Digests]]:
    """Run the processes; list each stage with the number of its process.

    After so many `seconds` those that still run are ended, and what they found until then is kept.
    """
    found: list[tuple[int, str, Digests]] = []
    over = time.monotonic() + seconds if seconds else math.inf

    def run(number: int) -> None:
        if time.monotonic() > over:
            return
        command = [sys.executable, "-m", "llamaspec.benchmarks.determinism", "--worker", *arguments]
        with TemporaryFile("w+") as said, Popen(command, cwd=ROOT, stdout=PIPE, stderr=said, text=True) as process:
            timer = Timer(min(over - time.monotonic(), TIMEOUT_MAX), process.kill)
            timer.start()
            assert process.stdout
            try:
                found.extend((number, *json.loads(line)) for line in process.stdout if line.endswith("\n"))
                process.wait()
            finally:
                timer.cancel()  # or this process would wait for it
            said.seek(0)
            if process.returncode and time.monotonic() < over:
                raise RuntimeError(f"process {number} ended with {process.returncode}: {said.read()[-500:]}")

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, range(processes)))
    return found


def report(found: list[tuple[int, str, Digests]], say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Compare every stage with what most processes found; say which arrays of which process differ."""
    rows = []
    for stage in dict.fromkeys(stage for _, stage, _ in found):
        all_of_it = [(number, sums) for number, name, sums in found if name == stage]
        usual = {name: Counter(sums[name] for _, sums in all_of_it).most_common(1)[0][0] for name in all_of_it[0][1]}
        wrong = [(number, [name for name in sums if sums[name] != usual[name]]) for number, sums in all_of_it]
        differing = [(number, names) for number, names in wrong if names]
        rows.append({"stage": stage, "times": len(all_of_it), "arrays": len(usual), "differing": differing})
        say(f"{stage}: {len(all_of_it)} times {len(usual)} arrays, {len(differing)} times different")
        for number, names in differing:
            say(f"  process {number}: {len(names)} arrays, {', '.join(names[:5])}")
    return rows


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="tinyllama-1.1b", show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--processes", default=10, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Turns of each process.")
@click.option("--at-once", default=2, show_default=True, help="Processes at once, which share the device.")
@click.option("--seconds", type=float, help="Seconds after which processes that still run are ended.")
@click.option("--json", "raw", type=click.Path(path_type=Path), help="Write what was found to this file.")
@click.option("--worker", is_flag=True, hidden=True, help="Be one of the processes.")
def main(
    shape: str, dtype: str, processes: int, repeats: int, at_once: int, seconds: float | None, raw: Path | None,
    worker: bool
):  # fmt: skip
    """Look for numbers that are not the same in all processes."""
    if worker:
        for stage in stages(shape, dtype, repeats):
            print(json.dumps(stage), flush=True)
        return
    arguments = ["--shape", shape, "--dtype", dtype, "--repeats", str(repeats)]
    found = found_by(processes, at_once, arguments, seconds=seconds)
    rows = report(found, partial(print, flush=True))
    if raw:
        write_report(
            {"shape": shape, "dtype": dtype, "processes": len({number for number, *_ in found}), "rows": rows}, raw
        )
    if not rows:
        raise click.ClickException("no process came to the end of a stage: nothing was compared")
    sys.exit(any(row["differing"] for row in rows))


if __name__ == "__main__":
    main()
