"""Attention with sinks: each head has one more score, which takes part in the softmax but has no value."""

from dataclasses import replace
from typing import Any

import numpy as np

from llamaspec.reference.attention import sink_attention
from llamaspec.verify.bounds.precision import Precision, U, precision
from llamaspec.verify.bounds.running_error import attended, exactly
from llamaspec.verify.contract import Arguments, Claim, Contract, Expected, Law, Trial, as_float64, independent
from llamaspec.verify.contracts.attention import ATTENTION, BLOCKS, arguments
from llamaspec.verify.draws.draw import Values, values


def sink_arguments(*, precision: Precision, sinks: Values, around: float, **draws: Any) -> Arguments:
    named = arguments(precision=precision, **draws)
    mask = named.pop("mask")
    heads = named["q"].shape[2]
    return named | {"sinks": sinks.array("sinks", heads, precision=precision, around=around), "mask": mask}


def expect(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray, mask: np.ndarray) -> Expected:
    dtype = precision(v.dtype.name)
    unit, smallest = dtype.unit, dtype.smallest if dtype.unit else 0.0  # float32 weights are not rounded
    z, rows = as_float64(sinks), []
    for query, keys, value_rows, seen in zip(q, k, v, as_float64(mask), strict=True):
        arrays = exactly(query), exactly(keys), exactly(value_rows)
        output = attended(*arrays, seen, blocks=BLOCKS, unit=unit, smallest=smallest, sinks=z)
        size = sink_attention(as_float64(query), as_float64(keys), np.abs(as_float64(value_rows)), z, seen)
        rows.append((output.value, output.error, size))
    value, error, size = (np.stack(part) for part in zip(*rows, strict=True))
    return Expected(value, error, error, size)


def _halved(trial: Trial) -> Claim | None:
    """Hide all keys but the last, and set its score and the sinks to 0: the result must be half of that key's value."""
    v, mask = trial.arguments["v"], np.full_like(trial.arguments["mask"], -np.inf)
    if not v.shape[1]:
        return None
    mask[..., -1] = 0
    zeros = {name: np.zeros_like(trial.arguments[name]) for name in ("q", "sinks")}
    o = trial.again(**zeros, mask=mask)[0]
    half = np.broadcast_to(np.repeat(as_float64(v[:, -1:]), o.shape[-2] // v.shape[-2], axis=-2) / 2, o.shape)
    unit = 8 * U + 2 * precision(v.dtype.name).unit + precision(o.dtype.name).unit
    return Claim(o, half, unit * np.abs(half) + precision(v.dtype.name).smallest)


def _heads_apart(trial: Trial) -> Claim | None:
    """Change the sink of the last head: no other head may change."""
    sinks = trial.arguments["sinks"].copy()
    if len(sinks) == 1:
        return None
    sinks[-1] = 3
    return Claim(trial.again(sinks=sinks)[0][..., :-1, :], trial.outputs[0][..., :-1, :], 0.0)


CONTRACT = Contract(
    definition=sink_attention,
    shapes=ATTENTION.shapes,
    values={**ATTENTION.values, "sinks": values(-4, 4), "around": ATTENTION.values["shift"]},
    arguments=sink_arguments,
    expect=expect,
    domain="q [batch queries heads head_dim], k and v [batch keys kv_heads head_dim] and sinks [heads] of one dtype, "
    "mask [batch queries keys] float32 of 0 and -inf; head h reads key head h // (heads / kv_heads); a query that "
    "sees no key gives 0",
    bound="hard and alarm: running error analysis as for attention, with one more score",
    laws=[
        independent("a sequence", "q", "k", "v", "mask"),
        Law("a query whose only key has the sink's score gives half of the key's value", _halved, sets=("mask",)),
        Law("a sink changes only its own head, bit for bit", _heads_apart),
    ],
    large=replace(ATTENTION.large, beside={**ATTENTION.large.beside, "sinks": ["normal(9)"], "around": [0.0]}),
)
