"""What a scheme costs: bits a weight, what a model then predicts, how far weights move, and how fast decoding gets.

python -m benchmarks.schemes [--tokens 4096] [--rounds 5]

Predictions are of stories that the model itself tells, in float32 at temperature 1, one after the other in a text that
is read in windows; of smoothquant, with activations as they are. Models are the built-in one and, with LLAMASPEC_DATA,
stories260K. Decoding is of random weights, of all schemes in turn in each round. Prints a table in Markdown, and keeps
every figure in benchmarks/results/schemes.json.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import ml_dtypes
import numpy as np

from benchmarks.machine import about
from benchmarks.model_speed import compile_programs, decode_seconds
from benchmarks.random_model import random_params, random_shapes
from benchmarks.report import write_report
from benchmarks.timing import Effort
from model.calibration import calibrated
from model.calibration_methods import METHODS
from model.checkpoints.checkpoint import Checkpoint, Tensor
from model.checkpoints.codes import is_matrix, quantised
from model.checkpoints.open import open_checkpoint
from model.evaluation import Comparison, Text, compare
from model.evaluation_by_tensor import decoded, relative_error
from model.jax_backend import BURST, JaxBackend, choose_ops, prompt_chunk
from model.llama import Llama, load, load_backend
from model.options import SamplingOptions
from model.shapes import SHAPES
from reference.quantizers import ggml
from reference.quantizers.schemes import SCHEMES

KEPT = Path(__file__).parent / "results" / "schemes.json"
GGML = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL")  # in blocks of 32, which small models have whole rows of
WINDOW = 256  # tokens of those that AWQ, GPTQ and SmoothQuant are calibrated with
AFTER = 128  # tokens in the cache where decoding begins
AS_TOLD = SamplingOptions(temperature=1.0, top_p=1.0)


class Form(NamedTuple):
    """A model as a scheme has it, and how it runs."""

    checkpoint: Checkpoint
    options: Mapping[str, Any]  # of `load_backend`; none: the weights alone differ
    scaled: bool = False  # whether a scheme moved scales between matrices, so that weights cannot be compared


def told(llama: Llama, tokens: int, *, seed: int) -> list[int]:
    """So many ids at least, of stories one after the other."""
    ids: list[int] = []
    while len(ids) < tokens:
        generation = llama.generate(sampling=AS_TOLD, max_new_tokens=llama.context - 1, seed=seed)
        ids += [*llama.encode(""), *(id for token in generation for id in [token.id])]
        seed += 1
    return ids


def forms(checkpoint: Checkpoint, calibration: np.ndarray) -> Iterator[tuple[str, Form]]:
    """The model in every form that there is here, one at a time."""
    yield "float32", Form(checkpoint, {})
    yield "bfloat16", Form(changed(checkpoint, lambda w: w.astype(ml_dtypes.bfloat16)), {})
    for name in SCHEMES:
        yield name, Form(quantised(checkpoint, name), {})
    for method in METHODS:
        made = calibrated(checkpoint, calibration, method=method)
        yield method, Form(in_memory(made), {}, scaled=METHODS[method].factors is not None)
    for type in GGML:
        if all(tensor.shape[1] % ggml.TYPES[type].weights == 0 for tensor in matrices(checkpoint).values()):
            yield f"GGUF {type}", Form(in_type(checkpoint, type), {})
    yield "float32, cache int8", Form(checkpoint, {"cache": "int8"})
    yield "q8, activations q8_0", Form(checkpoint, {"quantize": "q8", "emulate_activations": "q8_0"})


def matrices(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in checkpoint.tensors.items() if is_matrix(name)}


def changed(checkpoint: Checkpoint, change: Callable[[np.ndarray], np.ndarray], **fields: Any) -> Checkpoint:
    """The model with other matrices, of another dtype perhaps."""

    def tensor(old: Tensor) -> Tensor:
        new = change(old.read())
        return old._replace(read=lambda: new, dtype=new.dtype, **fields)

    new = {name: tensor(old) for name, old in matrices(checkpoint).items()}
    return replace(checkpoint, tensors={**checkpoint.tensors, **new})


def in_type(checkpoint: Checkpoint, type: str) -> Checkpoint:
    """The model with the weights that a GGUF file of that type would hold."""

    def rounded(weights: np.ndarray) -> np.ndarray:
        return ggml.decode(ggml.encode(weights.astype(np.float32), type), type).astype(np.float32)

    return changed(checkpoint, rounded, type=type)


def in_memory(checkpoint: Checkpoint) -> Checkpoint:
    """The model whose tensors are all read, in order: calibration begins anew for who goes back."""
    arrays = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    tensors = {name: t._replace(read=partial(arrays.__getitem__, name)) for name, t in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def bits(checkpoint: Checkpoint) -> float:
    """Of a weight, scales included, over all matrices."""
    each = matrices(checkpoint).values()

    def bits_of(tensor: Tensor) -> float:
        if tensor.type in ggml.TYPES:
            kind = ggml.TYPES[tensor.type]
            return 8 * kind.bytes / kind.weights * math.prod(tensor.shape)
        return 8 * tensor.bytes

    return sum(map(bits_of, each)) / sum(math.prod(tensor.shape) for tensor in each)


def weight_error(base: Checkpoint, checkpoint: Checkpoint) -> float:
    """`relative_error` of all matrices together."""

    def flat(model: Checkpoint) -> np.ndarray:
        return np.concatenate([tensor.read().astype(np.float64).ravel() for tensor in matrices(model).values()])

    return relative_error(flat(base), flat(checkpoint))


def predictions(name: str, place: str | Path, tokenizer: Path | None, *, tokens: int) -> dict[str, Any]:
    """Of one model, a row for each form."""
    base = open_checkpoint(place)
    llama = load(place, tokenizer=tokenizer)
    running = load_backend(decoded(base))
    assert isinstance(running, JaxBackend)
    ids = told(llama, tokens, seed=0)
    text = Text(ids, sum(len(llama.tokenizer.bytes_of(id)) for id in ids[1:]))
    calibration = np.array(told(llama, 32 * WINDOW, seed=1_000_000)[: 32 * WINDOW], np.int32).reshape(-1, WINDOW)
    rows = {}
    for form, (checkpoint, options, scaled) in forms(base, calibration):
        click.echo(f"{name}: {form}", err=True)
        one = load_backend(checkpoint, **options) if options else running.with_weights(decoded(checkpoint))
        made = quantised(checkpoint, options["quantize"]) if "quantize" in options else checkpoint
        compared = compare(one, running, text, context=llama.context)
        rows[form] = {"bits": bits(made), **figures(compared), "error": None if scaled else weight_error(base, made)}
    return {"tokens": text.tokens, "context": llama.context, "rows": rows}


def figures(compared: Comparison) -> dict[str, float]:
    return {"perplexity": compared.model.perplexity, **compared.divergence._asdict()}


def speeds(shape: str, *, rounds: int) -> dict[str, list[float]]:
    """Tokens a second that each form decodes, a round each. Forms that run as float32 are not among them."""
    config, chunk = SHAPES[shape], prompt_chunk()
    capacity = AFTER + BURST + chunk
    running = {}
    for name in ("float32", "bfloat16", *SCHEMES) if rounds else ():
        click.echo(f"compiling {name}", err=True)
        dtype, quantize = (np.dtype(name), None) if name not in SCHEMES else (np.dtype(np.float32), name)
        params = random_params(random_shapes(config, dtype=dtype, positions=capacity, quantize=quantize), config)
        ops = choose_ops("auto")
        programs = compile_programs(params, config, ops=ops, capacity=capacity, chunk=chunk, burst=BURST)
        running[name] = partial(decode_seconds, programs, params, context=AFTER, effort=Effort(3, warm=1))
    found: dict[str, list[float]] = {name: [] for name in running}
    for number in range(rounds):
        click.echo(f"round {number + 1} of {rounds}", err=True)
        for name, decode in running.items():
            found[name].append(1 / decode().median)
    return found


def markdown(report: Mapping[str, Any]) -> str:
    """The table, and what its figures are of."""
    models = report["models"]
    heads = " | ".join(f"{name}: perplexity | KL, mean | KL, 99 % | same top" for name in models)
    lines = [f"| scheme | bits | error of weights | {heads} | decoding |", "|---" * (4 + 4 * len(models)) + "|"]
    first = next(iter(models.values()))["rows"]
    for form, row in first.items():
        cells = [form, f"{row['bits']:.3g}", "" if row["error"] is None else f"{row['error']:.2g}"]
        for model in models.values():
            found = model["rows"].get(form)
            cells += _cells(found) if found else [""] * 4
        lines.append(f"| {' | '.join([*cells, _ratio(report['decoding'], form)])} |")
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, float]) -> list[str]:
    kl = [f"{row[key]:.2g}" for key in ("mean", "p99")]
    return [f"{row['perplexity']:.4f}", *kl, f"{100 * row['same_top']:.1f} %"]


def _ratio(decoding: Mapping[str, list[float]], form: str) -> str:
    """A form's speed over that of float32 in the same round.

    >>> _ratio({"float32": [10.0, 20.0, 10.0], "q4": [20.0, 60.0, 20.0]}, "q4")
    '2.0 (2.0 to 3.0)'
    """
    if not decoding.get(form):
        return ""
    each = [a / b for a, b in zip(decoding[form], decoding["float32"], strict=True)]
    return f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})"


@click.command(help=__doc__)
@click.option("--tokens", type=click.IntRange(2), default=4096, show_default=True, help="Of each model's own text.")
@click.option("--rounds", type=click.IntRange(0), default=5, show_default=True, help="Of decoding; 0: none.")
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="stories-110m", show_default=True)
@click.option("--json", "kept", type=click.Path(path_type=Path), default=KEPT, show_default=True)
def main(tokens: int, rounds: int, shape: str, kept: Path):
    models: dict[str, tuple[str | Path, Path | None]] = {"stories": ("stories", None)}
    if data := os.environ.get("LLAMASPEC_DATA"):
        folder = Path(data) / "stories260K"
        models["stories260K"] = folder / "stories260K.bin", folder / "tok512.model"
    report = {
        "machine": about(),
        "models": {name: predictions(name, *place, tokens=tokens) for name, place in models.items()},
        "shape": shape,
        "decoding": speeds(shape, rounds=rounds),
    }
    write_report(report, kept)
    click.echo(markdown(report), nl=False)
    click.echo(kept, err=True)


if __name__ == "__main__":
    main()
