"""Judges every weight quantizer on the built-in model: bits, guarantee, error, and a picture of its grid.

python -m llamaspec.learn.site.gallery    writes docs/gallery.md and its pictures, in two minutes
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from llamaspec.learn.quantizers.by_inputs import METHODS
from llamaspec.learn.quantizers.schemes import COLS, SCHEMES, Rounding, rounded
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.insight.evaluation_by_tensor import relative_error
from llamaspec.model.llama import load
from llamaspec.model.options import SamplingOptions
from llamaspec.model.quantize.calibration import calibrated
from llamaspec.model.quantize.methods import METHODS as METHODS_OF_MODELS
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.tensors import quantizable
from llamaspec.reference.llama import empty_cache, forward
from llamaspec.reference.logsumexp import logsumexp

STORIES = 2  # number of stories that the model writes, and then predicts
CALIBRATION = 4  # number of other stories, for the methods that use activations
WIDTH, HEIGHT, LEFT, AXIS, TICK, SAW = 360, 150, 10, 46, 18, 130  # sizes of a picture in pixels
# STEPS: how many numbers a picture rounds. COLUMNS: how many points its line has; each is the largest error of STEPS /
# COLUMNS numbers.
STEPS, COLUMNS = 1440, 180
SPEEDS = Path(__file__).parents[3] / "benchmarks/results/schemes.md"
Number = int | float


PAGE = """# Quantizers: a gallery

All weight quantizers of [reference/quantizers](../reference/quantizers/), applied to the built-in model: their size,
the guarantee for each weight, the error over all weights, and the cost in predictions. `python -m
llamaspec.learn.site.gallery` writes this page.

- **Bits** per weight, scales included, for a row of {cols} weights.
- **Guaranteed**, in short: how far a weight may move. The page of the scheme has the exact bound and its reason.
- **Error**: root mean square of the change of all matrices, relative to the weights. Embeddings stay unchanged.
- **KL**: divergence from the model in float64, in nats per token, over {tokens} tokens of {stories} stories that it
  generated, computed by `reference/`. **Same top**: how often both have the same most probable token.
- **Speed**: tokens/s relative to float32, for a model of 110 million random weights that runs from the scheme's codes;
  median of five rounds (least to most); `-` if nothing runs the scheme directly, or it was not measured.
  {measured}
  [quantization.md](quantization.md) has the conditions, [performance-gpu.md](performance-gpu.md) the results on GPUs.
- The picture shows 32 weights of one row (orange, above), the numbers that one of them can become while the others
  are fixed (blue), and the rounding error at each number (below).

The model is small, with 10 layers of 128 numbers. Large models lose less with equal bits. For types of 256 weights,
rows of 128 are padded with zeros.

| scheme | bits | guaranteed | error | KL | same top | speed | grid |
|---|---|---|---|---|---|---|---|
{table}

Not in the table: `kv_cache`, `fixed_point` and `ggml_activations` round activations, `qat` trains with rounding, and
`ggml_lattices` and `ggml_grids` only read weights (IQ1 to IQ4_XS). `ggml_search` is a part of Q2_K to Q6_K.
"""


class GalleryRow(NamedTuple):
    """A scheme, and its effect on the built-in model."""

    name: str
    page: str  # the file that defines the scheme
    bits: float
    guarantee: str
    error: float | None  # root mean square error, relative to the weights; None if scales moved between matrices
    divergence: float  # KL divergence from the model in float64, in nats per token
    same_top: float


class Judge:
    """The built-in model, the stories that it wrote, and its logits for them."""

    def __init__(self, stories: int = STORIES):
        self.base = open_checkpoint("stories")
        calibration_ids = tell(stories + CALIBRATION)
        self.stories = calibration_ids[:stories]
        width = min(map(len, calibration_ids[stories:]))
        self.windows = np.array([ids[:width] for ids in calibration_ids[stories:]])
        self.expected_logits = [_logits(self.base, ids) for ids in self.stories]

    def error(self, model: Checkpoint) -> float:
        """Compute the root mean square error of all matrices, relative to the root mean square of their weights."""
        names = sorted(quantizable(self.base.config))
        flat = [
            np.concatenate([of.tensors[name].read().astype(np.float64).ravel() for name in names])
            for of in (self.base, model)
        ]
        return relative_error(*flat)

    def predictions(self, model: Checkpoint) -> tuple[float, float]:
        """Compare a model's predictions for the stories with the base model's.

        Returns the mean KL divergence in nats per token, and the share of tokens (0 to 1) at which both models have the
        same likeliest next token.
        """
        divergences, agreed = [], []
        for ids, expected in zip(self.stories, self.expected_logits, strict=True):
            got = _logits(model, ids)
            p, q = (logits - logsumexp(logits)[:, None] for logits in (expected, got))
            divergences.append(np.sum(np.exp(p) * (p - q), axis=-1))
            agreed.append(p.argmax(axis=-1) == q.argmax(axis=-1))
        return float(np.mean(np.concatenate(divergences))), float(np.mean(np.concatenate(agreed)))


def tell(count: int) -> list[list[int]]:
    """Let the built-in model write `count` stories at temperature 1. Returns the ids of each story."""
    llama = load("stories", backend="reference")
    as_is = SamplingOptions(temperature=1.0, top_p=1.0)
    ids = []
    for seed in range(count):
        generation = llama.generate("", sampling=as_is, seed=seed, max_new_tokens=256)
        for _ in generation:
            pass
        ids.append([*llama.encode(""), *generation.ids])
    return ids


def _logits(model: Checkpoint, ids: list[int]) -> np.ndarray:
    config = model.config
    return forward(load_reference_params(model), np.array(ids), empty_cache(config), config=config)[0]


def rows(judge: Judge) -> Iterator[GalleryRow]:
    """Yield the results of every scheme, and then of every calibrated method."""
    for name, scheme in SCHEMES.items():
        model = rounded(judge.base, scheme.rounded)
        yield GalleryRow(
            name, scheme.page, scheme.bits, scheme.guarantee, judge.error(model), *judge.predictions(model)
        )
    for name, method in METHODS.items():
        model = calibrated(judge.base, judge.windows, method=name)
        moved = METHODS_OF_MODELS[name].factors is not None
        error = None if moved else judge.error(model)
        yield GalleryRow(name, method.page, method.bits, method.guarantee, error, *judge.predictions(model))


def picture(rounding: Rounding, weights: Float64[np.ndarray, " n"]) -> str:
    """Draw the numbers to which a weight can be rounded, and the rounding error as a function of the weight.

    We replace one of the first 32 weights by many values in turn, from the smallest to the largest of these 32, and
    round the whole row each time.
    """
    group = weights[:32]
    place = int(np.argmin(np.abs(group)))
    at = np.linspace(group.min(), group.max(), STEPS)
    moved = np.tile(weights, (STEPS, 1))
    moved[:, place] = at
    became = rounding(moved)[:, place]
    low, high = min(at[0], became.min()), max(at[-1], became.max())

    def x(value: float) -> float:
        return LEFT + (WIDTH - 2 * LEFT) * (value - low) / (high - low)

    body = [_ticks([x(w) for w in group], TICK - 8, TICK - 2, "#e07a3f")]
    body.append(_ticks([x(level) for level in np.unique(became.round(9))], TICK, AXIS, "#5b8def"))
    error = np.abs(became - at)
    top = float(error.max()) or 1.0
    largest = error.reshape(COLUMNS, -1).max(axis=1)
    middles = at.reshape(COLUMNS, -1).mean(axis=1)
    points = [(x(value), SAW - (SAW - AXIS - 16) * off / top) for value, off in zip(middles, largest, strict=True)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    body.append(f'<polyline points="{path}" fill="none" stroke="#e07a3f"/>')
    body.append(_line(LEFT, SAW, WIDTH - LEFT, SAW, "#888"))
    body += [_text(LEFT, HEIGHT - 6, f"{low:.3f}", "start"), _text(WIDTH - LEFT, HEIGHT - 6, f"{high:.3f}", "end")]
    body.append(_text(WIDTH / 2, HEIGHT - 6, f"error, {top:.2g} at most", "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11">\n' + "\n".join(body) + "\n</svg>\n"
    )


class Speeds(NamedTuple):
    """Measured speeds: a line with the date and the machine, and each scheme's tokens/s relative to float32."""

    measured: str
    relative: dict[str, str]


def speeds(summary: str) -> Speeds:
    """Parse the summary of `benchmarks.audits.schemes`. A scheme marked "as NAME" has the speed of NAME.

    >>> speeds("Measured on today: cpu.\\n| q4 | 4.5 | 2.2 |\\n| awq | 4.5 | as q4 |\\nDecoding: Q6_K 1.8.").relative
    {'q4': '2.2', 'awq': '2.2', 'Q6_K': '1.8'}
    """
    figures = dict(re.findall(r"^\| ([^|]+) \|.*\| (\d[^|]*|as [^|]+) \|$", summary, re.M))
    [decoding] = re.findall(r"^Decoding: (.*)\.$", summary, re.M)
    figures |= dict(re.findall(r"(\S.*?) (\d\.\d(?: \([^)]*\))?)(?:, |$)", decoding))
    [measured] = re.findall(r"^Measured on .*$", summary, re.M)
    return Speeds(
        textwrap.fill(measured, 116, subsequent_indent="  "),
        {name: figures.get(of.removeprefix("as "), of) for name, of in figures.items()},
    )


def write(folder: Path) -> None:
    """Write gallery.md and its pictures into a folder."""
    judge, table = Judge(), []
    measured, relative = speeds(SPEEDS.read_text(encoding="utf-8"))
    draw(folder)
    for row in rows(judge):
        seen = f"![grid of {row.name}]({picture_of(row.name)})" if row.name in SCHEMES else ""
        error = "" if row.error is None else f"{row.error:.2g}"
        table.append(
            f"| [{row.name}](../reference/quantizers/{row.page}) | {row.bits:.4g} | {row.guarantee} | {error} "
            f"| {row.divergence:.2g} | {row.same_top:.1%} | {relative.get(row.name, '-')} | {seen} |"
        )
        print(table[-1], flush=True)
    tokens = sum(map(len, judge.stories))
    text = PAGE.format(cols=COLS, tokens=tokens, stories=len(judge.stories), measured=measured, table="\n".join(table))
    (folder / "gallery.md").write_text(text, encoding="utf-8")


def draw(folder: Path) -> None:
    """Write the picture of each scheme into a folder next to gallery.md."""
    row = open_checkpoint("stories").tensors["model.layers.0.self_attn.q_proj.weight"].read()[0].astype(np.float64)
    (folder / "gallery").mkdir(exist_ok=True)
    for name, scheme in SCHEMES.items():
        (folder / picture_of(name)).write_text(picture(scheme.rounded, row), encoding="utf-8")


def picture_of(name: str) -> str:
    """Return the file name of a scheme's picture.

    >>> picture_of("MXFP8, e4m3")
    'gallery/mxfp8-e4m3.svg'
    """
    return "gallery/" + re.sub(r"\W+", "-", name.lower()).strip("-") + ".svg"


def _line(x: Number, y: Number, to_x: Number, to_y: Number, color: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{color}"/>'


def _ticks(places: list[float], y: Number, to_y: Number, color: str) -> str:
    path = "".join(f"M{x:.1f},{y}V{to_y}" for x in dict.fromkeys(round(x, 1) for x in places))
    return f'<path d="{path}" stroke="{color}"/>'


def _text(x: Number, y: Number, text: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="#888">{text}</text>'


if __name__ == "__main__":
    write(Path(__file__).parents[3] / "docs")
