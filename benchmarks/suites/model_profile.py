"""Divides the time of a prompt and of a decoding step among the parts of the model."""

from collections.abc import Mapping
from typing import Any

import jax

from llamaspec.benchmarks.common.model_speed import GREEDY, TimedPrograms, decoding, prefilling
from llamaspec.benchmarks.common.report import Column, Row, model_line, table
from llamaspec.model.insight.cost import decode_bytes
from llamaspec.model.insight.profile import PRODUCT, Trace, events_of, parts_of, record, seconds_by, seconds_in_graphs
from llamaspec.model.weights.params import Params

RUNS = 3
WARM_UPS = 6  # on a GPU: after one call a traced step took 1.4 times as long as after several
IDLE = "between ops, and the host"
COLUMNS = (
    Column("where the time goes", "part"),
    Column("ms", "seconds", ",.3f", 1e3),
    Column("%", "share", ".1f", 100),
    Column("MB", "bytes", ",.2f", 1e-6),
    Column("GB/s", "bytes_a_second", ",.1f", 1e-9),
    Column("floor, ms", "floor", ",.3f", 1e3),
)


def profiled(
    programs: TimedPrograms, params: Params, *, context: int, without_graphs: TimedPrograms | None = None
) -> tuple[dict[str, list[Row]], Trace]:
    """Profile a prompt of `context` tokens and a decoding step after it.

    Returns the rows for both, sorted by time from the longest, and the trace. Of several runs, we report the one with
    the median time. The times of a step are averages over all steps of one call. `model.insight.profile.named` must
    have named the ops of the programs. On a GPU, CUDA graphs hide the names of kernels, so we take the names from a run
    of `without_graphs`, which has the same programs without CUDA graphs.
    """
    trace = _traced(programs, params, context=context, runs=RUNS)
    named = without_graphs or programs
    names = _traced(named, params, context=context, runs=1) if without_graphs else None
    middle = context + programs.burst / 2
    read = decode_bytes(params, programs.config, position=middle, batch=programs.batch)
    return {
        "prefill": _rows(trace, "prefill", named.prefill, names, read={}, steps=1),
        "decode": _rows(trace, "decode", named.decode(GREEDY.greedy), names, read=read, steps=programs.burst),
    }, trace


def _traced(programs: TimedPrograms, params: Params, *, context: int, runs: int) -> Trace:
    calls = {
        "prefill": prefilling(programs, params, tokens=context),
        "decode": decoding(programs, params, context=context),
    }
    for call in calls.values():
        for _ in range(1 if jax.default_backend() == "cpu" else WARM_UPS):
            jax.block_until_ready(call())
    return record({f"{span} {run}": call for run in range(runs) for span, call in calls.items()})


def as_text(report: Mapping[str, Any]) -> str:
    """Render the model and the tables of its parts."""
    return "\n".join([model_line(report["model"]), "", tables(report["parts"], context=report["context"])]) + "\n"


def tables(parts: Mapping[str, list[Row]], *, context: int) -> str:
    """Render a table for the prompt and one for the step."""
    titles = {"prefill": f"a prompt of {context} tokens", "decode": f"a step of decoding after {context}"}
    texts = []
    for span, rows in parts.items():
        total = sum(row["seconds"] for row in rows)
        texts.append(f"{titles[span]}: {total * 1e3:,.3f} ms\n\n{table(COLUMNS, rows)}")
    return "\n\n".join(texts)


def _rows(
    trace: Trace, span: str, program: Any, names: Trace | None, *, read: dict[str, float], steps: int
) -> list[Row]:
    """Divide the time of a span among the parts of the model.

    `names` is a trace with the names of kernels. If it is None, `trace` has these names. `program` is the compiled
    program that ran in the trace with the names. `read` has the bytes that each part reads, and `steps` the number of
    steps in a span.
    """
    runs = [events_of(trace, f"{span} {run}") for run in range(RUNS)]
    ran, start, end = sorted(runs, key=lambda run: run[2] - run[1])[RUNS // 2]
    parts = parts_of(program.as_text() or "")
    if names is None:
        spent = seconds_by(ran, parts, start=start, end=end)
    else:
        named, _, _ = events_of(names, f"{span} 0")
        spent = seconds_in_graphs(ran, named, parts, start=start, end=end)
    rows = []
    for part, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        row: Row = {"part": part or IDLE, "seconds": seconds / steps, "share": seconds * 1e6 / (end - start)}
        product = f"{part} {PRODUCT}"
        reader = product if product in read and product not in spent else part  # a kernel is an op with its product
        if reader in read:
            row |= {"bytes": read[reader], "bytes_a_second": read[reader] / row["seconds"]}
        rows.append(row)
    return rows
