"""A row of a matrix under each scheme of `--quantize`, beside the guaranteed error, and what the model then tells."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from learn.xray.arrays import packed
from model.checkpoints.checkpoint import Checkpoint
from model.checkpoints.codes import quantized
from model.insight.evaluation import comparison
from model.running.reference_backend import load_reference_params
from reference.config import Config
from reference.llama import Params, empty_cache, forward, greedy
from reference.quantizers import mx
from reference.quantizers.blocks import Quantized
from reference.quantizers.minifloat import E2M1, E4M3
from reference.quantizers.nf4 import NF4
from reference.quantizers.schemes import SCHEMES, Scheme
from reference.quantizers.symmetric import largest_code

COLUMNS = 128  # weights of a row that are shown
TOLD = 48  # tokens that a quantized model tells


def guaranteed(name: str, w: np.ndarray, q: Quantized) -> np.ndarray:
    """Bound the error of each weight of a row w [cols] as the scheme's file in `reference/quantizers/` proves it.

    >>> w = np.array([1.0, -0.5, 0.25, 0.125])
    >>> (guaranteed("q4", w, SCHEMES["q4"].quantize(w)) * 14).round(6).tolist()  # half of a step of 1 / 7
    [1.0, 1.0, 1.0, 1.0]
    """
    scheme, s = SCHEMES[name], scales(name, q)
    match name:
        case "nf4":
            levels = np.sort(NF4.levels.astype(np.float64))
            place = np.clip(np.searchsorted(levels, w / np.where(s == 0, 1, s)), 1, len(levels) - 1)
            return np.where(s < 1e-38, s, s * (levels[place] - levels[place - 1]) / 2 + 3 * 2.0**-23 * s)
        case "fp8":
            m, bias = E4M3.mantissa_bits, E4M3.bias
            near = np.maximum(2.0 ** -(m + 1) * np.abs(w), 2.0 ** -(bias + m) * s)
            return near + E4M3.largest * 2.0**-150
        case "mxfp4":
            return np.maximum(np.abs(w) / 4, s * 2.0 ** -(E2M1.bias + E2M1.mantissa_bits))
        case _:
            return np.maximum(s / 2, largest_code(scheme.code_bits) * 2.0**-150)


def scales(name: str, q: Quantized) -> np.ndarray:
    """Give the scale of each weight of a row, in float64."""
    cols = len(q.codes)
    stored = q.scales.astype(np.float64)
    if name == "mxfp4":
        stored = 2.0 ** (stored - mx.BIAS)
    return np.repeat(stored, SCHEMES[name].group or cols)[:cols]


def row(name: str, w: np.ndarray) -> dict[str, Any]:
    """Describe a row w [cols] under a scheme, its first `COLUMNS` weights."""
    scheme: Scheme = SCHEMES[name]
    q = scheme.quantize(w)
    restored = scheme.dequantize(q)
    parts = {
        "weights": w,
        "restored": restored,
        "error": restored - w,
        "guaranteed": guaranteed(name, w, q),
        "scales": scales(name, q),
    }
    return {
        **{part: packed(numbers[:COLUMNS]) for part, numbers in parts.items()},
        "codes": q.codes[:COLUMNS].astype(int).tolist(),
        "root_mean_square": float(np.sqrt(np.mean((restored - w) ** 2))),
    }


def rows(layer: Any, config: Config) -> dict[str, np.ndarray]:
    """Take the first row of each matrix of a block [cols]."""
    matrices = {"q": layer.q, "k": layer.k, "v": layer.v, "o": layer.o}
    if not config.experts:
        matrices |= {"gate": layer.ffn.gate, "up": layer.ffn.up, "down": layer.ffn.down}
    return {name: matrix.weight[0] for name, matrix in matrices.items()}


def tellings(
    checkpoint: Checkpoint, prompt: list[int], *, stops: frozenset[int]
) -> Iterator[tuple[str, list[int], float]]:
    """Yield what the model tells after `prompt`, greedily and in float64: as it is (named ""), then under each scheme.

    With each scheme comes the mean KL divergence from the model as it is, in nats a token, over the text that this
    told.
    """
    config = checkpoint.config
    exact = load_reference_params(checkpoint)
    text = _told(exact, prompt, config, stops=stops)
    yield "", text[len(prompt) :], 0.0
    logits = _logits(exact, text, config)
    for name in SCHEMES:
        params = load_reference_params(quantized(checkpoint, name))
        found = comparison([_logits(params, text, config)], [logits], text[1:], bytes=len(text))
        yield name, _told(params, prompt, config, stops=stops)[len(prompt) :], found.divergence.mean


def _told(params: Params, prompt: list[int], config: Config, *, stops: frozenset[int]) -> list[int]:
    told = list(prompt)
    for token in greedy(params, np.array(prompt), config=config):
        if token in stops or len(told) >= min(len(prompt) + TOLD, config.context):
            break
        told.append(token)
    return told


def _logits(params: Params, text: list[int], config: Config) -> np.ndarray:
    return forward(params, np.array(text[:-1]), empty_cache(config), config=config)[0]


def schemes(layer: Any, config: Config, *, text: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Describe all schemes: a row of each matrix, and what `text` says of a scheme."""
    found = rows(layer, config)
    return {
        "names": list(SCHEMES),
        "matrices": {name: len(w) for name, w in found.items()},
        "schemes": {
            name: {
                "bits": scheme.bits_per_weight(config.dim),
                "code_bits": scheme.code_bits,
                "group": scheme.group,
                "rows": {matrix: row(name, w) for matrix, w in found.items()},
                **text(name),
            }
            for name, scheme in SCHEMES.items()
        },
    }
