"""Traces one token through a model: each op with its definition, its sizes, and its error.

    tracing = trace(model, tokens, config=checkpoint.config, dtype="float32")
    for visit in tracing.visits:
        print(visit.layer, visit.op, visit.seconds)

`model.candidates.walking.walkable` makes `model`. The numbers come from `verify.judging.walk`. It feeds each definition
the actual result of the previous op, so an error appears at the op that causes it.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np

from llamaspec.model.candidates.walking import WalkableModel
from llamaspec.model.insight.cost import decode_bytes, positions_seen
from llamaspec.model.ops.table import Ops
from llamaspec.reference.add import add
from llamaspec.reference.attention import attention, attention_weights, causal_mask
from llamaspec.reference.config import Config
from llamaspec.reference.layernorm import layernorm
from llamaspec.reference.linear import linear
from llamaspec.reference.llama import GATED, UNGATED
from llamaspec.reference.moe import moe
from llamaspec.reference.qk_norm import head_qk_norm, qk_norm
from llamaspec.reference.rmsnorm import rmsnorm
from llamaspec.reference.rope import rope_halves
from llamaspec.reference.softmax import softmax
from llamaspec.verify.bounds.precision import U, precision
from llamaspec.verify.judging.walk import TRACED, Result, ratios, results

TIMED = 3  # number of timed calls of an op after the first; the shortest time counts
LIKELIEST = 5  # number of tokens in the guesses of a layer


class Definition(NamedTuple):
    """A function of `reference/` that defines a part of an op."""

    name: str
    formula: tuple[str, ...]  # lines of the function's docstring
    file: str  # path from the root of the repository
    line: int


class Output(NamedTuple):
    """One result of an op for the token. We show the value with the largest error relative to its bound."""

    name: str  # q, k or v; "" if the op has one result
    shape: tuple[int, ...]
    norm: float  # the Euclidean norm of the result
    reference: float
    running: float
    ulps: float  # their distance, in units in the last place of the dtype
    share: float  # error / proven bound, the largest of all values


class Visit(NamedTuple):
    """One op that the token passes through."""

    layer: int | None  # None: after the last block
    op: str
    shape: tuple[int, ...]  # shape of the op's first argument
    norm: float  # the Euclidean norm of this argument
    outputs: list[Output]
    bytes: float  # bytes of weights, keys and values that the op reads for one token
    flops: int  # operations in the op's products, for one token
    seconds: float  # seconds of the actual op for the whole text


class Guess(NamedTuple):
    """A token that may come next, and its probability."""

    id: int
    probability: float


@dataclass(frozen=True)
class Trace:
    """The trace of one token. `guesses` and `attention` contain only the requested layers."""

    tokens: list[int]
    position: int
    definitions: dict[str, list[Definition]]  # op: its definitions
    visits: list[Visit]
    guesses: dict[int, list[Guess]]  # layer: the next tokens if the model ended after it (the logit lens)
    attention: dict[int, np.ndarray]  # layer: attention weights of the token [heads keys]
    next: list[Guess]


@dataclass(frozen=True)
class Recording:
    """A recording of a text: every result of every op at every token, in the requested layers."""

    model: WalkableModel
    tokens: list[int]
    config: Config
    dtype: str
    results: dict[tuple[int | None, str], list[Result]]  # (layer, op): its results, in the order of the walk
    seconds: dict[tuple[int | None, str], float]  # (layer, op): seconds of the actual op for the whole text

    @property
    def unit(self) -> float:
        """The relative rounding error of the dtype."""
        return precision(self.dtype).unit or U

    @property
    def layers(self) -> list[int]:
        """The requested layers, sorted."""
        return sorted({layer for layer, _ in self.results if layer is not None})

    def at(self, position: int) -> Trace:
        """Extract the trace of the token at `position` of the text."""
        config, results = self.config, self.results
        single_layers = {layer: _single_layer(self.model.params, config, layer) for layer, _ in results}
        read = {layer: _bytes_read(*layer_model, position) for layer, layer_model in single_layers.items()}
        work = {layer: _operations(layer_model, position) for layer, (_, layer_model) in single_layers.items()}
        visits = [
            Visit(
                layer,
                op,
                parts[0].input[position].shape,
                _norm(parts[0].input[position]),
                [_output(result, position, self.unit) for result in parts],
                read[layer][op],
                work[layer][op],
                self.seconds[layer, op],
            )
            for (layer, op), parts in results.items()
        ]
        last = "moe_add" if config.experts else "down_add"
        ended = {i: _ended(self.model, results[i, last][0].actual[position], config) for i in self.layers}
        weights = {
            i: _weights(results[i, "attend"][0], results[i, "norm_qkv"][1], position, i, config) for i in self.layers
        }
        logits = results[None, "norm_logits"][0].actual[position]
        return Trace(
            self.tokens,
            position,
            definitions(config),
            visits,
            {i: _likeliest(logits) for i, logits in ended.items()},
            weights,
            _likeliest(logits),
        )


def trace(
    model: WalkableModel,
    tokens: Sequence[int],
    *,
    position: int = -1,
    config: Config,
    dtype: str,
    layers: Collection[int] | None = None,
    progress: Callable[[str, float], object] = lambda stage, share: None,
) -> Trace:
    """Trace the token at `position` of `tokens` through `model`, which runs in `dtype`.

    We record the results of the requested `layers` (None: all layers), and compute them in float64 as well. Raises
    ValueError for a position beyond the tokens, and for a layer that the model lacks.
    """
    if not -len(tokens) <= position < len(tokens):
        raise ValueError(f"expected a position from 0 to {len(tokens) - 1} ({len(tokens)} tokens), got {position}")
    recording = record(model, tokens, config=config, dtype=dtype, layers=layers, progress=progress)
    return recording.at(position % len(tokens))


def record(
    model: WalkableModel,
    tokens: Sequence[int],
    *,
    config: Config,
    dtype: str,
    layers: Collection[int] | None = None,
    progress: Callable[[str, float], object] = lambda stage, share: None,
) -> Recording:
    """Run `model` on `tokens`, and record the results of each op at every token, in float64 as well.

    The arguments have the same meaning as in `trace`. Raises ValueError for a layer that the model lacks, and for a
    model with a feature that traces do not support.
    """
    config.check_llama("traces", known=TRACED)
    if wrong := [i for i in layers or () if not 0 <= i < config.layers]:
        raise ValueError(f"expected a layer from 0 to {config.layers - 1}, got {wrong[0]}")
    times: list[float] = []
    ops = Ops(*(_timed(op, times.append) for op in model.ops))
    grouped: dict[tuple[int | None, str], list[Result]] = {}
    for result in results(
        replace(model, ops=ops),
        [np.asarray(tokens, np.int32)],
        config=config,
        unit=precision(dtype).unit,
        layers=layers,
    ):
        grouped.setdefault((result.layer, result.op), []).append(result)
        if result.layer is not None:  # the ops after the last layer take little time
            progress(f"layer {result.layer}", result.layer / config.layers)
    order = _order(config)
    return Recording(
        model,
        list(tokens),
        config,
        dtype,
        {at: grouped[at] for at in order if at in grouped},
        dict(zip(order, times, strict=True)),
    )


def definitions(config: Config) -> dict[str, list[Definition]]:
    """Return, for each op of a model, the functions of `reference/` that define it, in the order of their calls."""
    return {op: [_definition(layer) for layer in layers] for op, layers in layers_of_ops(config).items()}


def layers_of_ops(config: Config) -> dict[str, list[Callable]]:
    """Map the name of each op to the functions that define it."""
    norm, norms = layernorm if config.layer_norm else rmsnorm, [qk_norm] if config.qk_norm else []
    norms = [head_qk_norm] if config.head_qk_norm else norms
    activations = GATED if config.gated else UNGATED
    made_of: dict[str, list[Callable]] = {
        "norm_qkv": [norm, linear, *norms, rope_halves],
        "attend": [attention],
        "project_add": [linear, add],
        "norm_logits": [norm, linear],
    }
    if config.experts:
        made_of["moe_add"] = [rmsnorm, moe, add]
    else:
        made_of |= {"norm_gate_up": [norm, linear, activations[config.activation]], "down_add": [linear, add]}
    return {op: made_of[op] for _, op in _order(config, layers=1)}


def formula(docstring: str) -> tuple[str, ...]:
    """Return the formula in a definition's docstring: the first block of indented lines.

    >>> formula("Add.\\n\\n    x <- x + y\\n\\nAnd more.")
    ('x <- x + y',)
    """
    lines = inspect.cleandoc(docstring).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    "))
    block = [line.strip() for line in lines[start:]]
    return tuple(block[: block.index("")] if "" in block else block)


def _definition(layer: Callable) -> Definition:
    module = inspect.getmodule(layer)
    assert module is not None and module.__doc__ is not None
    file = module.__name__.replace(".", "/") + ".py"
    return Definition(layer.__name__, formula(module.__doc__), file, inspect.getsourcelines(layer)[1])


def _order(config: Config, *, layers: int | None = None) -> list[tuple[int | None, str]]:
    """Return pairs of layer and op, in the order in which the model calls its ops. The last op has the layer None."""
    half = ("moe_add",) if config.experts else ("norm_gate_up", "down_add")
    block = ("norm_qkv", "attend", "project_add", *half)
    return [
        *((i, op) for i in range(config.layers if layers is None else layers) for op in block),
        (None, "norm_logits"),
    ]


def _timed(op: Callable, note: Callable[[float], object]) -> Callable:
    """Wrap an op so that each call is timed.

    A call runs the op once to compile it, and then `TIMED` times. It calls `note` with the shortest of these times.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        value = jax.block_until_ready(op(*arguments, **options))
        spent = []
        for _ in range(TIMED):
            start = perf_counter()
            jax.block_until_ready(op(*arguments, **options))
            spent.append(perf_counter() - start)
        note(min(spent))
        return value

    return call


def _single_layer(params: Any, config: Config, layer: int | None) -> tuple[Any, Config]:
    """Return parameters and config of a model that has only the layer `layer`, with its window and stored bits.

    None selects layer 0.
    """
    at = layer or 0  # for the weights outside the layers (None), any layer works
    return params._replace(layers=params.layers[at : at + 1]), replace(config, layers=1, windows=(config.window(at),))


def _bytes_read(params: Any, config: Config, position: int) -> dict[str, float]:
    """Count the bytes that one token reads, for each op of a layer and for the LM head."""
    parts = decode_bytes(params, config, position=position, batch=1)
    return {part.removesuffix(" product"): read for part, read in parts.items()}


def _operations(config: Config, position: int) -> dict[str, int]:
    """Count the operations in the products of each op for one token: two per weight."""
    dim, head = config.dim, config.head_dim
    experts = 6 * dim * config.ffn * config.experts_per_token + 2 * dim * config.experts
    return {
        "norm_qkv": 2 * dim * (config.heads + 2 * config.kv_heads) * head,
        "attend": 4 * config.heads * head * int(positions_seen(config, position)),
        "project_add": 2 * dim * config.heads * head,
        "norm_gate_up": (4 if config.gated else 2) * dim * config.ffn,
        "down_add": 2 * dim * config.ffn,
        "moe_add": experts,
        "norm_logits": 2 * dim * config.vocab,
    }


def _output(result: Result, position: int, unit: float) -> Output:
    share = ratios(result)[position].ravel()
    exact, actual = result.expected.value[position].ravel(), result.actual[position].astype(np.float64).ravel()
    worst = int(np.argmax(share))
    place = np.frexp(exact[worst])[1] - 1  # exponent of the leading bit
    ulps = abs(actual[worst] - exact[worst]) / (2 * unit * 2.0**place)
    return Output(
        result.output,
        result.actual[position].shape,
        _norm(actual),
        float(exact[worst]),
        float(actual[worst]),
        float(ulps),
        float(share[worst]),
    )


def _norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


def _ended(model: WalkableModel, x: np.ndarray, config: Config) -> np.ndarray:
    """Compute the logits of a token as if the model ended with the hidden state `x` [dim]."""
    return np.asarray(model.ops.norm_logits(model.array(x[None, None]), model.params, config=config))[0, 0]


def _likeliest(logits: np.ndarray) -> list[Guess]:
    p = softmax(logits.astype(np.float64))
    return [Guess(int(i), float(p[i])) for i in np.argsort(-p, kind="stable")[:LIKELIEST]]


def _weights(attend: Result, keys: Result, position: int, layer: int, config: Config) -> np.ndarray:
    """Compute the attention weights of the token [heads keys] in float64, from the actual queries and keys."""
    mask = causal_mask(1, position + 1, offset=position, window=config.window(layer))
    return attention_weights(attend.input[[position]], keys.actual[: position + 1], mask)[:, 0]


def by_layer(visits: Iterable[Visit]) -> dict[int | None, list[Visit]]:
    """Group visits by layer, in their order."""
    grouped: dict[int | None, list[Visit]] = {}
    for visit in visits:
        grouped.setdefault(visit.layer, []).append(visit)
    return grouped
