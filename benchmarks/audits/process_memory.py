"""Measures how much memory a process on a CPU needs in addition to its arrays, to compile and to run a model.

    python -m llamaspec.benchmarks.audits.process_memory --json benchmarks/results/raw/process-memory.json

`model.running.memory` plans with these figures. Each model is loaded in its own process, with an empty cache of
compiled programs. Its arrays are small, and we subtract their size, as `memory_of` computes it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llamaspec.benchmarks.common.report import Column, Row, table, write_report
from llamaspec.benchmarks.common.resident import forget_peak, peak_resident_bytes, resident_bytes
from llamaspec.benchmarks.suites.growth import slope

LAYERS = (2, 8, 24)
MEASURED_SCHEMES = (None, "q8", "q4", "nf4", "fp8", "mxfp4")
COLUMNS = (
    Column("layers", "layers", "d"),
    Column("matrices in", "quantize"),
    Column("started, MB", "started", ",.0f", 1e-6),
    Column("compiling, MB", "compiling", ",.0f", 1e-6),
    Column("running, MB", "running", ",.0f", 1e-6),
)


def measured(layers: int, quantize: str | None) -> Row:
    """Measure this process's memory after JAX has started, and how much compiling and running add, in bytes.

    `compiling` and `running` are peaks minus `started`. `running` does not count the model's arrays.
    """
    import jax
    import numpy as np

    from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
    from llamaspec.model.checkpoints.codes import quantized
    from llamaspec.model.llama import load_backend
    from llamaspec.model.options import RunOptions, SamplingOptions
    from llamaspec.model.running.memory import memory_of
    from llamaspec.model.running.programs import prompt_chunk
    from llamaspec.model.running.session import Session
    from llamaspec.model.tensors import tensor_shapes
    from llamaspec.model.weights.loading import abstract_params
    from llamaspec.reference.config import Config

    config = Config(256, layers, 4, 2, 64, 512, vocab=4096, context=256, eps=1e-5, theta=1e4)
    number = np.float32(2**-8)
    tensors = {
        name: Tensor(shape, number.dtype, lambda shape=shape: np.broadcast_to(number, shape))
        for name, shape in tensor_shapes(config).items()
    }
    checkpoint = Checkpoint("constant", "memory", config, tensors, bos=None, stops=frozenset())
    tensors = (quantized(checkpoint, quantize) if quantize else checkpoint).tensors
    memory = memory_of(
        abstract_params(config, dtype=number.dtype, positions=1, tensors=tensors), config,
        batch=1, context=config.context, chunk=prompt_chunk(config, "cpu"), platform="cpu", cache_dtype=number.dtype,
    )  # fmt: skip
    arrays = memory.running - memory.process
    jax.devices()
    started = resident_bytes()
    backend = load_backend(checkpoint, RunOptions(quantize=quantize, own_process=True))
    compiling = peak_resident_bytes()
    forget_peak()
    session = Session[Any, Any](backend, vocab=config.vocab)
    prompt = [1] * (config.context - backend.burst)
    for _ in session.bursts(prompt, max_new_tokens=backend.burst, options=SamplingOptions(), seed=0, stops=frozenset()):
        pass
    return {
        **{"layers": layers, "quantize": quantize, "started": started},
        **{"compiling": compiling - started, "running": peak_resident_bytes() - started - arrays},
    }


def fitted(rows: Sequence[Row], key: str) -> tuple[float, float]:
    """Fit a line by least squares to the bytes `key` of the rows. Returns the bytes for 0 layers and per layer.

    >>> fitted([{"layers": 2, "running": 9.0}, {"layers": 4, "running": 13.0}], "running")
    (5.0, 2.0)
    """
    a_layer = slope([(row["layers"], row[key]) for row in rows])
    return sum(row[key] - a_layer * row["layers"] for row in rows) / len(rows), a_layer


def _in_a_process_of_its_own(layers: int, quantize: str | None) -> Row:
    words = [sys.executable, "-m", "llamaspec.benchmarks.audits.process_memory", "--only", str(layers), quantize or ""]
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main(arguments: Sequence[str] | None = None):
    """Run the command line. If `arguments` is None, read the arguments of this process."""
    parser = argparse.ArgumentParser(description="Measure the memory of a process on a CPU, without its arrays.")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=LAYERS, help="numbers of layers of the models to measure"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all numbers, the machine and the versions to FILE"
    )
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only:
        print(json.dumps(measured(int(options.only[0]), options.only[1] or None)))
        return
    rows = [_in_a_process_of_its_own(layers, scheme) for scheme in MEASURED_SCHEMES for layers in options.layers]
    print(table(COLUMNS, rows))
    for scheme in MEASURED_SCHEMES:
        for key in ("compiling", "running"):
            fixed, a_layer = fitted([row for row in rows if row["quantize"] == scheme], key)
            print(f"{key} {scheme or 'float32'}: {fixed / 1e6:,.0f} MB, plus {a_layer / 1e6:,.1f} MB per layer")
    if options.json:
        from llamaspec.model.insight.machine import about

        write_report({"about": about(), "rows": rows}, options.json)


if __name__ == "__main__":
    main()
