"""Whole models of random weights, one sequence at a time: decoding and prompts, by our kernels and by XLA."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import jax
import numpy as np

from benchmarks import model_speed
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.scale import Model, Scale
from benchmarks.model_speed import GREEDY, Programs, compile_programs, prefill_seconds
from benchmarks.random_model import random_params, random_shapes
from benchmarks.report import Row, skipped, timed
from model.insight.cost import decode_cost, prefill_cost
from model.insight.timing import Effort, Seconds, measure
from model.ops.gpu import PALLAS
from model.ops.table import Ops
from model.ops.xla import XLA
from model.options import SamplingOptions
from model.running.session import tokens_at_once
from model.weights.gpu_codes import arranged
from model.weights.params import Params

TABLES: dict[str, Ops] = {"kernels": PALLAS, "XLA": XLA}
SOME = 16  # tokens, to see how many a session would draw at once
DRAWING = {"greedy": GREEDY, "top-p": SamplingOptions()}


def time_models(scale: Scale, clock: Clock) -> Iterator[Row]:
    """Rows for each model, table of ops that it is run by, and length."""
    for model in scale.models:
        names = [f"{model.title} by {table}" for table in model.by]
        if clock.over:
            yield from map(skipped, names)
            continue
        params = params_of(model, scale)
        for name, table in zip(names, model.by, strict=True):
            if clock.over:
                yield skipped(name)
                continue
            ops = TABLES[table]
            with scale.running() if ops is PALLAS else nullcontext():  # the interpreter wants something to interpret
                programs = programs_of(model, params, ops, scale)
                about = {"case": model.title, "by": table, "compiling": programs.seconds}
                for row in _rows(model, params, programs, scale):
                    yield {**about, **row}
        del params


def params_of(model: Model, scale: Scale) -> Params:
    """Arranged for kernels, which XLA's form of a product reads as well."""
    rows = capacity(scale)
    shapes = random_shapes(model.config, dtype=np.dtype(model.dtype), positions=rows, quantize=model.quantize)
    shapes = jax.eval_shape(arranged, shapes)
    return random_params(shapes, model.config)


def programs_of(
    model: Model, params: Params, ops: Ops, scale: Scale, options: dict[str, Any] | None = None
) -> Programs:
    """Compiled as the model is, unless XLA is given other options."""
    return compile_programs(
        params,
        model.config,
        ops=ops,
        capacity=capacity(scale),
        chunk=scale.chunk,
        burst=scale.burst,
        options=options,
    )


def capacity(scale: Scale) -> int:
    """Of the cache: for the longest context and what is decoded after it, and for a prompt with its padding."""
    longest = max(*scale.contexts, *scale.prompts) + scale.chunk
    return -(-longest // 8) * 8


def decoding(
    model: Model, params: Params, programs: Programs, scale: Scale, *, context: int, options: SamplingOptions = GREEDY
) -> Row:
    """A step, after `context` tokens, of as many as a session would draw at once, and asked for as it asks: before it
    reads those that it asked for the time before."""
    ask = model_speed.decoding(programs, params, context=context, options=options)

    def step(burst: int, effort: Effort) -> Seconds:
        asked = [ask(burst)]

        def read():
            asked.append(ask(burst))
            return asked.pop(0)

        return measure(read, effort).over(burst)

    burst = min(SOME, programs.burst)
    for _ in range(2):  # of more tokens each has less of what a call costs
        burst = tokens_at_once(step(burst, Effort(1)).median, programs.burst)
    seconds = step(burst, scale.model_effort)
    cost = decode_cost(params, model.config, position=context + burst / 2, batch=1)
    return {"burst": burst, **timed(seconds, **cost._asdict(), dtype=model.dtype)}


def _rows(model: Model, params: Params, programs: Programs, scale: Scale) -> Iterator[Row]:
    for context, (drawing, options) in product(scale.contexts, DRAWING.items()):
        if drawing == "greedy" or context == scale.contexts[0]:
            row = decoding(model, params, programs, scale, context=context, options=options)
            yield {"what": f"decode, {drawing}", "context": context, "tokens": 1, **row}
    for tokens in scale.prompts:
        seconds = prefill_seconds(programs, params, tokens=tokens, effort=scale.model_effort)
        cost = prefill_cost(params, model.config, tokens=tokens)
        row = timed(seconds, **cost._asdict(), dtype=model.dtype)
        yield {"what": "prefill", "context": 0, "tokens": tokens, **row}
