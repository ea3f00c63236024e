"""Every form of codes that kernels read, on a GPU: held to exact numbers, and timed alone and in whole models.

    python -m llamaspec.benchmarks.gpu.code_forms right|kernels|models [--shape NAME] [--seconds N]
        [--share I/N] [--dry-run]

Rows are lines of JSON. The models are those of `benchmarks.gpu.stored`: files of llama.cpp, directories of Hugging Face
and our own schemes, in the shapes of two models, with random codes. A dry run shows on a CPU that the script works.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import batched
from typing import Any

import click
import jax
import jax.numpy as jnp

from llamaspec.benchmarks.gpu.clock import Clock
from llamaspec.benchmarks.gpu.kernels import time_kernels
from llamaspec.benchmarks.gpu.models import DRAWING, by_kernels, capacity, decoding, programs_of
from llamaspec.benchmarks.gpu.right import checked
from llamaspec.benchmarks.gpu.scale import TINY, TINY_WORK, WIDE, Model, Scale, dry, full, once
from llamaspec.benchmarks.gpu.stored import DIRECTORIES, FILES, SCHEMES, shapes_of
from llamaspec.benchmarks.gpu.varied import BROAD, NARROW, WORK
from llamaspec.benchmarks.kernel_cases.case import BFLOAT16, FLOAT32, Case, Work
from llamaspec.benchmarks.kernel_cases.products import EVERY_FORM, MIXED, bias_cases, form_cases, several_cases
from llamaspec.benchmarks.model_speed import Programs
from llamaspec.benchmarks.random_model import random_params
from llamaspec.benchmarks.report import Row, in_a_line, skipped
from llamaspec.model.insight.machine import about, measure_ceilings
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.weights.params import Params
from llamaspec.pallas_kernels.parts.compat import Target, current_target, use_target

SMALL, LARGE = "tinyllama-1.1b", "llama-3.1-8b"
KINDS = (None, *DIRECTORIES, *FILES, *SCHEMES)  # by importance; None is bfloat16
DRAWN = (None, "Q4_K_M", "q8")  # whose tokens are also sampled, of the small model
OLDER = ("q8", "q8_row", "q4", "q8_32", "q8_128", "q4_32", "q4_128")  # forms that other suites check and time
REPEATS = 1000
CONTEXT = 128
SPECIMENS = (
    *("q8_16", "q8_32_min", "q6_16", "q5_32", "q5_32_min", "q4_16", "q4_16_min", "q4_32_min", "iq4_nl", "nf4", "mxfp4"),
    *MIXED,
)


def time_files(scale: Scale, clock: Clock, *, share: slice, backwards: bool, names: Sequence[str]) -> Iterator[Row]:
    """Time a token of each model in each kind of file, directory and scheme, greedy and drawn.

    The programs of several are compiled at once, before any of them is timed.
    """
    models = [
        Model(name, TINY if scale.name == "dry" else SHAPES[name], "bfloat16", kind) for name in names for kind in KINDS
    ]
    for some in batched(_in_order(models, share, backwards), scale.prepared):
        if clock.over:
            yield from (skipped(model.title) for model in some)
            continue
        with ThreadPoolExecutor(len(some)) as pool:
            ready = [pool.submit(_compiled, model, scale, current_target()) for model in some]
        for model, prepared in zip(some, ready, strict=True):
            if clock.over:
                yield skipped(model.title)
                continue
            try:
                yield from _rows(model, *prepared.result(), scale)
            except Exception as error:  # a single file
                jax.block_until_ready(jnp.zeros(()) + 1)  # raises if the device is lost; else time the others
                yield skipped(model.title, in_a_line(error))


def _compiled(model: Model, scale: Scale, target: Target) -> tuple[Params, Programs]:
    """Give the shapes of a model's weights, and its programs. The target is set for each thread."""
    with use_target(target):
        shapes = shapes_of(model.config, model.quantize, positions=capacity(scale))
        return shapes, programs_of(model, shapes, by_kernels(model, shapes, scale), scale)


def _rows(model: Model, shapes: Params, programs: Programs, scale: Scale) -> Iterator[Row]:
    _, reasons = pallas_ops(model.config, shapes, capacity=capacity(scale))
    plain = {op: reason for op, reason in reasons.items() if reason}
    params = random_params(shapes, model.config)
    for drawing, options in DRAWING.items():
        if drawing != "greedy" and (model.name != SMALL or model.quantize not in DRAWN):
            continue
        row = decoding(model, params, programs, scale, context=scale.contexts[0], options=options)
        about_it = {"case": model.title, "drawing": drawing, "tokens_a_second": 1 / row["median"]}
        yield {**about_it, **row, "plain": plain, "compiling": programs.seconds}


def checked_cases() -> Iterator[Case]:
    """Yield every product in each form that other suites do not check, with one vector and with several."""
    for config, dtype, other in ((NARROW, BFLOAT16, FLOAT32), (BROAD, FLOAT32, BFLOAT16)):
        yield from form_cases(config, dtype, WORK)
        yield from several_cases(config, other, WORK, batch=2)
        yield from several_cases(config, dtype, WORK, batch=4)
        yield from bias_cases(config, other, WORK)


def _is_newer(case: Case) -> bool:
    return not any(f" {form} " in f"{case.op} " for form in OLDER) and any(
        f" {form} " in f"{case.op} " for form in (*EVERY_FORM, *MIXED)
    )


def check(scale: Scale, clock: Clock, *, share: slice, backwards: bool) -> Iterator[Row]:
    """Hold a share of the cases to their bounds, and repeat each."""
    cases = [case for case in once(checked_cases()) if _is_newer(case)]
    cases.sort(key=lambda case: " fp8" in case.op)  # floats at the end, where `--backwards` starts
    if scale.name == "dry":
        cases = [case for case in form_cases(WIDE, BFLOAT16, TINY_WORK) if case.op.startswith("norm_qkv q4_32_min")]
    for case in _in_order(cases, share, backwards):
        if clock.over:
            yield skipped(case.name)
            continue
        try:
            with scale.running():
                yield checked(case, 1 if scale.name == "dry" else REPEATS)
        except Exception as error:  # a single case
            jax.block_until_ready(jnp.zeros(()) + 1)  # raises if the device is lost; else check the others
            yield {"case": case.name, "outcome": "failed", "words": in_a_line(error)}


def time_forms(scale: Scale, clock: Clock, *, share: slice, backwards: bool, names: Sequence[str]) -> Iterator[Row]:
    """Time the products of models in some forms."""
    if scale.name != "dry":
        cases = [
            case
            for name in names
            for case in form_cases(SHAPES[name], BFLOAT16, Work())
            if any(f" {form} " in f"{case.op} " for form in (*SPECIMENS, "q8_32", "q4_32", "fp8"))
        ]
        scale = replace(scale, timed=tuple(cases[share]))
    yield from time_kernels(scale, clock, backwards=backwards)


def _in_order[T](cases: Sequence[T], share: slice, backwards: bool) -> Iterator[T]:
    """Go through a share; `backwards` starts with what another run had no time for."""
    mine = cases[share]
    yield from reversed(mine) if backwards else mine


PARTS: dict[str, Callable[..., Iterator[Row]]] = {"right": check, "kernels": time_forms, "models": time_files}


@click.command()
@click.argument("part", type=click.Choice(sorted(PARTS)))
@click.option("--seconds", default=240.0, show_default=True, help="Seconds after which the rest is left out.")
@click.option("--shape", "names", multiple=True, type=click.Choice([SMALL, LARGE]), default=[LARGE, SMALL])
@click.option("--share", default="0/1", show_default=True, help="Share of the cases, such as 1/4 for the second.")
@click.option("--backwards", is_flag=True, help="Start with the last case.")
@click.option("--dry-run", is_flag=True, help="Run on a CPU, with tiny cases.")
def main(part: str, seconds: float, names: Sequence[str], share: str, backwards: bool, dry_run: bool):
    """Run a part."""
    clock = Clock(seconds)
    scale: Any = replace(dry() if dry_run else full(), contexts=(8 if dry_run else CONTEXT,), prompts=())
    more = {} if part == "right" else {"names": names}
    with scale.running() if dry_run and part == "models" else nullcontext():
        ceilings = measure_ceilings(("bfloat16",), scale.memory)
        print(json.dumps({"about": about(), "copy": ceilings.copy}), flush=True)
        mine, shares = map(int, share.split("/"))
        for row in PARTS[part](scale, clock, share=slice(mine, None, shares), backwards=backwards, **more):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
