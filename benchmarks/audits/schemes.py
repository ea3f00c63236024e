"""Measures each scheme: bits per weight, predictions, errors of weights, and speed of decoding.

python -m llamaspec.benchmarks.audits.schemes [--tokens 4096] [--rounds 5]

A model generates stories in float32 at temperature 1, and then predicts each story from beginning to end. AWQ, GPTQ and
SmoothQuant are calibrated with other stories of the same model. SmoothQuant is judged with int8 activations, for which
it was designed. For GGUF's types, hidden vectors are padded with zeros to whole blocks. The models are the built-in one
and, with LLAMASPEC_DATA, stories260K. We time decoding with random weights; each round times all schemes in turn.
Prints a Markdown table, and writes all numbers to benchmarks/results/raw/schemes.json.
"""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
import numpy as np
from jaxtyping import Int

from llamaspec.benchmarks.audits.scheme_forms import GGML, SUPERBLOCKS, SchemeForm, bits, forms, weight_error
from llamaspec.benchmarks.common.model_speed import compile_programs, decode_seconds
from llamaspec.benchmarks.common.random_model import random_params
from llamaspec.benchmarks.common.report import RAW, write_report
from llamaspec.model.checkpoints.checkpoint import Codes, Tensor
from llamaspec.model.checkpoints.checkpoint import Form as CodeForm
from llamaspec.model.checkpoints.codes import form_of
from llamaspec.model.checkpoints.gguf.blocks import FORMS
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.insight.evaluation import EvalText, Predictor, comparison, recorded, scored_logits
from llamaspec.model.insight.evaluation_by_tensor import decoded
from llamaspec.model.insight.machine import about
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.insight.timing import Effort
from llamaspec.model.llama import Llama, load, load_backend
from llamaspec.model.ops.choice import ops_for
from llamaspec.model.options import RunOptions, SamplingOptions
from llamaspec.model.running.programs import longest_burst, prompt_chunk
from llamaspec.model.tensors import quantizable, tensor_shapes
from llamaspec.model.weights.loading import abstract_params
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.schemes import SCHEMES

RAW_FILE = RAW / "schemes.json"
WINDOWS, WINDOW = 32, 256  # number of windows for calibration, and tokens in each
OTHER_STORIES = 1_000_000  # seed of the first story of calibration
AFTER = 128  # tokens in the cache before decoding
AS_TOLD = SamplingOptions(temperature=1.0, top_p=1.0)


class Stored(NamedTuple):
    """The dtype of a model in memory, and how its matrices are quantized, if at all."""

    dtype: str = "float32"
    codes: CodeForm | None = None
    group: int | None = None  # columns that share a scale; None: the whole row


DECODED = {
    "float32": Stored(),
    "bfloat16": Stored("bfloat16"),
    **{name: Stored(codes=form_of(name), group=SCHEMES[name].group) for name in SCHEMES},
    **{f"GGUF {type}": Stored("float32", *FORMS[type]) for type in (*GGML, *SUPERBLOCKS) if type != "Q5_0"},
}
DECODED_AS = {"awq": "q4", "gptq": "q4", "smoothquant": "q8_row", "GGUF Q5_0": "GGUF Q8_0"}


def sample_stories(llama: Llama, tokens: int, *, seed: int) -> list[list[int]]:
    """Generate stories of at least `tokens` tokens in total, each from BOS to its end or the end of the context."""
    stories: list[list[int]] = []
    while sum(map(len, stories)) < tokens:
        generation = llama.generate(sampling=AS_TOLD, max_new_tokens=llama.context - 1, seed=seed + len(stories))
        for _ in generation:
            pass
        stories.append([*llama.encode(""), *generation.ids])
    return stories


def in_windows(stories: Sequence[list[int]]) -> Int[np.ndarray, "windows seq"]:
    """Concatenate stories and cut them into windows that begin with BOS, as `convert --calibration` cuts a text."""
    ids = [id for story in stories for id in story[1:]]
    rows = np.array(ids[: WINDOWS * (WINDOW - 1)], np.int32).reshape(WINDOWS, WINDOW - 1)
    return np.insert(rows, 0, stories[0][0], axis=1)


def predictions(name: str, place: str | Path, tokenizer: Path | None, *, tokens: int) -> dict[str, Any]:
    """Measure how well a model predicts its own stories (at least `tokens` tokens), in each form of `forms`.

    The row of a form has bits per weight, error of the weights, perplexity, and KL divergence from the original model.
    """
    base, llama = open_checkpoint(place), load(place, tokenizer=tokenizer)
    running = load_backend(decoded(base))
    stories = [
        EvalText(ids, sum(len(llama.tokenizer.bytes_of(id)) for id in ids[1:]))
        for ids in sample_stories(llama, tokens, seed=0)
    ]
    windows = in_windows(sample_stories(llama, WINDOWS * (WINDOW + 1), seed=OTHER_STORIES))

    def backend_of(form: SchemeForm) -> Predictor:
        if form.options:
            return load_backend(form.checkpoint, RunOptions(**form.options))
        plain = decoded(form.checkpoint)
        return running.with_weights(plain) if plain.config == base.config else load_backend(plain)

    def logits(model: Predictor) -> Iterator[np.ndarray]:
        return chain.from_iterable(scored_logits(model, story, context=llama.context) for story in stories)

    targets, size = [id for story in stories for id in story.ids[1:]], sum(story.bytes for story in stories)
    rows = {}
    with recorded(logits(running)) as predicted:
        for form in forms(base, windows):
            click.echo(f"{name}: {form.name}", err=True)
            compared = comparison(logits(backend_of(form)), predicted, targets, bytes=size)
            rows[form.name] = {
                "bits": bits(form.checkpoint),
                "error": None if form.scaled else weight_error(base, form.checkpoint),
                "perplexity": compared.model.perplexity,
                **compared.divergence._asdict(),
            }
    return {"stories": len(stories), "tokens": len(targets), "rows": rows}


def speeds(shape: str, *, rounds: int) -> dict[str, list[float]]:
    """Measure the decoding speed of each form in `DECODED`, in tokens per second, one number per round."""
    config, platform = SHAPES[shape], jax.default_backend()
    chunk, burst = prompt_chunk(config, platform), longest_burst(platform)
    capacity = AFTER + burst + chunk
    running = {}
    for name, stored in DECODED.items() if rounds else ():
        click.echo(f"compiling {name}", err=True)
        params = random_params(shapes(config, stored, positions=capacity), config)
        ops = ops_for("auto", config, params, batch=1, capacity=capacity, cache_dtype=params.embedding.dtype).ops
        programs = compile_programs(params, config, ops=ops, capacity=capacity, chunk=chunk, burst=burst)
        running[name] = partial(decode_seconds, programs, params, context=AFTER, effort=Effort(3, warm=1))
    rates: dict[str, list[float]] = {name: [] for name in running}
    for number in range(rounds):
        click.echo(f"round {number + 1} of {rounds}", err=True)
        for name, decode in running.items():
            rates[name].append(1 / decode().median)
    return rates


def shapes(config: Config, stored: Stored, *, positions: int) -> Params:
    """Return the shapes of a model that has matrices in the form `stored` and RoPE tables for `positions`."""

    matrices = quantizable(config)

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        codes = None
        if stored.codes and name in matrices:
            codes = Codes(stored.codes, stored.group or shape[1], zeros=False, bytes=0, parts=lambda: iter(()))
        return Tensor(shape, np.dtype(stored.dtype), lambda: np.empty(0), codes)

    tensors = {name: tensor(name, shape) for name, shape in tensor_shapes(config).items()}
    return abstract_params(config, dtype=np.dtype(stored.dtype), positions=positions, tensors=tensors)


def markdown(report: Mapping[str, Any]) -> str:
    """Render the table as Markdown. A cell is empty if a scheme or type does not fit the sizes of a model."""
    models = report["models"]
    heads = " | ".join(f"{name}: perplexity | KL | same top" for name in models)
    lines = [f"| scheme | bits | error of weights | {heads} | decoding |", "|---" * (4 + 3 * len(models)) + "|"]
    first = next(iter(models.values()))["rows"]
    for form, row in first.items():
        cells = [form, f"{row['bits']:.3g}", "" if row["error"] is None else f"{row['error']:.2g}"]
        for model in models.values():
            figures = model["rows"].get(form)
            cells += _cells(figures) if figures else [""] * 3
        lines.append(f"| {' | '.join([*cells, _ratio(report['decoding'], form)])} |")
    only_decoded = [f"{form} {_ratio(report['decoding'], form)}" for form in report["decoding"] if form not in first]
    if only_decoded:
        lines += ["", f"Decoding: {', '.join(only_decoded)}."]
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, float]) -> list[str]:
    kl = f"{row['mean']:#.2g}" if row["mean"] else "0"
    return [f"{row['perplexity']:.4f}", kl, f"{100 * row['same_top']:.1f} %"]


def _ratio(decoding: Mapping[str, list[float]], form: str) -> str:
    """Render a form's speed relative to float32 in the same round, or "as FORM" if FORM runs the same program.

    >>> rates = {"float32": [10.0, 20.0, 10.0], "q4": [20.0, 60.0, 20.0], "nf4": [9.0, 16.0, 9.0]}
    >>> [_ratio(rates, form) for form in ("q4", "nf4", "gptq")]
    ['2.0 (2.0 to 3.0)', 'slower: 0.9 (0.8 to 0.9)', 'as q4']
    """
    if form in DECODED_AS and decoding:
        return f"as {DECODED_AS[form]}"
    if form not in decoding or form == "float32":
        return ""
    quotients = [a / b for a, b in zip(decoding[form], decoding["float32"], strict=True)]
    text = f"{statistics.median(quotients):.1f} ({min(quotients):.1f} to {max(quotients):.1f})"
    return text if statistics.median(quotients) >= 1 else f"slower: {text}"


@click.command(help=__doc__)
@click.option(
    "--tokens",
    type=click.IntRange(2),
    default=4096,
    show_default=True,
    help="Minimum number of tokens to predict with each model.",
)
@click.option(
    "--rounds", type=click.IntRange(0), default=5, show_default=True, help="Rounds of timed decoding (0: none)."
)
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="stories-110m", show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path), default=RAW_FILE, show_default=True)
def main(tokens: int, rounds: int, shape: str, file: Path):
    models: dict[str, tuple[str | Path, Path | None]] = {"stories": ("stories", None)}
    if data := os.environ.get("LLAMASPEC_DATA"):
        folder = Path(data) / "stories260K"
        models["stories260K"] = folder / "stories260K.bin", folder / "tok512.model"
    report = {
        "machine": about(),
        "models": {name: predictions(name, *place, tokens=tokens) for name, place in models.items()},
        "shape": shape,
        "after": AFTER,
        "decoding": speeds(shape, rounds=rounds),
    }
    write_report(report, file)
    click.echo(markdown(report), nl=False)
    click.echo(file, err=True)


if __name__ == "__main__":
    main()
