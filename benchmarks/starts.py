"""Starts of the command, by phase: from the command to the first token, with nothing compiled and with everything.

python -m llamaspec.benchmarks.starts [--shape tinyllama-1.1b] [--quantize q8] [--cold 1] [--repeats 5] [--json FILE]

Writes a model of random weights in bfloat16, with the built-in tokenizer, and runs `generate --timings` on it: with an
empty cache folder each time, then several times with what the last of these runs has left there. The file is in memory
already, so `read` is not the time of a disk.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np

from llamaspec.benchmarks.report import write_report
from llamaspec.model.checkpoints.checkpoint import Checkpoint, Tensor
from llamaspec.model.checkpoints.huggingface.write import write_huggingface
from llamaspec.model.checkpoints.open import open_checkpoint, place_of
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.insight.timing import spread
from llamaspec.model.tensors import tensor_shapes
from llamaspec.reference.config import Config

ROOT = Path(__file__).parents[2]
FEW = 1 << 20  # weights that are drawn; they repeat
PHASES = ("import", "device", "read", "compile", "upload", "first_token", "total")


def write_model(config: Config, folder: Path) -> None:
    """Write a model of these sizes, whose weights repeat, so that it is written as fast as a disk allows."""
    stories = open_checkpoint("stories")
    drawn = np.random.default_rng(0).standard_normal(FEW, np.float32)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        def read() -> np.ndarray:
            weights = (drawn * shape[-1] ** -0.5).astype(ml_dtypes.bfloat16)
            return np.resize(weights, shape) if len(shape) == 2 else np.ones(shape, ml_dtypes.bfloat16)

        return Tensor(shape, np.dtype(ml_dtypes.bfloat16), read)

    tensors = {name: tensor(shape) for name, shape in tensor_shapes(config).items()}
    checkpoint = Checkpoint("random", "memory", config, tensors, bos=stories.bos, stops=stories.stops)
    tokenizer = place_of("stories") / "tokenizer.model"
    write_huggingface(checkpoint, folder, files={tokenizer.name: tokenizer.read_bytes()})


def start(model: str, cache: str, *options: str) -> dict[str, Any]:
    """Run the command once, in a process of its own; give its phases in seconds."""
    command = [sys.executable, "-m", "llamaspec.cli", "generate", "Once upon a time", "--model", model, *options]
    command += ["--max-new-tokens", "2", "--seed", "1", "--timings", "--json"]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    return json.loads(done.stdout)["start"]


def measured(model: str, *options: str, cold: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Start cold and warm, so many times each: the median, the least and the most of each phase."""

    def row(name: str, starts: list[dict[str, Any]]) -> dict[str, Any]:
        phases = {phase: spread([one[phase] for one in starts]) for phase in PHASES}
        return {"start": name, "starts": len(starts), **phases, "parallel": starts[-1]["parallel"]}

    with tempfile.TemporaryDirectory() as caches:
        folders = [str(Path(caches) / str(number)) for number in range(cold)]
        yield row("cold", [start(model, cache, *options) for cache in folders])
        yield row("warm", [start(model, folders[-1], *options) for _ in range(repeats)])


@click.command()
@click.option("--shape", type=click.Choice(["stories", *SHAPES]), default="stories", show_default=True)
@click.option("--quantize", "schemes", multiple=True, help="Also start with this scheme. May be given several times.")
@click.option("--cold", type=click.IntRange(1), default=1, show_default=True, help="Cold starts.")
@click.option("--repeats", default=5, show_default=True, help="Warm starts.")
@click.option("--json", "raw", type=click.Path(path_type=Path), help="Write every figure to this file.")
def main(shape: str, schemes: tuple[str, ...], cold: int, repeats: int, raw: Path | None):
    """Print the phases of a cold start and of warm ones."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = "stories"
        if shape != "stories":
            model = str(Path(folder) / "model")
            write_model(replace(SHAPES[shape], vocab=open_checkpoint("stories").config.vocab), Path(model))
        for scheme in (None, *schemes):
            options = ("--quantize", scheme) if scheme else ()
            for row in measured(model, *options, cold=cold, repeats=repeats):
                rows.append({"model": shape, "quantize": scheme, **row})
                print(json.dumps(rows[-1]), flush=True)
    if raw:
        write_report({"rows": rows}, raw)


if __name__ == "__main__":
    main()
