"""Describes the effect of each quantizer: on a row of each matrix, and on a text that the quantized model writes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from llamaspec.learn.quantizers.by_inputs import METHODS
from llamaspec.learn.quantizers.schemes import SCHEMES, ExplainedScheme, StoredMatrix, rounded
from llamaspec.learn.trace import Recording
from llamaspec.learn.xray.arrays import packed
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.insight.evaluation import comparison
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.reference.config import Config
from llamaspec.reference.llama import Params, empty_cache, forward, greedy
from llamaspec.reference.rmsnorm import rmsnorm

COLUMNS = 128  # number of weights of a row that we show
CONTINUATION = 48  # number of tokens that a quantized model writes


def described(w: np.ndarray, stored: StoredMatrix) -> dict[str, Any]:
    """Describe the first `COLUMNS` weights of a quantized row w [1, cols]."""
    codes, scales, within = stored.details
    error = stored.restored - w
    parts = {"weights": w, "restored": stored.restored, "error": error, "guaranteed": within, "scales": scales}
    return {
        **{part: None if numbers is None else packed(numbers[0, :COLUMNS]) for part, numbers in parts.items()},
        "codes": None if codes is None else codes[0, :COLUMNS].astype(int).tolist(),
        "root_mean_square": float(np.sqrt(np.mean(error**2))),
    }


def rows(layer: Any, config: Config) -> dict[str, np.ndarray]:
    """Return the first row [1, cols] of each matrix of a block."""
    matrices = {"q": layer.q, "k": layer.k, "v": layer.v, "o": layer.o}
    if not config.experts:
        matrices |= {"gate": layer.ffn.gate, "up": layer.ffn.up, "down": layer.ffn.down}
    return {name: matrix.weight[:1].astype(np.float64) for name, matrix in matrices.items()}


def inputs(recording: Recording, layer: int) -> dict[str, np.ndarray]:
    """Return the inputs [tokens, cols] of each matrix, for every token of the text."""
    exact, eps = recording.model.exact.layers[layer], recording.config.eps

    def input_of(op: str) -> np.ndarray:
        x = recording.results[layer, op][0].input.astype(np.float64)
        return x.reshape(len(x), -1)

    first = rmsnorm(input_of("norm_qkv"), exact.attention_norm, eps=eps)
    by_matrix = {"q": first, "k": first, "v": first, "o": input_of("project_add")}
    if not recording.config.experts:
        second = rmsnorm(input_of("norm_gate_up"), exact.ffn_norm, eps=eps)
        by_matrix |= {"gate": second, "up": second, "down": input_of("down_add")}
    return by_matrix


def tellings(
    checkpoint: Checkpoint,
    prompt: list[int],
    *,
    stops: frozenset[int],
    schemes: Mapping[str, ExplainedScheme] = SCHEMES,
) -> Iterator[tuple[str, list[int], float]]:
    """Yield greedy continuations of `prompt` in float64: by the unquantized model, and then by each scheme.

    Each tuple has three fields: the name of the scheme, or "" for the unquantized model; the ids of the continuation;
    and the KL divergence from the unquantized model in nats, as a mean over the tokens of the prompt and of the
    unquantized model's continuation.
    """
    config = checkpoint.config
    exact = load_reference_params(checkpoint)
    text = _continuation(exact, prompt, config, stops=stops)
    yield "", text[len(prompt) :], 0.0
    logits = _logits(exact, text, config)
    for name, scheme in schemes.items():
        params = load_reference_params(rounded(checkpoint, scheme.rounded))
        comparison_result = comparison([_logits(params, text, config)], [logits], text[1:], bytes=len(text))
        yield name, _continuation(params, prompt, config, stops=stops)[len(prompt) :], comparison_result.divergence.mean


def _continuation(params: Params, prompt: list[int], config: Config, *, stops: frozenset[int]) -> list[int]:
    tokens = list(prompt)
    for token in greedy(params, np.array(prompt), config=config):
        if token in stops or len(tokens) >= min(len(prompt) + CONTINUATION, config.context):
            break
        tokens.append(token)
    return tokens


def _logits(params: Params, text: list[int], config: Config) -> np.ndarray:
    return forward(params, np.array(text[:-1]), empty_cache(config), config=config)[0]


def schemes(
    layer: Any, config: Config, *, x: Mapping[str, np.ndarray] | None, text: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """Describe all schemes. For each, quantizes a row of each matrix, and adds the result of `text(name)`.

    `x` has the inputs of each matrix. Without `x`, we leave out the methods that need these inputs.
    """
    matrices = rows(layer, config)
    stored: dict[str, dict[str, StoredMatrix]] = {
        name: {matrix: scheme.store(w) for matrix, w in matrices.items()} for name, scheme in SCHEMES.items()
    }
    if x is not None:
        stored |= {
            name: {matrix: method.store(w, x[matrix]) for matrix, w in matrices.items()}
            for name, method in METHODS.items()
        }
    about = {**SCHEMES, **METHODS}
    return {
        "names": list(stored),
        "left_out": [] if x is not None else list(METHODS),
        "matrices": {matrix: w.shape[1] for matrix, w in matrices.items()},
        "schemes": {
            name: {
                "bits": about[name].bits,
                "guarantee": about[name].guarantee,
                "file": f"reference/quantizers/{about[name].page}",
                "by_inputs": name in METHODS,
                "rows": {matrix: described(matrices[matrix], row) for matrix, row in of_matrices.items()},
                **text(name),
            }
            for name, of_matrices in stored.items()
        },
    }
