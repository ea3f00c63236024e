"""Collects the contents of the page as values for JSON: a part for the model, and a part for each token."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from llamaspec.learn.quantizers.schemes import SCHEMES
from llamaspec.learn.trace import Guess, Recording, Trace
from llamaspec.learn.xray import quantized
from llamaspec.learn.xray.arrays import packed
from llamaspec.learn.xray.formulas import FORMULAS
from llamaspec.learn.xray.lines import Listing
from llamaspec.learn.xray.ops import Rerun, logits, unturned, visits
from llamaspec.model.cache import position_bytes
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.insight.describe import matrix_weights
from llamaspec.reference.config import Config
from llamaspec.reference.rope import frequencies

SMALL = 50_000_000  # for a model with at most this many weights, we show all layers, and a text for each scheme
LIKELY = 40  # number of likeliest tokens that the page names
CACHES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "int8": np.dtype(np.int8)}
SIZES = ("dim", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "eps", "theta", "experts")

TextOf = Callable[[int], str]
Progress = Callable[[str, float], object]


def default_layers(config: Config) -> list[int]:
    """Return the layers to show: all layers of a small model, or else the first, the middle and the last.

    >>> default_layers(Config(4096, 32, 32, 8, 128, 14_336, 128_256, 8192, eps=1e-5, theta=5e5))
    [0, 15, 31]
    """
    if small(config):
        return list(range(config.layers))
    return sorted({0, (config.layers - 1) // 2, config.layers - 1})


def small(config: Config) -> bool:
    """Return whether a model is small enough to compute all of it in float64."""
    return matrix_weights(config, head=True) <= SMALL


def model_content(
    recording: Recording, checkpoint: Checkpoint, *, name: str, text_of: TextOf, progress: Progress
) -> dict[str, Any]:
    """Describe the model, the text, the definitions and the quantization schemes."""
    config, last = recording.config, len(recording.tokens) - 1
    first = recording.layers[0]
    layer = recording.model.exact.layers[first]
    texts, divergence = _continuations(recording, checkpoint, text_of=text_of, progress=progress)

    def text(scheme: str) -> dict[str, Any]:
        return {"told": texts.get(scheme), "divergence": divergence.get(scheme)}

    return {
        "name": name,
        "dtype": recording.dtype,
        "config": {key: getattr(config, key) for key in SIZES},
        "weights": matrix_weights(config, head=True),
        "tokens": [{"id": id, "text": text_of(id)} for id in recording.tokens],
        "layers": recording.layers,
        "ops": [_op(op, listings) for op, listings in Rerun(recording, last).listings.items()],
        "formulas": FORMULAS,
        "frequencies": frequencies(config.head_dim, theta=config.theta, scaling=config.scaling).tolist(),
        "first_keys": {i: packed(unturned(recording, i, "k", 0)) for i in recording.layers},
        "cache": {
            "bytes": {name: position_bytes(config, dtype=dtype) for name, dtype in CACHES.items()},
            "norms": {i: _norms(recording, i) for i in recording.layers},
            "windows": [config.window(i) for i in range(config.layers)],
        },
        "quantize": {
            "layer": first,
            "told": texts.get(""),
            **quantized.schemes(
                layer, config, x=quantized.inputs(recording, first) if small(config) else None, text=text
            ),
        },
    }


def token_content(recording: Recording, position: int, *, text_of: TextOf) -> dict[str, Any]:
    """Describe one token's path through the model."""
    trace = recording.at(position)
    predicted = logits(recording, position)
    named = np.argsort(-predicted, kind="stable")[:LIKELY]
    return {
        "position": position,
        "visits": visits(recording, trace),
        "guesses": {i: _guesses(guesses, text_of) for i, guesses in trace.guesses.items()},
        "next": _guesses(trace.next, text_of),
        "attention": _attention(trace),
        "before_rope": {i: packed(unturned(recording, i, "q", position)) for i in recording.layers},
        "logits": packed(predicted),
        "likely": [{"id": int(id), "text": text_of(int(id))} for id in named],
    }


def _op(op: str, listings: list[Listing]) -> dict[str, Any]:
    return {"op": op, "listings": [_listing(listing) for listing in listings]}


def _listing(listing: Listing) -> dict[str, Any]:
    return {**listing._asdict(), "steps": [step._asdict() for step in listing.steps]}


def _norms(recording: Recording, layer: int) -> list[float]:
    """Compute one norm for each token: the norm of its key and value vectors together, over all heads."""
    _, k, v = (result.actual.astype(np.float64) for result in recording.results[layer, "norm_qkv"])
    return np.sqrt(np.sum(k**2 + v**2, axis=(1, 2))).round(6).tolist()


def _guesses(guesses: list[Guess], text_of: TextOf) -> list[dict[str, Any]]:
    return [{"id": guess.id, "text": text_of(guess.id), "probability": guess.probability} for guess in guesses]


def _attention(trace: Trace) -> dict[int, str]:
    """Pack the attention weights of the token in each layer [heads keys], for the keys up to the token itself."""
    return {layer: packed(rows) for layer, rows in trace.attention.items()}


def _continuations(
    recording: Recording, checkpoint: Checkpoint, *, text_of: TextOf, progress: Progress
) -> tuple[dict[str, list[str]], dict[str, float]]:
    """Let a small model, quantized by each scheme, continue the text.

    Returns the tokens and the KL divergence by scheme. Both are empty for a large model.
    """
    texts: dict[str, list[str]] = {}
    divergence: dict[str, float] = {}
    if not small(recording.config):
        return texts, divergence
    stages = quantized.tellings(checkpoint, recording.tokens, stops=checkpoint.stops)
    for number, (name, ids, kl) in enumerate(stages):
        texts[name], divergence[name] = [text_of(id) for id in ids], kl
        progress("telling", number / len(SCHEMES))
    return texts, divergence
