"""Times whole models with random weights: decoding and prompts, with our kernels and with XLA's ops."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import numpy as np

from llamaspec.benchmarks.common import model_speed
from llamaspec.benchmarks.common.model_speed import GREEDY, TimedPrograms, compile_programs, prefill_seconds
from llamaspec.benchmarks.common.random_model import random_params, random_shapes
from llamaspec.benchmarks.common.report import Row, skipped, timed
from llamaspec.benchmarks.suites.gpu.clock import Deadline
from llamaspec.benchmarks.suites.gpu.scale import RandomModel, Scale
from llamaspec.model.insight.cost import decode_cost, prefill_cost
from llamaspec.model.insight.timing import Effort, Seconds, measure
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.ops.table import Ops
from llamaspec.model.ops.xla import XLA
from llamaspec.model.options import SamplingOptions
from llamaspec.model.running.session import tokens_at_once
from llamaspec.model.weights.gpu_codes import arranged
from llamaspec.model.weights.params import Params

SOME = 16  # tokens of a first call; its time shows how many tokens a session would draw per call
DRAWING = {"greedy": GREEDY, "top-p": SamplingOptions()}


def time_models(scale: Scale, clock: Deadline, *, batch: int = 1) -> Iterator[Row]:
    """Time each model at each length, with our kernels and with XLA's ops.

    With a `batch` of several sequences, we time decoding only after the shortest context, because all caches must fit
    in memory, and we time no prompts.
    """
    if batch > 1:
        scale = replace(scale, contexts=scale.contexts[:1], prompts=())
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
            with scale.running() if table == "kernels" else nullcontext():  # the interpreter needs a kernel
                programs = programs_of(
                    model,
                    params,
                    XLA if table == "XLA" else by_kernels(model, params, scale, batch),
                    scale,
                    batch=batch,
                )
                about = {"case": model.title, "by": table, "compiling": programs.seconds}
                for row in _rows(model, params, programs, scale):
                    yield {**about, **row}
        del params


def params_of(model: RandomModel, scale: Scale) -> Params:
    """Draw weights in the layout of kernels. XLA's products read this layout, too."""
    rows = capacity(scale)
    shapes = random_shapes(model.config, dtype=np.dtype(model.dtype), positions=rows, quantize=model.quantize)
    shapes = jax.eval_shape(arranged, shapes)
    return random_params(shapes, model.config)


def by_kernels(model: RandomModel, params: Params, scale: Scale, batch: int = 1) -> Ops:
    """Make a model's table of ops, in which ops run as our kernels."""
    ops, _ = pallas_ops(model.config, params, batch=batch, capacity=capacity(scale))
    return ops


def programs_of(
    model: RandomModel, params: Params, ops: Ops, scale: Scale, options: dict[str, Any] | None = None, *, batch: int = 1
) -> TimedPrograms:
    """Compile programs for decoding, and for prompts if `scale` has any. `options` replace options of XLA."""
    return compile_programs(
        params,
        model.config,
        ops=ops,
        capacity=capacity(scale),
        chunk=scale.chunk if scale.prompts else 0,
        burst=scale.burst,
        batch=batch,
        options=options,
    )


def capacity(scale: Scale) -> int:
    """Compute the number of cache positions: the longest context or prompt of `scale`, plus one prefill chunk."""
    longest = max((*scale.contexts, *scale.prompts)) + scale.chunk
    return -(-longest // 8) * 8


def decoding(
    model: RandomModel,
    params: Params,
    programs: TimedPrograms,
    scale: Scale,
    *,
    context: int,
    options: SamplingOptions = GREEDY,
) -> Row:
    """Time a decoding step after `context` tokens, in the same way as a session of `generate` runs it.

    Each call draws as many tokens as a call in a session. Before we read the tokens of a call, we start the next call.
    """
    ask = model_speed.decoding(programs, params, context=context, options=options)

    def step(burst: int, effort: Effort) -> Seconds:
        requests = [ask(burst)]

        def read():
            requests.append(ask(burst))
            return requests.pop(0)

        return measure(read, effort).over(burst)

    burst = min(SOME, programs.burst)
    for _ in range(2):  # more tokens per call mean less overhead per token
        burst = tokens_at_once(step(burst, Effort(1)).median, programs.burst)
    seconds = step(burst, scale.model_effort)
    cost = decode_cost(params, model.config, position=context + burst / 2, batch=programs.batch)
    return {"burst": burst, **timed(seconds, **cost._asdict(), dtype=model.dtype)}


def _rows(model: RandomModel, params: Params, programs: TimedPrograms, scale: Scale) -> Iterator[Row]:
    for context, (drawing, options) in product(scale.contexts, DRAWING.items()):
        if drawing == "greedy" or context == scale.contexts[0]:
            row = decoding(model, params, programs, scale, context=context, options=options)
            yield {"what": f"decode, {drawing}", "context": context, "tokens": programs.batch, **row}
    for tokens in scale.prompts:
        seconds = prefill_seconds(programs, params, tokens=tokens, effort=scale.model_effort)
        cost = prefill_cost(params, model.config, tokens=tokens)
        row = timed(seconds, **cost._asdict(), dtype=model.dtype)
        yield {"what": "prefill", "context": 0, "tokens": tokens, **row}
