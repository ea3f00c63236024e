"""Codes times several vectors on a GPU: held to exact numbers, timed by cut, and in whole decode steps.

    python -m llamaspec.benchmarks.gpu.several_vectors right|kernels|models [--seconds N] [--dry-run]

Rows are lines of JSON. `kernels` times the five matrices of Llama 3.1 8B by `coded_gemm` in several cuts, by XLA in
bfloat16, by the kernel for a few vectors (`gemv`), and by XLA from codes that it decodes. `models` times decode steps
of several sequences. A dry run shows on a CPU that the script works.
"""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import batched, islice, product
from typing import Any, NamedTuple

import click
import jax.numpy as jnp
import numpy as np

from llamaspec.benchmarks.gpu.clock import Clock
from llamaspec.benchmarks.gpu.kernels import Timing, compiled_together
from llamaspec.benchmarks.gpu.right import checked
from llamaspec.benchmarks.gpu.scale import TINY, Scale, dry, full
from llamaspec.benchmarks.gpu.stored import shapes_of
from llamaspec.benchmarks.kernel_cases import coded_gemm as cases
from llamaspec.benchmarks.kernel_cases.case import BFLOAT16, Case, array
from llamaspec.benchmarks.model_speed import compile_programs, decode_seconds
from llamaspec.benchmarks.random_model import random_params
from llamaspec.benchmarks.report import Row, in_a_line, skipped
from llamaspec.model.insight.cost import decode_cost
from llamaspec.model.insight.machine import about, measure_ceilings
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.insight.timing import Effort
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.ops.products import dot
from llamaspec.pallas_kernels.coded_gemm import Cut, coded_gemm, geometry_of
from llamaspec.pallas_kernels.gemv import gemv
from llamaspec.pallas_kernels.parts.matrix import MAX_BATCH
from llamaspec.pallas_kernels.unsupported import Unsupported

LARGE = "llama-3.1-8b"
REPEATS = 100
CONTEXT, BURST, CAPACITY = 256, 32, 512
WIDTHS = (8, 32, 16, 64)  # vectors, by importance
MOST_CUTS, KEPT = 9, 12
FILES = ("q8", None, "q4", "Q4_K_M")
SEQUENCES = (8, 32, 16, 64, 4, 1)


class Setting(NamedTuple):
    """Sizes of a run."""

    scale: Scale
    running: Callable[[], AbstractContextManager[Any]]
    dry: bool


def check(setting: Setting, clock: Clock) -> Iterator[Row]:
    """Hold each form in each width to its bound, and repeat it, with rings that wrap and matrices that are cut."""
    whole, part, wide = (8192, 4096, None), (384, 3968, Cut(1, 1, 2)), (256, 8192, Cut(2, 2, None, 64))
    shapes: tuple[Any, ...] = ((64, 2048, None),) if setting.dry else (whole, part, wide)
    wanted = []
    for batch, scheme, (rows, cols, cut) in product((3, 9, 32, 64), cases.FORMS, shapes):
        if not (setting.dry and (batch > 3 or scheme not in ("q8", "q4"))):
            with suppress(Unsupported):  # a last step that is a part of one, for some forms
                wanted.append((cases.case(rows, cols, batch=batch, scheme=scheme), cut))

    def one(case: Case, cut: Cut | None) -> Row:
        if clock.over:
            return skipped(case.name)
        try:
            return checked(replace(case, function=partial(coded_gemm, cut=cut)), 1 if setting.dry else REPEATS)
        except Exception as error:  # a single case
            return {"case": case.name, "outcome": "failed", "words": in_a_line(error)}

    if setting.dry:
        with setting.running():
            yield from (one(case, cut) for case, cut in wanted)
        return
    with ThreadPoolExecutor(8) as pool:
        yield from pool.map(lambda each: one(each[0], each[1]), wanted)


def cuts(rows: int, cols: int, batch: int, scheme: str) -> list[Cut]:
    """List cuts to try, the chosen one first."""
    case = cases.case(rows, cols, batch=batch, scheme=scheme)
    chosen = geometry_of(*case.arrays).cut
    found = [
        chosen,
        *(replace(chosen, turn=turn) for turn in (64, 128, 256)),
        *(replace(chosen, parts=parts) for parts in (1, 2, 4, 7, 8)),
        *(replace(chosen, stages=stages) for stages in (2, 4, 6)),
        *(Cut(2, parts, None, 64) for parts in (1, 2, 4, 8)),
    ]

    def fits(cut: Cut) -> bool:
        try:
            geometry = geometry_of(*case.arrays, cut=cut)
        except Unsupported:
            return False
        return geometry.tiles >= 100 and geometry.tiles <= 4 * 528

    return [cut for cut in dict.fromkeys(found) if fits(cut)]


def wanted_times(setting: Setting) -> Iterator[tuple[str, str, Any, Case, Any]]:
    """Yield name, way, cut, case and function."""
    shapes = {(64, 1024): "tiny"} if setting.dry else cases.shapes(SHAPES[LARGE])

    def forms(rows: int, cols: int, batch: int, scheme: str, *, most: int) -> Iterator[tuple[str, Any, Case, Any]]:
        case = cases.case(rows, cols, batch=batch, scheme=scheme)
        some = cuts(rows, cols, batch, scheme) if not setting.dry else [geometry_of(*case.arrays).cut]
        for cut in some[:most]:
            yield "coded_gemm", cut, case, partial(coded_gemm, cut=cut)

    def floats(rows: int, cols: int, batch: int) -> tuple[str, Any, Case, Any]:
        case = cases.case(rows, cols, batch=batch, scheme="q8")
        arrays = array(rows, cols, dtype=BFLOAT16), array(batch, cols, dtype=BFLOAT16)
        return "XLA bfloat16", None, replace(case, arrays=arrays), lambda w, x: dot(x, w)

    def others(rows: int, cols: int, batch: int, scheme: str) -> Iterator[tuple[str, Any, Case, Any]]:
        case = cases.case(rows, cols, batch=batch, scheme=scheme)
        if batch <= MAX_BATCH:
            yield "gemv", None, case, partial(gemv, out=jnp.float32)
        if batch in (8, 32):
            yield "XLA decoded", None, case, case.plain

    widths = WIDTHS if not setting.dry else (3,)
    for (rows, cols), name in shapes.items():
        for batch in widths:
            yield name, *floats(rows, cols, batch)
            for scheme in ("q8", "q4"):
                for one in forms(rows, cols, batch, scheme, most=1):
                    yield name, *one
    for batch, (shape, name) in product((4, 8, 1, 32), shapes.items()):
        for one in others(*shape, batch, "q8"):
            yield name, *one
        if batch < 8:
            for one in forms(*shape, batch, "q8", most=1):
                yield name, *one
    for batch, scheme, (shape, name) in product(widths, ("q8", "q4"), shapes.items()):
        for one in islice(forms(*shape, batch, scheme, most=MOST_CUTS), 1, None):
            yield name, *one


def time_kernels(setting: Setting, clock: Clock) -> Iterator[Row]:
    """Time products by their ways."""
    kept: dict[Any, Timing] = {}  # of the last cases: a matrix is drawn once for its cuts

    def timing_of(case: Case) -> Timing:
        if (key := (case.name, str(case.arrays))) not in kept:
            while len(kept) > KEPT:
                kept.pop(next(iter(kept)))
            kept[key] = Timing(case, setting.scale)
        return kept[key]

    for some in batched(wanted_times(setting), 12):
        if clock.over:
            yield from (skipped(f"{name} {way} {case.name}") for name, way, _, case, _ in some)
            continue
        ready = []
        with setting.running():
            for one in some:
                try:
                    timing = timing_of(one[3])
                    ready.append((one, timing, timing.lowered(one[4])))
                except Exception as error:  # a single case
                    yield {"case": one[3].name, "what": one[0], "by": one[1], "cut": one[2], "words": in_a_line(error)}
            programs: list[Any] = [_compiled(lowered) for _, _, lowered in ready] if setting.dry else _all(ready)
            for ((name, way, cut, case, _), timing, _), program in zip(ready, programs, strict=True):
                row = {"case": case.name, "what": name, "by": way, "cut": cut}
                try:
                    if isinstance(program, Exception):
                        raise program
                    seconds = timing.of(program)
                    yield {**row, **seconds._asdict(), "bytes": case.bytes, "rate": case.bytes / seconds.median}
                except Exception as error:  # a single case
                    yield {**row, "words": in_a_line(error)}


def _all(ready: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda one: _compiled(one[2]), ready))


def _compiled(lowered: Any) -> Any:
    try:
        return compiled_together(lowered)[0]
    except Exception as error:  # a single case
        return error


def time_models(setting: Setting, clock: Clock) -> Iterator[Row]:
    """Time decode steps of several sequences, each 256 tokens long."""
    config = replace(TINY, dim=1024, heads=8, kv_heads=1) if setting.dry else SHAPES[LARGE]
    sizes = (3,) if setting.dry else SEQUENCES
    burst = 1 if setting.dry else BURST
    for quantize in FILES:
        if clock.over or (setting.dry and quantize == "Q4_K_M"):
            yield skipped(f"{LARGE} {quantize}")
            continue
        shapes = shapes_of(config, quantize, positions=CAPACITY)
        params = random_params(shapes, config)

        def programs(batch: int, params: Any = params) -> Any:
            try:
                ops, reasons = pallas_ops(config, params, batch=batch, capacity=CAPACITY)
                sizes: dict[str, Any] = {"capacity": CAPACITY, "chunk": 0, "burst": burst, "batch": batch}
                return compile_programs(params, config, ops=ops, **sizes), reasons
            except Exception as error:  # a single batch
                return error

        with setting.running(), ThreadPoolExecutor(1 if setting.dry else len(sizes)) as pool:
            compiled = [programs(batch) for batch in sizes] if setting.dry else list(pool.map(programs, sizes))
            for batch, found in zip(sizes, compiled, strict=True):
                row = {"case": f"{LARGE} {quantize or 'bfloat16'}", "sequences": batch, "context": CONTEXT}
                try:
                    if isinstance(found, Exception):
                        raise found
                    ready, reasons = found
                    seconds = decode_seconds(ready, params, context=CONTEXT, effort=setting.scale.model_effort)
                    cost = decode_cost(params, config, position=CONTEXT + burst / 2, batch=batch)
                    row |= {**seconds._asdict(), "tokens_a_second": batch / seconds.median, "bytes": cost.bytes}
                    row |= {"plain": {op: reason for op, reason in reasons.items() if reason}}
                    yield {**row, "compiling": ready.seconds}
                except Exception as error:  # a single batch
                    yield {**row, "words": in_a_line(error)}
        del params


PARTS: dict[str, Callable[[Setting, Clock], Iterator[Row]]] = {
    "right": check,
    "kernels": time_kernels,
    "models": time_models,
}


@click.command()
@click.argument("part", type=click.Choice(sorted(PARTS)))
@click.option("--seconds", default=240.0, show_default=True, help="Seconds after which the rest is left out.")
@click.option("--dry-run", is_flag=True, help="Run on a CPU, with tiny cases.")
def main(part: str, seconds: float, dry_run: bool):
    """Run a part."""
    clock = Clock(seconds)
    scale = dry() if dry_run else replace(full(), calls=32, span=0.02, model_effort=Effort(4))
    setting = Setting(scale, scale.running if dry_run else nullcontext, dry_run)
    ceilings = measure_ceilings(("bfloat16",), scale.memory)
    print(json.dumps({"about": about(), "copy": ceilings.copy, "part": part}), flush=True)
    for row in PARTS[part](setting, clock):
        print(json.dumps(row, default=_plain), flush=True)


def _plain(value: Any) -> Any:
    return vars(value) if isinstance(value, Cut) else np.asarray(value).tolist()


if __name__ == "__main__":
    sys.exit(main())
