"""Compiles the kernel table for a card, and decode steps for an H200, and checks the gates of this package."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from llamaspec.benchmarks.common.kernel_cases import card_sampled, gated_cases, refusal, sampled
from llamaspec.benchmarks.common.kernel_cases.case import TWO_MODELS
from llamaspec.benchmarks.common.report import write_report
from llamaspec.benchmarks.gates.cards import SHEETS
from llamaspec.benchmarks.gates.checks import broken_by, broken_by_step, broken_on_card, lacks
from llamaspec.benchmarks.gates.chunk import CHUNKS, broken_by_chunk, compile_chunk
from llamaspec.benchmarks.gates.compiler import compile_case, compile_step
from llamaspec.benchmarks.gates.decode_steps import FEW_LAYERS, STEPS, decode_step
from llamaspec.benchmarks.gates.multi_device import STEPS as SHARED
from llamaspec.benchmarks.gates.multi_device import broken_by_shared_step, compile_shared
from llamaspec.benchmarks.gates.report import (
    CARD_COLUMNS,
    KERNEL_COLUMNS,
    STEP_COLUMNS,
    Row,
    card_row,
    kernel_row,
    step_row,
    table,
)
from llamaspec.benchmarks.gates.serving import SERVED, broken_by_serving, compile_served
from llamaspec.benchmarks.gates.training import TRAINED, broken_by_training, compile_training
from llamaspec.benchmarks.gates.workers import CallFailure, call_each
from llamaspec.model.insight.shapes import SHAPES

VERSIONS = ("jax", "jaxlib", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm")

# `Compile` calls a function with each name, and yields the name with the function's result or a `CallFailure`.
Compile = Callable[[Callable[[str], Any], list[str]], Iterator[tuple[str, Any]]]


def kernel_table(card: str, only: str, sample: bool, compile: Compile) -> Iterator[tuple[str, list[Row], list[str]]]:
    """Compile the cases of the table, or only of the sample, that have `only` in their names.

    Yields the name, the rows for the report, and the broken gates of each case.
    """
    on_h200, target = card == "h200", SHEETS[card].card
    shorter = sampled if on_h200 else card_sampled
    cases = shorter() if sample else gated_cases()
    names = [name for name in cases if only in name and refusal(name) is None and not lacks(cases[name], target)]
    for name, compiled in compile(partial(compile_case, card=card), names):
        case = cases[name]
        if isinstance(compiled, CallFailure):
            yield name, [], [compiled.reason]
            continue
        program, kernels = compiled
        if on_h200:
            yield name, [kernel_row(case, kernel) for kernel in kernels], list(broken_by(case, program, kernels))
        else:  # nothing is measured
            broken = broken_on_card(case, target, program, kernels)
            yield name, [card_row(case, kernel) for kernel in kernels], list(broken)


def step_table(only: str, sample: bool, compile: Compile) -> Iterator[tuple[str, list[Row], list[str]]]:
    """Compile decode steps, and yield what `kernel_table` yields. `only` must occur in "decode step NAME"."""
    models = set(TWO_MODELS) if sample else set(SHAPES)
    names = [name for name in STEPS if only in f"decode step {name}" and name.split()[0] in models]
    for name, compiled in compile(compile_step, names):
        if isinstance(compiled, CallFailure):
            yield name, [], [compiled.reason]
        else:
            step = decode_step(name)
            layers = (FEW_LAYERS, step.layers)
            broken = broken_by_step(*compiled, layers=layers, cache=step.cache, plain=step.plain)
            yield name, [step_row(name, *compiled, layers=layers)], list(broken)


@click.command()
@click.option(
    "--card", type=click.Choice(list(SHEETS)), default="h200", show_default=True,
    help="Compile for this card. For cards other than the H200, only kernels are compiled.",
)  # fmt: skip
@click.option("--only", default="", help="Compile only the cases and steps with this text in their names.")
@click.option(
    "--sample", is_flag=True, help="Compile only a case of each kind, some variants, and the steps of two models."
)
@click.option("--limit", default=120.0, show_default=True, help="Seconds allowed for one compilation.")
@click.option("--at-once", default=2, show_default=True, help="Number of compilations at the same time.")
@click.option(
    "--json",
    "raw",
    type=click.Path(path_type=Path),
    help="Write all measurements to this file, for llamaspec.benchmarks.summary to read.",
)
def main(card: str, only: str, sample: bool, limit: float, at_once: int, raw: Path | None):
    """Compile, print tables, and fail if a gate is broken."""

    def compile(function: Callable[[str], Any], names: list[str]) -> Iterator[tuple[str, Any]]:
        module = getattr(function, "func", function).__module__  # of a partial's function
        results = call_each(function, names, limit=limit, at_once=at_once, preload=[module])
        yield from zip(names, results, strict=True)

    compiled, broken, on_h200 = 0, 0, card == "h200"
    tables: list[list[Row]] = []
    for entries in (
        kernel_table(card, only, sample, compile),
        step_table(only, sample, compile) if on_h200 else (),
    ):
        tables.append([])
        for name, rows, wrong in entries:
            tables[-1] += rows
            compiled += 1
            broken += len(wrong)
            for line in wrong:
                click.echo(f"{name}: {line}", err=True)
    for title, names, function, gates in (
        ("decode step", [] if sample else SHARED, compile_shared, broken_by_shared_step),
        ("prompt", CHUNKS, compile_chunk, broken_by_chunk),
        ("serving", SERVED, compile_served, broken_by_serving),
        ("training", TRAINED, compile_training, broken_by_training),
    ):
        chosen = [name for name in names if on_h200 and only in f"{title} {name}"]
        for name, facts in compile(function, chosen):
            wrong = [facts.reason] if isinstance(facts, CallFailure) else gates(facts)
            compiled += 1
            broken += len(wrong)
            for line in wrong:
                click.echo(f"{name}: {line}", err=True)
    kernels, steps = tables
    text = "\n\n".join(
        table(columns, rows)
        for columns, rows in ((KERNEL_COLUMNS if on_h200 else CARD_COLUMNS, kernels), (STEP_COLUMNS, steps))
        if rows
    )
    click.echo(text)
    if raw:
        about = {**{name: version(name) for name in VERSIONS}, "models": sorted(TWO_MODELS if sample else SHAPES)}
        about["card"] = card
        write_report({"about": about, "kernels": kernels, "steps": steps}, raw)
    what = "cases, decode steps and prompts for sm_90a" if on_h200 else f"cases for {SHEETS[card]}"
    click.echo(f"compiled {compiled} {what}: {broken} broken gates", err=True)
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
