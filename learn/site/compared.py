"""Compares ways to quantize one matrix of the built-in model: RTN, HQQ, AWQ, GPTQ, QAT and SmoothQuant.

python -m llamaspec.learn.site.compared    writes docs/quantizers-compared.md, in half a minute
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from llamaspec.learn.quantizers.by_inputs import METHODS
from llamaspec.learn.quantizers.schemes import SCHEMES
from llamaspec.model.checkpoints.open import open_checkpoint
from llamaspec.model.insight.evaluation_by_tensor import relative_error
from llamaspec.model.llama import load
from llamaspec.model.quantize.methods import ALPHA
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.reference.config import Config
from llamaspec.reference.linear import linear
from llamaspec.reference.llama import FeedForward, Params, apply_norm, attend, empty_cache, feed_forward, forward
from llamaspec.reference.losses import log_softmax
from llamaspec.reference.quantizers import qat, smoothquant, symmetric
from llamaspec.reference.swiglu import swiglu

LAYER = 5  # its down projection
GROUP = 64
STEPS, RATE, MOMENTUM = 400, 0.001, 0.9  # of QAT; the rate is relative to a weight's scale, and falls to 0
TEXTS = Path(__file__).parents[3] / "model/stories/README.md"
STORIES, HELD_OUT = 10, 2  # the last stories are seen by no method
Matrix = Float64[np.ndarray, "rows cols"]

PAGE = """# Quantizers, compared on one matrix

RTN, HQQ, AWQ, GPTQ, QAT and SmoothQuant answer different questions. Here each rounds the same matrix W: the down
projection of layer {layer} of the built-in model, [{rows}, {cols}]. `python -m llamaspec.learn.site.compared` writes
this page.

| method | minimizes | needs | costs |
|---|---|---|---|
{questions}

What came out, in percent. X are the inputs of W for {tokens} tokens of stories; "other texts" are {others} tokens of
{held_out} stories that no method has seen. KL is how far the model's next tokens are from the original's, in
millionths of a nat per token, with only this matrix rounded; two stories give it only roughly.

{table}

What to see:

- With RTN's scales, no method moves a weight less than RTN. AWQ, GPTQ and QAT move weights further, and outputs less.
- GPTQ has weights that are much further away, and the smallest error of outputs with 4.5 bits: the errors of a row
  cancel. On texts that it has not seen it loses a little of that.
- AWQ rounds as RTN does, but a matrix with enlarged columns. A model of this size has few outlying activations, so it
  gains little here.
- HQQ needs no text. Its zero points help if most weights of a group are positive, or most are negative. They cost half
  a bit per weight.
- QAT here takes {steps} steps for the outputs of this one matrix, with RTN's scales. Training a whole model for its
  loss ([how](training.md#weights-that-survive-rounding-or-pruning)) gives it far more to choose.
- SmoothQuant is about activations. Compare it with the row above it, in which activations are int8, too.

Other models order these differently. [quantization.md](quantization.md) has whole models, [the gallery](gallery.md)
every scheme.
"""

QUESTIONS = (  # method, page, what it minimizes, needs and costs
    ("RTN: round to nearest", "symmetric", "the error of each weight, given the scale", "nothing", "one pass over W"),
    (
        *("HQQ", "hqq", "the sum of abs(error)^0.7 of a group, by choosing its zero point"),
        *("nothing", "20 passes over W"),
    ),
    (
        *("AWQ", "awq", "the error of outputs W X, by one exponent for the factors of columns"),
        *("X, and its means", "RTN and a product with X, 20 times"),
    ),
    (
        *("GPTQ", "gptq", "the error of outputs W X, column by column"),
        *("X^T X", "a Cholesky factor, cols^3 operations, then rows cols^2"),
    ),
    ("QAT", "qat", "the loss, with rounding in the forward pass", "training data, gradients", "training"),
    (
        *("SmoothQuant", "smoothquant", "nothing; it balances the ranges of X and W"),
        *("the largest X of each column", "one pass over X"),
    ),
)


class Result(NamedTuple):
    """A method's errors on the matrix, relative to the norm of the exact value, and the KL divergence of the model."""

    name: str
    bits: str
    weights: float | None  # None: rounded activations make it meaningless
    outputs: float
    other_outputs: float
    divergence: float | None


class Layer(NamedTuple):
    """The matrix, its inputs for the texts that the methods see, and its inputs for other texts."""

    params: Params
    config: Config
    weight: Matrix
    seen: Float64[np.ndarray, "tokens cols"]
    others: Float64[np.ndarray, "tokens cols"]
    other_texts: list[np.ndarray]
    expected: list[Float64[np.ndarray, "seq vocab"]]  # log probabilities of the original model for the other texts


def load_layer() -> Layer:
    """Run the stories of model/stories/README.md through the built-in model, up to the matrix."""
    checkpoint = open_checkpoint("stories")
    params, config = load_reference_params(checkpoint), checkpoint.config
    llama = load("stories", backend="reference")
    texts = [np.array(llama.encode(text)) for text in stories()]
    inputs = [inputs_of_down(params, ids, config) for ids in texts]
    ffn = params.layers[LAYER].ffn
    assert isinstance(ffn, FeedForward)
    seen, others = np.concatenate(inputs[:-HELD_OUT]), np.concatenate(inputs[-HELD_OUT:])
    other_texts = texts[-HELD_OUT:]
    expected = [log_probabilities(params, ids, config) for ids in other_texts]
    return Layer(params, config, ffn.down.weight.astype(np.float64), seen, others, other_texts, expected)


def stories() -> list[str]:
    """Read the first stories in the built-in model's description."""
    text = TEXTS.read_text(encoding="utf-8").partition("<!-- twenty stories -->")[2]
    return re.findall(r"^\d+\. (.*)$", text, re.M)[:STORIES]


def inputs_of_down(params: Params, ids: np.ndarray, config: Config) -> Float64[np.ndarray, "seq cols"]:
    """Compute the inputs of the down projection of `LAYER`, for every token of a text."""
    x = params.embedding[ids].astype(np.float64)
    *earlier, block = params.layers[: LAYER + 1]
    cache = empty_cache(config)[0]
    for layer in earlier:
        y, _ = attend(x, layer, cache, window=None, config=config)
        x = feed_forward(y, layer, config=config)
    y, _ = attend(x, block, cache, window=None, config=config)
    assert isinstance(block.ffn, FeedForward) and block.ffn.gate is not None
    n = apply_norm(y, block.ffn_norm, config=config)
    return swiglu(linear(n, *block.ffn.gate), linear(n, *block.ffn.up))


def trained(w: Matrix, x: Float64[np.ndarray, "tokens cols"]) -> Matrix:
    """Round W by QAT (quantization-aware training).

    Gradient steps change the weights before they are rounded, to reduce the squared error of the outputs. The step of
    each row is divided by the size of the row's gradient. Returns the best of the rounded matrices.
    """
    gram, highest = x.T @ x, symmetric.largest_code(4)
    scales = np.repeat(np.abs(w.reshape(len(w), -1, GROUP)).max(axis=-1) / highest, GROUP, axis=1)
    learned, momentum, best, least = w.copy(), np.zeros_like(w), w, np.inf
    for step in range(STEPS):
        fake = qat.fake_quantize(learned, scales, np.zeros_like(scales), lowest=-highest, highest=highest)
        slope = (fake.values - w) @ gram
        error = float(np.sum(slope * (fake.values - w)))
        if error < least:
            best, least = fake.values, error
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * qat.gradient(slope, fake)
        size = np.sqrt(np.mean(momentum**2, axis=1, keepdims=True))
        learned -= RATE * (1 - step / STEPS) * scales * momentum / size
    return best


def results(layer: Layer) -> Iterator[Result]:
    """Yield the errors of every method on the matrix."""
    w, seen = layer.weight, layer.seen
    yield _result(layer, "RTN", "4.5", SCHEMES["q4"].rounded(w))
    yield _result(layer, "HQQ", "5", SCHEMES["HQQ, 4 bits"].rounded(w))
    yield _result(layer, "AWQ", "4.5", METHODS["awq"].store(w, seen).restored)
    yield _result(layer, "GPTQ", "4.5", METHODS["gptq"].store(w, seen).restored)
    yield _result(layer, "QAT", "4.5", trained(w, seen))
    ones = np.ones(w.shape[1])
    s = smoothquant.factors(np.max(np.abs(seen), axis=0), w, alpha=ALPHA)
    for name, factors in (("RTN", ones), ("SmoothQuant", s)):
        yield _result(layer, f"{name}, int8 W and int8 X", "8.1", SCHEMES["q8_row"].rounded(w * factors), factors)


def _result(layer: Layer, name: str, bits: str, rounded: Matrix, factors: np.ndarray | None = None) -> Result:
    """Judge a rounded matrix. With `factors`, the inputs are divided by these factors and rounded to int8."""

    def error(x: np.ndarray) -> float:
        inputs = x if factors is None else smoothquant.activations(x / factors)
        return relative_error(x @ layer.weight.T, inputs @ rounded.T)

    weights = None if factors is not None else relative_error(layer.weight, rounded)
    kl = None if factors is not None else divergence(layer, rounded)
    return Result(name, bits, weights, error(layer.seen), error(layer.others), kl)


def divergence(layer: Layer, rounded: Matrix) -> float:
    """Compute the mean KL divergence of the next token's distribution when only this matrix is rounded."""
    block = layer.params.layers[LAYER]
    assert isinstance(block.ffn, FeedForward)
    changed = block._replace(ffn=block.ffn._replace(down=block.ffn.down._replace(weight=rounded)))
    params = layer.params._replace(layers=[*layer.params.layers[:LAYER], changed, *layer.params.layers[LAYER + 1 :]])
    parts = []
    for ids, expected in zip(layer.other_texts, layer.expected, strict=True):
        p, q = expected, log_probabilities(params, ids, layer.config)
        parts.append(np.sum(np.exp(p) * (p - q), axis=-1))
    return float(np.mean(np.concatenate(parts)))


def log_probabilities(params: Params, ids: np.ndarray, config: Config) -> Float64[np.ndarray, "seq vocab"]:
    """Compute the logarithms of the probabilities of all next tokens, after each token of a text."""
    logits, _ = forward(params, ids, empty_cache(config), config=config)
    return log_softmax(logits)


def page() -> str:
    """Write the text of docs/quantizers-compared.md."""
    layer = load_layer()
    lines = ["| method | bits | W | W X | W X, other texts | KL |", "|---|---|---|---|---|---|"]
    for result in results(layer):
        weights = "" if result.weights is None else f"{100 * result.weights:.1f}"
        kl = "" if result.divergence is None else f"{1e6 * result.divergence:.0f}"
        lines.append(
            f"| {result.name} | {result.bits} | {weights} | {100 * result.outputs:.1f} "
            f"| {100 * result.other_outputs:.1f} | {kl} |"
        )
    rows, cols = layer.weight.shape
    sizes = {
        "layer": LAYER,
        "rows": rows,
        "cols": cols,
        "tokens": len(layer.seen),
        "others": len(layer.others),
        "steps": STEPS,
    }
    questions = "\n".join(
        f"| [{name}](../reference/quantizers/{file}.py) | {' | '.join(answers)} |" for name, file, *answers in QUESTIONS
    )
    return PAGE.format(questions=questions, table="\n".join(lines), held_out=HELD_OUT, **sizes)


if __name__ == "__main__":
    (Path(__file__).parents[3] / "docs/quantizers-compared.md").write_text(page(), encoding="utf-8")
