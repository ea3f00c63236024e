"""Every form of codes that kernels read, on a GPU: held to exact numbers, and timed alone and in whole models.

    python -m benchmarks.gpu.code_forms right|kernels|models [--seconds N] [--share I/N] [--dry-run]

Rows are lines of JSON. The files are those that llama.cpp writes, in the shapes of two models, with random codes. A dry
run shows on a CPU that the script works.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.kernels import time_kernels
from benchmarks.gpu.models import DRAWING, by_kernels, capacity, decoding, programs_of
from benchmarks.gpu.right import checked
from benchmarks.gpu.scale import TINY, TINY_WORK, WIDE, Model, Scale, dry, full, once
from benchmarks.gpu.varied import BROAD, NARROW, WORK
from benchmarks.kernel_cases.case import BFLOAT16, FLOAT32, Case, Work
from benchmarks.kernel_cases.products import EVERY_FORM, MIXED, bias_cases, form_cases, several_cases
from benchmarks.random_model import random_params, random_shapes
from benchmarks.report import Row, in_a_line, skipped
from model.checkpoints.checkpoint import Codes, Tensor
from model.checkpoints.gguf.blocks import FORMS
from model.insight.machine import about, measure_ceilings
from model.insight.shapes import SHAPES
from model.ops.gpu import pallas_ops
from model.tensors import EMBEDDING, HEAD, quantizable, tensor_shapes
from model.weights.gpu_codes import arranged
from model.weights.params import Params, abstract_params
from reference.config import Config

# Types of files: of most matrices, and of those that get more bits.
MIXES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K")}
MORE_BITS = ("self_attn.v_proj", "mlp.down_proj")  # and the head; in half of the layers
SMALL, LARGE = "tinyllama-1.1b", "llama-3.1-8b"
FILES = (  # by importance
    *((name, kind) for name in (SMALL, LARGE) for kind in (None, "Q4_K_M", "q8")),
    *((SMALL, kind) for kind in ("Q4_0", "Q6_K", "nf4", "IQ4_NL", "Q5_K_M", "Q8_0", "MXFP4", "q4")),
    *((LARGE, kind) for kind in ("q4", "Q6_K", "nf4", "Q5_K_M", "Q8_0")),
    *((SMALL, kind) for kind in ("Q4_1", "Q2_K", "Q3_K", "Q5_1", "fp8")),
)
DRAWN = (None, "Q4_K_M", "q8")  # files whose tokens are also sampled
OLDER = ("q8", "q8_row", "q4", "q8_32", "q8_128", "q4_32", "q4_128")  # forms that other suites check and time
REPEATS = 1000
CONTEXT = 128
SPECIMENS = ("q8_16", "q8_32_min", "q4_16", "q4_16_min", "q4_32_min", "iq4_nl", "nf4", "mxfp4", *MIXED)


def file_params(config: Config, kind: str, *, positions: int) -> Params:
    """Give the shapes of a file's weights in bfloat16, as they lie on the default device."""
    most, more = MIXES.get(kind, (kind, kind))
    nothing, in_codes = np.empty(0, np.float32), {*quantizable(config), EMBEDDING}

    def codes(name: str) -> Codes:
        form, group = FORMS[more if _has_more_bits(name, config.layers) else most]
        return Codes(form, group, zeros=False, bytes=0, parts=lambda: iter(()))

    tensors = {
        name: Tensor(shape, nothing.dtype, lambda: nothing, codes(name) if name in in_codes else None)
        for name, shape in tensor_shapes(config).items()
    }
    shapes = abstract_params(config, dtype=BFLOAT16, positions=positions, tensors=tensors)
    return jax.eval_shape(arranged, shapes)


def _has_more_bits(name: str, layers: int) -> bool:
    if name == HEAD:
        return True
    if not any(part in name for part in MORE_BITS):
        return False
    layer = int(name.split(".")[2])
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def time_files(scale: Scale, clock: Clock, *, share: slice, backwards: bool) -> Iterator[Row]:
    """Time a token of each model from each file, greedy and drawn."""
    for name, kind in _in_order(FILES, share, backwards):
        config = TINY if scale.name == "dry" else SHAPES[name]
        model = Model(name, config, "bfloat16", kind)
        if clock.over:
            yield skipped(model.title)
            continue
        try:
            if kind is None or kind.islower():
                shapes = random_shapes(config, dtype=BFLOAT16, positions=capacity(scale), quantize=kind)
                shapes = jax.eval_shape(arranged, shapes)
            else:
                shapes = file_params(config, kind, positions=capacity(scale))
            _, reasons = pallas_ops(config, shapes, capacity=capacity(scale))
            params = random_params(shapes, config)
            programs = programs_of(model, params, by_kernels(model, params, scale), scale)
            plain = {op: reason for op, reason in reasons.items() if reason}
            for drawing, options in DRAWING.items():
                if drawing != "greedy" and (name, kind) not in [(SMALL, kind) for kind in DRAWN]:
                    continue
                row = decoding(model, params, programs, scale, context=scale.contexts[0], options=options)
                about_it = {"case": model.title, "drawing": drawing, "tokens_a_second": 1 / row["median"]}
                yield {**about_it, **row, "plain": plain, "compiling": programs.seconds}
            del params, programs
        except Exception as error:  # a single file
            yield skipped(model.title, in_a_line(error))


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


def time_forms(scale: Scale, clock: Clock, *, share: slice, backwards: bool) -> Iterator[Row]:
    """Time the products of two models in some forms."""
    if scale.name != "dry":
        cases = [
            case
            for name in (SMALL, LARGE)
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
@click.option("--share", default="0/1", show_default=True, help="Share of the cases, such as 1/4 for the second.")
@click.option("--backwards", is_flag=True, help="Start with the last case.")
@click.option("--dry-run", is_flag=True, help="Run on a CPU, with tiny cases.")
def main(part: str, seconds: float, share: str, backwards: bool, dry_run: bool):
    """Run a part."""
    clock = Clock(seconds)
    scale: Any = replace(full(), contexts=(CONTEXT,), prompts=(512,)) if not dry_run else dry()
    with scale.running() if dry_run and part == "models" else nullcontext():
        ceilings = measure_ceilings(("bfloat16",), scale.memory)
        print(json.dumps({"about": about(), "copy": ceilings.copy}), flush=True)
        mine, shares = map(int, share.split("/"))
        for row in PARTS[part](scale, clock, share=slice(mine, None, shares), backwards=backwards):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
