"""Rows and tables of kernels and steps."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llamaspec.benchmarks.common.kernel_cases.case import Case
from llamaspec.benchmarks.gates.checks import instructions_per_weight, kernels_a_layer
from llamaspec.benchmarks.gates.h200 import roofline
from llamaspec.benchmarks.gates.kernel import Kernel
from llamaspec.benchmarks.gates.program import ProgramFacts

Row = dict[str, Any]

# Rows contain no times, so they change only if the code changes.
KERNEL_COLUMNS = {
    "case": "case",
    "kernel": "name",
    "registers": "registers",
    "spilled": "spilled",
    "shared, B": "shared",
    "blocks": "blocks",
    "at once, an SM": "resident_blocks",
    "in flight, B an SM": "bytes_in_flight",
    "instr. a weight": "instructions_per_weight",
    "issue slots of 4": "issue_slots",
    "at most, GB/s": "gigabytes_a_second",
}
CARD_COLUMNS = {key: KERNEL_COLUMNS[key] for key in ("case", "kernel", "registers", "shared, B", "blocks")}
CARD_COLUMNS |= {"loop": "loop", "loads of 128 bits": "wide_loads", "of fewer": "narrow_loads"}
STEP_COLUMNS = {
    "decode step": "step",
    "layers": "layers",
    "kernels a layer": "kernels_a_layer",
    "and others": "kernels_beside",
    "updated in place, B": "aliased",
    "temporary, B": "temp",
}


def kernel_row(case: Case, kernel: Kernel) -> Row:
    bound = roofline(kernel) if case.streams else None
    per_weight = instructions_per_weight(kernel, case.bits)
    return {
        "case": case.name,
        "models": case.models,
        **asdict(kernel),
        "instructions_per_weight": per_weight and round(per_weight, 2),
        "resident_blocks": bound and bound.resident,
        "bytes_in_flight": bound and bound.in_flight,
        "issue_slots": bound and bound.slots and round(bound.slots, 2),
        "gigabytes_a_second": bound and round(bound.bandwidth / 1e9),
    }


def card_row(case: Case, kernel: Kernel) -> Row:
    wide = kernel.streamed.get(128, 0)
    narrow = sum(kernel.streamed.values()) - wide
    return {"case": case.name, **asdict(kernel), "wide_loads": wide, "narrow_loads": narrow}


def step_row(name: str, short: ProgramFacts, full: ProgramFacts, *, layers: tuple[int, int]) -> Row:
    a_layer = kernels_a_layer(short, full, layers)
    return {
        "step": name,
        "layers": layers[1],
        "kernels_a_layer": a_layer,
        "kernels_beside": len(full.launches) - layers[1] * a_layer,
        "aliased": full.aliased,
        "temp": full.temp,
    }


def table(columns: dict[str, str], rows: Sequence[Row]) -> str:
    """Render rows as an aligned Markdown table.

    >>> print(table({"model": "name", "registers": "r"}, [{"name": "a", "r": 8}, {"name": "b", "r": None}]))
    | model | registers |
    | :---- | --------: |
    | a     |         8 |
    | b     |           |
    """
    lines = [list(columns), *(["" if row[key] is None else str(row[key]) for key in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [not any(isinstance(row[key], str) for row in rows) for key in columns.values()]
    sides = [str.rjust if number else str.ljust for number in numeric]
    head, *body = ([side(cell, width) for side, cell, width in zip(sides, line, widths, strict=True)] for line in lines)
    rule = [side(":", width, "-") for side, width in zip(sides, widths, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))
