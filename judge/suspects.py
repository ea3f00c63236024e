"""Names the fault of a server: the changes to the model, its arithmetic or its prompt that may explain its numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from llamaspec.judge.arithmetic import Arithmetic, Definition, arithmetic, define, mapped
from llamaspec.judge.numbers import EXPLAINED, Trace, chosen, compare, explained_by, worst
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.insight.trials import Change, changed, changes
from llamaspec.model.running.reference_backend import LazyLayers
from llamaspec.model.weights.loading import Progress, no_progress
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers.ggml_blocks import BLOCK, Q8_0
from llamaspec.reference.rope import LinearScaling

Ids = Callable[[list[int]], list[int]]
MOST_TRACES = 2  # requests on which we try each suspect
# Switches of a config that an engine may not know. It then computes with the default.
SWITCHES = (
    *("scaling", "windows", "local_theta", "rotary_dim", "rotary_layers", "attention_scale", "attention_cap"),
    *("logit_cap", "embedding_scale", "residual_scale", "logit_divisor", "renormalize_experts"),
)
OF_WEIGHTS = {  # doctor's changes to weights, as a fault of the server
    "rope pairing": "RoPE pairs other features of q and k than the model does",
    "norms": "the weights of norms are off by 1",
    "head": "the embedding is used as the head",
}
# Coarser arithmetic, the finest first: a name and the dtype of the KV cache.
COARSER = (
    *(("float32", "float16"), ("float32", "bfloat16"), ("float32", "int8")),
    *(("float16", None), ("bfloat16", None)),
)


class Suspect(NamedTuple):
    """A fault that a server may have."""

    what: str
    definition: Definition
    ids: Ids = lambda prompt: prompt


def name_fault(
    traces: Sequence[Trace], checkpoint: Checkpoint, definition: Definition, bos: int | None,
    *, progress: Progress = no_progress,
) -> str | None:  # fmt: skip
    """Find a fault that explains why the numbers of `traces` differ from the definition. Returns None if none does."""
    odd = sorted(traces, key=lambda trace: len(trace.ids))[:MOST_TRACES]
    if all(is_renormalized(trace, definition) for trace in odd):
        return "the log-probabilities are those of the likeliest tokens only, as after top-k or top-p"
    scores: list[tuple[float, str]] = []
    for suspect in suspects(definition, checkpoint.format, bos):
        progress("naming the fault", len(scores) / (len(scores) + 10))
        score = max(worst(compare(trace, suspect.definition, ids=suspect.ids)) for trace in odd)
        scores.append((score, suspect.what))
        if score <= EXPLAINED / 4:
            break
    if min(scores)[0] <= EXPLAINED:
        return min(scores)[1]
    return _coarser_arithmetic(odd, checkpoint, definition.arithmetic, progress=progress)


def is_renormalized(trace: Trace, definition: Definition) -> bool:
    """Tell whether all numbers of a position are too large by the same amount."""
    exact = chosen(definition.log_probabilities(trace.ids, trace.start), trace)
    for expected, entries, squares in zip(exact, trace.entries, trace.squares, strict=True):
        off, noise = np.array(list(entries.values())) - expected, EXPLAINED * np.sqrt(np.max(squares))
        if len(off) < 2 or np.min(off) < noise or np.ptp(off) > 2 * noise:
            return False
    return True


def _coarser_arithmetic(
    traces: Sequence[Trace], checkpoint: Checkpoint, claimed: Arithmetic, *, progress: Progress
) -> str | None:
    """Find the arithmetic that causes errors as large as the server's."""
    known = [arithmetic(name, cache) for name, cache in COARSER]
    likely: list[tuple[float, str]] = []
    for coarser in known[known.index(claimed) + 1 if claimed in known else 0 :]:
        progress("naming the fault", 0.9)
        rounded = define(checkpoint, coarser)
        positions = [p for trace in traces for p in compare(explained_by(trace, rounded), rounded)]
        if worst(positions) <= EXPLAINED:
            typical = float(np.mean([np.log(position.ratio) for position in positions]))
            likely.append((abs(typical), str(coarser)))
    return f"the server computes in {min(likely)[1]}, not in {claimed}" if likely else None


def suspects(definition: Definition, format: str, bos: int | None) -> Iterator[Suspect]:
    """Yield the faults to try, the frequent ones first."""
    if bos is not None:
        yield Suspect("BOS is doubled", definition, lambda prompt: [bos, *prompt])
        yield Suspect("BOS is missing", definition, lambda prompt: prompt[prompt[:1] == [bos] :])
    config = definition.config
    for change in changes(config, format):
        yield Suspect(_words(change, config), _with(definition, change))
    for name in SWITCHES:
        default = next(field.default for field in fields(Config) if field.name == name)
        if getattr(config, name) != default:
            plain = replace(definition, config=replace(config, **{name: default}))
            yield Suspect(f"the model's {name.replace('_', ' ')} is ignored", plain)
    if factor := getattr(config.scaling, "factor", None):
        linear = replace(definition, config=replace(config, scaling=LinearScaling(factor)))
        yield Suspect(f"RoPE is scaled linearly by {factor:g}", linear)
    layers = definition.params.layers
    for i in range(config.layers):
        params = definition.params._replace(layers=LazyLayers(len(layers) - 1, lambda j, i=i: layers[j + (j >= i)]))
        shorter = replace(config, layers=config.layers - 1, windows=_without(config.windows, i))
        shorter = replace(shorter, rotary_layers=_without(config.rotary_layers, i))
        yield Suspect(f"layer {i} is skipped", replace(definition, params=params, config=shorter))
    rounded = replace(definition, params=mapped(definition.params, _to_q8_0))
    yield Suspect("the weights are rounded to Q8_0", rounded)


def _with(definition: Definition, change: Change) -> Definition:
    return replace(definition, params=changed(definition.params, change), config=change.config)


def _words(change: Change, config: Config) -> str:
    for field in fields(Config):
        own, changed_value = getattr(config, field.name), getattr(change.config, field.name)
        if own != changed_value and isinstance(own, float):
            return f"{field.name} is {changed_value:g}, and the model's is {own:g}"
        if own != changed_value:
            return f"the model's {field.name} is ignored"
    return OF_WEIGHTS[change.fault]


def _without[Item](items: tuple[Item, ...] | None, index: int) -> tuple[Item, ...] | None:
    return None if items is None else (*items[:index], *items[index + 1 :])


def _to_q8_0(weights: np.ndarray) -> np.ndarray:
    """Round a matrix to ggml's Q8_0. Vectors, and rows that are not made of whole blocks, stay unchanged."""
    if weights.ndim != 2 or weights.shape[-1] % BLOCK:
        return weights
    return Q8_0.dequantize(Q8_0.quantize(weights)).astype(np.float64)
