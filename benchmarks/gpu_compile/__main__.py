"""Compile the kernel table for an H200 and hold it against the gates; see the package."""

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click

from benchmarks.gpu_compile.compiler import compile_case
from benchmarks.gpu_compile.gates import broken_by, instructions_per_weight
from benchmarks.gpu_compile.h200 import roofline
from benchmarks.gpu_compile.kernel import Kernel
from benchmarks.gpu_compile.program import Program
from benchmarks.gpu_compile.workers import Failure, Worker
from benchmarks.kernel_cases import REFUSED, kernel_cases
from benchmarks.kernel_cases.case import Case

RESULTS = Path(__file__).parents[1] / "results" / "gpu-compile"
VERSIONS = ("jax", "jaxlib", "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm")


def compile_all(names: Sequence[str], *, limit: float, workers: int) -> Iterator[tuple[str, Program | Failure]]:
    """Every case of the table by name, compiled or not, in the order given."""
    idle: SimpleQueue[Worker] = SimpleQueue()
    for _ in range(workers):
        idle.put(Worker(compile_case))

    def compile(name: str) -> Program | Failure:
        worker = idle.get()
        try:
            return worker(name, limit=limit)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(workers) as threads:
        yield from zip(names, threads.map(compile, names), strict=True)


def facts(case: Case, kernel: Kernel) -> dict[str, Any]:
    """What is kept of a kernel: no times, so that a change of the file is a change of the code."""
    bound = roofline(kernel)
    per_weight = instructions_per_weight(kernel, case.bits)
    return {
        **asdict(kernel),
        "instructions_per_weight": per_weight and round(per_weight, 2),
        "resident_blocks": bound and bound.resident,
        "bytes_in_flight": bound and bound.in_flight,
        "issue_slots_of_4": bound and bound.slots and round(bound.slots, 2),
        "bandwidth_bound": bound and float(f"{bound.bandwidth:.3g}"),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Facts as a Markdown table, aligned for a terminal too."""
    columns = {
        "case": lambda row: row["case"],
        "kernel": lambda row: row["name"],
        "registers": lambda row: row["registers"],
        "spilled": lambda row: row["spilled"],
        "shared": lambda row: row["shared"],
        "blocks": lambda row: row["blocks"],
        "an SM": lambda row: row["resident_blocks"],
        "in flight, kB an SM": lambda row: row["bytes_in_flight"] and f"{row['bytes_in_flight'] / 1000:.0f}",
        "instr. a weight": lambda row: row["instructions_per_weight"],
        "slots of 4": lambda row: row["issue_slots_of_4"],
        "at most, GB/s": lambda row: row["bandwidth_bound"] and f"{row['bandwidth_bound'] / 1e9:.0f}",
    }
    lines = [list(columns), *([_cell(value(row)) for value in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    aligned = [
        [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    rule = ["-" * w if i < 2 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (aligned[0], rule, *aligned[1:])) + "\n"


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


@click.command()
@click.option("--only", default="", help="Cases whose name holds this; nothing is kept then.")
@click.option("--limit", default=60.0, show_default=True, help="Seconds that one compilation may take.")
@click.option("--workers", default=2, show_default=True, help="Processes that compile at once.")
@click.option("--keep/--no-keep", default=True, help="Write benchmarks/results/gpu-compile.json and .md.")
def main(only: str, limit: float, workers: int, keep: bool):
    """Compile the kernel table for an H200, print what came out, fail where a gate does."""
    names = [name for name in kernel_cases() if only in name and name not in REFUSED]
    rows, broken = [], []
    for name, result in compile_all(names, limit=limit, workers=workers):
        case = kernel_cases()[name]
        if isinstance(result, Failure):
            wrong = [result.reason]
        else:
            rows += [{"case": name, "models": case.models, **facts(case, kernel)} for kernel in result.kernels]
            wrong = list(broken_by(case, result))
        for line in wrong:
            click.echo(f"{name}: {line}", err=True)
        broken += wrong
    click.echo(table(rows), nl=False)
    if keep and not only:
        about = {name: version(name) for name in VERSIONS}
        RESULTS.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(table(rows))
    click.echo(f"{len(names)} cases compiled for sm_90a; {len(broken)} gates broken", err=True)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
