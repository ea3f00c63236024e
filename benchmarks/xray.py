"""Seconds, memory and bytes of the X-ray page of a large model: `python -m llamaspec.benchmarks.xray llama-3.2-1b`.

The weights are random, and drawn before the time begins. A page costs as much with trained ones.
"""

import argparse
import json
import resource
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

from llamaspec.benchmarks.random_model import random_checkpoint
from llamaspec.learn.trace import record
from llamaspec.learn.xray.content import default_layers
from llamaspec.learn.xray.page import write_page
from llamaspec.model.candidates.walking import chosen_ops, walkable
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.verify.bounds.precision import precision

TOKENS = 12  # as a short sentence has


def main() -> None:
    """Make a page in a temporary folder, and print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    options = parser.parse_args()
    config = SHAPES[options.shape]
    checkpoint = random_checkpoint(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab, TOKENS).tolist()
    start = perf_counter()
    walker = walkable(checkpoint, chosen_ops("auto"), dtype=precision(options.dtype).dtype, rows=TOKENS)
    recording = record(walker, tokens, config=config, dtype=options.dtype, layers=default_layers(config))
    with tempfile.TemporaryDirectory() as folder:
        write_page(Path(folder), recording, checkpoint, name=options.shape, text_of=str)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    seconds = perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"shape": options.shape, "seconds": round(seconds, 1), "bytes": size, "peak_memory": memory}))


if __name__ == "__main__":
    main()
