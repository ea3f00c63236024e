"""Renders reports of `benchmarks.suites.model_suite` as text and as a chart."""

from collections.abc import Mapping
from typing import Any

from llamaspec.benchmarks.common import svg
from llamaspec.benchmarks.common.report import Column, machine_lines, model_line, table
from llamaspec.benchmarks.suites.growth import SERIES, sentences
from llamaspec.benchmarks.suites.model_profile import tables

COLUMNS = (
    Column("what", "what"),
    Column("batch", "batch", "d"),
    Column("after", "context", "d"),
    Column("tokens", "tokens", "d"),
    Column("tokens/s", "tokens_a_second", ",.1f"),
    Column("ms", "median", ",.3f", 1e3),
    Column("least", "least", ",.3f", 1e3),
    Column("most", "most", ",.3f", 1e3),
    Column("GB/s", "bytes_a_second", ",.1f", 1e-9),
    Column("GFLOP/s", "flops_a_second", ",.1f", 1e-9),
    Column("of copy, %", "share", ".0f", 100),
    Column("floor, ms", "floor", ",.3f", 1e3),
    Column("read, GB/s", "read", ",.1f", 1e-9),
    Column("of floor, %", "of_floor", ".0f", 100),
    Column("least", "of_floor_least", ".0f", 100),
    Column("most", "of_floor_most", ".0f", 100),
    Column("cached", "cached"),
    Column("planned, MB", "planned_memory", ",.0f", 1e-6),
)


def as_text(report: Mapping[str, Any]) -> str:
    """Render the machine, the model and the tables."""
    lines = [*machine_lines(report), model_line(report["model"]), ""]
    lines.append(table(COLUMNS, [row for row in report["rows"] if "median" in row]))
    if any(row.get("cached") for row in report["rows"]):
        lines += ["", _cached(report["cache"])]
    for row in report["rows"]:
        if row["what"] == "first token":
            lines += [
                "",
                f"compiled or loaded programs in {row['compiling']:.2f} s; first token of a prompt of "
                f"{row['prompt']} tokens: {row['cold']:.3f} s, in a second run {row['warm']:.3f} s",
            ]
        if row["what"] == "breakdown":
            lines += ["", tables(row["parts"], context=row["context"])]
    lines += ["", *sentences(report["slopes"])] if report["slopes"] else []
    lines += ["", f"peak memory of the model's process: {report['peak_bytes'] / 1e9:.2f} GB"]
    lines += [f"skipped: {row['skipped']} ({row['why']})" for row in report["skipped"]]
    return "\n".join(lines) + "\n"


def _cached(cache: int | None) -> str:
    reason = f"fits in the cache of {cache / 1e6:,.1f} MB" if cache else "arrives faster than from memory"
    return f"cached: the data that a step reads {reason}, so the floor counts only operations, not memory bandwidth"


def as_svg(report: Mapping[str, Any]) -> str:
    """Draw a chart of the speeds.

    Suite decode: bars of the speeds, relative to the speed that the machine's bandwidth and matrix rate allow. Suite
    growth: tokens per second over the length of the prompt, the length of the context, and the batch size.
    """
    about, rows = report["about"], [row for row in report["rows"] if "median" in row]
    remark = f"{report['model']['name']}, {report['model']['dtype']}; {about['device']}, {about['processor']}"
    if report["suite"] == "decode":
        shares = {
            f"{row['what']}, {row['tokens']} after {row['context']}": {"reached": row["of_floor"]}
            for row in rows
            if "of_floor" in row
        }
        return svg.bars("Share of the speed that bandwidth and matrix rate would allow", remark, shares)
    lines: dict[str, list[tuple[float, float]]] = {}
    names = {"prefill": "prefill, by tokens", "context": "decode, by context", "batch": "decode, by sequences"}
    for row in rows:
        grows = SERIES[row["series"]].grows
        lines.setdefault(names[row["series"]], []).append((row[grows], row["tokens_a_second"]))
        if "planned_memory" in row:
            lines.setdefault("MB of memory, by context", []).append((row[grows], row["planned_memory"] / 1e6))
    title = f"Tokens per second as the work grows, with {rows[0]['batch']} sequences except in the series of sequences"
    return svg.lines(title, remark, lines, x="tokens, or sequences", y="tokens/s, MB")


def wrong(report: Mapping[str, Any]) -> list[str]:
    """Return an empty list: these suites judge no results."""
    return []
