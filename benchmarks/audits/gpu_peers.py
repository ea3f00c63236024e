"""Compares our speed with llama.cpp and transformers on a GPU, with the same files, prompts and tokens, in one run.

    python -m llamaspec.benchmarks.audits.gpu_peers --llama-cpp FOLDER [--transformers] [--shape NAME]
        [--type NAME] [--scheme NAME] [--decode-only] [--seconds N]

FOLDER is the `bin` folder of a llama.cpp build with CUDA. Its `llama-quantize` writes the files, and its `llama-bench`
times prompts and decoding, with flash attention and all layers on the GPU. All engines read the same model with random
weights. Our engine runs in a separate process, and decodes as `generate` does. It uses bfloat16 for all arrays, except
for those that the file stores in a different dtype. Prints a line of JSON for each file and engine, with the median of
the rounds' tokens per second. The next file is quantized while our engine starts; nothing else runs while an engine
answers.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from llamaspec.benchmarks.audits.peers import EngineProcess, engine
from llamaspec.benchmarks.common.random_model import write_random_model
from llamaspec.benchmarks.common.report import in_a_line
from llamaspec.model.checkpoints.gguf.write import write_gguf
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.insight.timing import spread
from llamaspec.model.tokenizers.gguf_writer import vocabulary_keys
from llamaspec.reference.config import Config

WORKERS = Path(__file__).parent / "peer_workers"
OUR_ENGINE = "llamaspec.benchmarks.audits.peer_workers.our_engine"
TYPES = ("BF16", "Q4_K_M", "Q8_0", "Q4_0", "Q6_K", "Q5_K_M", "Q3_K_M", "Q2_K", "IQ4_NL", "Q5_0", "Q4_1", "Q5_1")
SCHEMES = ("q8", "q4", "fp8", "nf4")  # our own schemes, which GGUF files cannot hold
PROMPTS, DECODED, BEFORE = (512, 4096, 16_384), 512, 8  # tokens; decoding follows a prompt of `BEFORE` tokens
TINY = Config(256, 2, 4, 4, 64, 512, vocab=1024, context=1024, eps=1e-5, theta=1e4)
CONTEXT = 32_768  # replaces the context of a shape, so that all models read the same prompts
THREADS = 16


def ask_ours(worker: EngineProcess, prompts: Sequence[int], decoded: int, rounds: int) -> dict[str, Any]:
    """Send requests to our engine: one warm-up round, then `rounds` rounds. Returns tokens per second by request."""
    rates: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for request, count in [*(("prefill", tokens) for tokens in prompts), ("decode", decoded)]:
            rate = count / worker.ask(request, count)["seconds"]
            if number:
                rates.setdefault(f"{request} {count}", []).append(rate)
    return {name: spread(of) for name, of in rates.items()}


def ask_llama_bench(
    folder: Path, file: Path, prompts: Sequence[int], decoded: int, rounds: int, layers: int
) -> dict[str, Any]:
    """Run llama.cpp's benchmark on a file. Returns tokens per second for each prompt length and for decoding.

    Raises ValueError with the last line of stderr if the benchmark fails.
    """
    command = [str(folder / "llama-bench"), "-m", str(file), "-ngl", str(layers), "-fa", "1", "-r", str(rounds)]
    rates: dict[str, Any] = {}
    reading = [["-p", ",".join(map(str, prompts)), "-n", "0"]] if prompts else []
    for what in (*reading, ["-p", "0", "-n", str(decoded), "-d", str(BEFORE)]):
        for row in json.loads(output_of(*command, *what, "-o", "json")):
            name = f"prefill {row['n_prompt']}" if row["n_prompt"] else f"decode {row['n_gen']}"
            rates[name] = spread(row["samples_ts"])
    return rates


def output_of(*command: str) -> str:
    """Run a program of llama.cpp, and return its output. Raises ValueError with the last line of stderr if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{Path(command[0]).name}: {(done.stderr.strip() or 'no message on stderr').splitlines()[-1]}")
    return done.stdout


def ask_our_engine(
    model: Path, form: str, context: int, *, wait: Callable[[], object], **requests: Any
) -> dict[str, Any]:
    """Start our engine on a model. When the engine is ready, call `wait`, and then send the requests.

    Returns what `ask_ours` returns, and the seconds until the engine was ready.
    """
    command = (sys.executable, "-m", OUR_ENGINE, str(model), form, str(context))
    began = time.perf_counter()
    with engine(*command, threads=THREADS) as worker:
        ready = time.perf_counter() - began
        wait()
        return {"ready": ready, **ask_ours(worker, **requests)}


def write_models(config: Config, stored: Path, first: Path) -> None:
    """Write a random model into the folder `stored`, and as the GGUF file `first` in bfloat16."""
    write_random_model(config, stored)
    checkpoint = open_checkpoint(stored)
    write_gguf(checkpoint, first, vocabulary=vocabulary_keys(checkpoint, None))


def compared(
    config: Config, folder: Path, *, llama_cpp: Path, types: Sequence[str], schemes: Sequence[str], transformers: bool,
    rounds: int, prompts: Sequence[int], decoded: int, over: float, device: str
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Write the model, and yield a row for each file and engine.

    No further engine starts once `time.monotonic()` exceeds `over`.
    """
    context = max(prompts, default=BEFORE) + decoded
    requests: dict[str, Any] = {"prompts": prompts, "decoded": decoded, "rounds": rounds}
    stored, first = folder / "hf", folder / "BF16.gguf"
    write_models(config, stored, first)
    if not transformers and not schemes:
        shutil.rmtree(stored)  # a large model and its files fill a disk

    def row(file: str, who: str, ask: Any) -> dict[str, Any]:
        if time.monotonic() > over:
            return {"file": file, "engine": who, "skipped": "there was no time left"}
        try:
            return {"file": file, "engine": who, **ask()}
        except Exception as error:  # the other files and engines still run
            return {"file": file, "engine": who, "failed": in_a_line(error)}

    def quantize(kind: str) -> Path:
        file = folder / f"{kind}.gguf"
        if kind != "BF16" and time.monotonic() < over:
            quantizer = str(llama_cpp / "llama-quantize")
            output_of(quantizer, "--allow-requantize", str(first), str(file), kind, str(THREADS))
        return file

    def llama_bench(file: Future[Path]):
        layers = 0 if device == "cpu" else 99
        return lambda: ask_llama_bench(llama_cpp, file.result(), **requests, layers=layers)

    def one_type(kind: str, file: Future[Path], following: Future[Path] | None) -> dict[str, Any]:
        wait = following.exception if following else lambda: None
        result = row(kind, "ours", lambda: ask_our_engine(file.result(), "stored", context, wait=wait, **requests))
        if kind != "BF16":
            (folder / f"{kind}.gguf").unlink(missing_ok=True)
        return result

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(quantize, types[0]) if types else None
        for i, kind in enumerate(types):
            file, following = following, None
            assert file
            yield row(kind, "llama.cpp", llama_bench(file))
            if i + 1 < len(types):
                following = pool.submit(quantize, types[i + 1])
            yield one_type(kind, file, following)
    if transformers:
        script = str(WORKERS / "transformers_engine.py")

        def ask() -> Mapping[str, Any]:
            command = [sys.executable, script, str(stored), str(THREADS), "bfloat16", device]
            with engine(*command, threads=THREADS) as worker:
                return {**worker.versions, **ask_ours(worker, prompts, min(decoded, 64), rounds)}

        yield row("bfloat16", "transformers", ask)
    for scheme in schemes:
        yield row(
            scheme, "ours", lambda scheme=scheme: ask_our_engine(stored, scheme, context, wait=lambda: None, **requests)
        )


@click.command(help=__doc__)
@click.option("--llama-cpp", type=click.Path(exists=True, path_type=Path), required=True, metavar="FOLDER")
@click.option("--transformers", is_flag=True, help="Also measure transformers (must be installed).")
@click.option("--shape", "shapes", multiple=True, type=click.Choice([*SHAPES, "tiny"]), default=["tinyllama-1.1b"])
@click.option(
    "--type", "types", multiple=True, type=click.Choice(TYPES), help="Measure only this GGUF type. May be repeated."
)
@click.option(
    "--scheme",
    "schemes",
    multiple=True,
    type=click.Choice(SCHEMES),
    help="Measure only this scheme (one of ours that has no type in GGUF).",
)
@click.option("--decode-only", is_flag=True, help="Time only decoding, and no prompts.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--seconds", default=540.0, show_default=True, help="Seconds after which the remaining engines are skipped."
)
@click.option("--folder", type=click.Path(path_type=Path), help="Folder for the written models.  [default: /tmp]")
def main(
    llama_cpp: Path, transformers: bool, shapes: Sequence[str], types: Sequence[str], schemes: Sequence[str],
    decode_only: bool, rounds: int, seconds: float, folder: Path | None
):  # fmt: skip
    """Compare all types and schemes, or only the given types and schemes."""
    import jax

    from llamaspec.model.insight.machine import about

    over, device = time.monotonic() + seconds, jax.default_backend()
    types, schemes = (types, schemes) if types or schemes else (TYPES, SCHEMES)
    click.echo(json.dumps({"about": about()}))
    for shape in shapes:
        config = TINY if shape == "tiny" else replace(SHAPES[shape], context=CONTEXT)
        prompts = [tokens for tokens in PROMPTS if tokens + DECODED <= config.context] or [64]
        decoded = DECODED if len(prompts) > 1 else 32
        with tempfile.TemporaryDirectory(dir=folder) as where:
            for row in compared(
                *(config, Path(where)), llama_cpp=llama_cpp, types=types, schemes=schemes, transformers=transformers,
                rounds=rounds, prompts=[] if decode_only else prompts, decoded=decoded, over=over,
                device={"gpu": "cuda"}.get(device, device),
            ):  # fmt: skip
                click.echo(json.dumps({"shape": shape, **row}))


if __name__ == "__main__":
    main()
