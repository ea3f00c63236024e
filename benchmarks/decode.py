"""Decode and prefill speed of random Llamas: medians of repeated runs, in turn, so that noise hits all variants alike.

python benchmarks/decode.py [--rounds 5] [--shape stories-110m ...] [--quantize q8 ...]

Writes benchmarks/results/decode-<device>.json; with --quantize, float32 beside those schemes alone, and
decode-quantised-<device>.json.
"""

import json
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import click
import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from model.checkpoints.checkpoint import Checkpoint, Tensor, tensor_shapes
from model.llama import load_backend
from model.options import SamplingOptions
from model.session import Backend, Session
from reference.config import Config
from reference.quantizers.schemes import SCHEMES

SHAPES = {
    "stories-260k": (64, 5, 8, 4, 8, 172, 512),
    "stories-15m": (288, 6, 6, 6, 48, 768, 32000),
    "stories-110m": (768, 12, 12, 12, 64, 2048, 32000),
}
VARIANTS = {
    "jax float32": {"backend": "jax", "dtype": "float32"},
    "jax bfloat16": {"backend": "jax", "dtype": "bfloat16"},
    "reference float64": {"backend": "reference"},
}
RESULTS = Path(__file__).parent / "results"
PROMPT, DECODED = 512, 50  # tokens


def random_checkpoint(shape: str) -> Checkpoint:
    """An untied Llama of that shape, its weights normal and small."""
    dim, layers, heads, kv_heads, head_dim, ffn, vocab = SHAPES[shape]
    config = Config(dim, layers, heads, kv_heads, head_dim, ffn, vocab, context=1024, eps=1e-5, theta=10_000.0)
    rng = np.random.default_rng(0)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        values = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        return Tensor(shape, values.dtype, lambda: values)

    tensors = {name: tensor(shape) for name, shape in tensor_shapes(config).items()}
    return Checkpoint(shape, "memory", config, tensors, bos=None, stops=frozenset())


def tokens_per_second(backend: Backend, vocab: int) -> tuple[float, float]:
    """Prefill of a prompt up to its first drawn token, and decoding after a prompt of one token."""
    greedy = SamplingOptions(temperature=0.0)

    def run(prompt: list[int], count: int) -> list[float]:
        times = [time.perf_counter()]
        session = Session(backend, vocab=vocab)
        for drawn, _ in session.bursts(prompt, max_new_tokens=count, options=greedy, seed=0, stops=frozenset()):
            times += [time.perf_counter()] * len(drawn)
        return times

    prompt = [i % vocab for i in range(PROMPT)]
    began, first = run(prompt, 1)
    times = run([1], DECODED)
    return PROMPT / (first - began), (len(times) - 2) / (times[-1] - times[1])


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--shape", "shapes", multiple=True, type=click.Choice(sorted(SHAPES)), default=list(SHAPES))
@click.option("--quantize", "schemes", multiple=True, type=click.Choice(list(SCHEMES)), help="May be repeated.")
def main(rounds: int, shapes: tuple[str, ...], schemes: tuple[str, ...]):
    """Measure, print a table, and write it with device and versions beside it."""
    variants = VARIANTS
    if schemes:
        variants = {"jax float32": VARIANTS["jax float32"]} | {f"jax {name}": {"quantize": name} for name in schemes}
    rows = []
    for shape in shapes:
        checkpoint = random_checkpoint(shape)
        backends = {name: load_backend(checkpoint, **options) for name, options in variants.items()}
        for backend in backends.values():
            tokens_per_second(backend, checkpoint.config.vocab)  # warm
        measured = {name: [] for name in backends}
        for _ in range(rounds):
            for name, backend in backends.items():
                measured[name].append(tokens_per_second(backend, checkpoint.config.vocab))
        for name, pairs in measured.items():
            prefill, decode = ([round(rate, 1) for rate in rates] for rates in zip(*pairs, strict=True))
            rows.append({"shape": shape, "variant": name, "prefill": prefill, "decode": decode})
            click.echo(f"{shape:14}{name:20}prefill {summary(prefill):28}decode {summary(decode)} tokens/s")
    device = jax.devices()[0]
    about = {
        "device": f"{device.platform} {device.device_kind}",
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "numpy")},
    }
    path = RESULTS / f"decode-{'quantised-' if schemes else ''}{device.platform}.json"
    path.write_text(json.dumps({"about": about, "prompt": PROMPT, "decoded": DECODED, "rows": rows}, indent=1) + "\n")
    click.echo(path, err=True)


def summary(rates: list[float]) -> str:
    """
    >>> summary([3.0, 1.0, 2.0])
    '2 (1 to 3)'
    """
    return f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"


if __name__ == "__main__":
    main()
