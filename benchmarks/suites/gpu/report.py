"""Makes the reports of the suite: tables, JSON, and a chart of the share of the copy bandwidth."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from llamaspec.benchmarks.common import svg
from llamaspec.benchmarks.common.report import Column, Row, machine_lines, skipped, table, with_shares
from llamaspec.benchmarks.suites.gpu.suite import SectionRow
from llamaspec.model.insight.machine import Ceilings

NOTHING_MEANT = "dry run on a CPU: nothing ran on a GPU, so the numbers mean nothing"
INTERRUPTED = 130  # exit status after Ctrl-C

LARGE = 32 << 20  # bytes: for smaller matrices, launching a kernel takes a large part of the time
MICROSECONDS = Column("us", "median", ",.1f", 1e6)
LEAST, MOST = Column("least", "least", ",.1f", 1e6), Column("most", "most", ",.1f", 1e6)
MORE = Column("least, more than without, us", "more", ",.2f", 1e6)
BANDWIDTH = Column("GB/s", "bytes_a_second", ",.0f", 1e-9)
RATE = Column("TFLOP/s", "flops_a_second", ",.1f", 1e-12)
SHARE = Column("of copy, %", "share", ".0f", 100)
OF_FLOOR = Column("of floor, %", "of_floor", ".0f", 100)
BESIDE, SPEEDUP = Column("XLA, us", "plain", ",.1f", 1e6), Column("times as fast", "speedup", ".2f")

SECTIONS: dict[str, tuple[str, tuple[Column, ...]]] = {
    "right": (
        "Kernels against exact numbers",
        (
            Column("case", "case"),
            Column("outcome", "outcome"),
            Column("error, of bound", "share_of_bound", ".3f"),
            Column("repeats that differ", "differing", "d"),
            Column("it says", "words"),
        ),
    ),
    "models": (
        "Models of random weights",
        (
            *(Column(name, name) for name in ("case", "by", "what")),
            Column("after", "context", "d"),
            Column("a call", "burst", "d"),
            Column("tokens", "tokens", "d"),  # of a prompt, or of a step, which has one per sequence
            Column("tokens/s", "tokens_a_second", ",.0f"),
            *(MICROSECONDS, LEAST, MOST, BANDWIDTH, SHARE, OF_FLOOR),
        ),
    ),
    "kernels": (
        "Kernels compared with XLA",
        (Column("case", "case"), MICROSECONDS, LEAST, MOST, BANDWIDTH, SHARE, OF_FLOOR, BESIDE, SPEEDUP),
    ),
    "clearing": (
        "Rows of V that decode attention clears, in its last tile",
        (Column("case", "case"), Column("rows", "rows", "d"), MICROSECONDS, LEAST, MOST, MORE),
    ),
    "attention": (
        "Attention to a prompt compared with cuDNN's",
        (
            *(Column("case", "case"), MICROSECONDS, RATE, OF_FLOOR, Column("other", "beside")),
            *(BESIDE._replace(heading="its us"), SPEEDUP),
        ),
    ),
    "tuning": (
        "Tiles",
        (
            Column("product", "key"),
            Column("fastest", "tile"),
            MICROSECONDS,
            Column("now", "now"),
            Column("us", "now_median", ",.1f", 1e6),
            Column("faster", "faster"),
        ),
    ),
    "launching": (
        "A decode step with different CUDA graphs, with PDL and without",
        (
            Column("in a graph", "case"),
            Column("PDL", "pdl"),
            Column("after", "context", "d"),
            Column("a call", "burst", "d"),
            MICROSECONDS,
            LEAST,
            MOST,
        ),
    ),
    "starting": (
        "From the start to the first token, seconds",
        (
            Column("programs", "case"),
            Column("to the device", "importing", ".2f"),
            Column("compiling", "compiling", ".2f"),
            Column("prompt and token", "first", ".2f"),
            Column("in all", "in_all", ".2f"),
        ),
    ),
}


def as_report(rows: Iterable[SectionRow], *, suite: str, dry: bool) -> dict[str, Any]:
    """Collect rows into a report, and compute shares and speedups. The row of the machine comes first.

    If a run is interrupted after it measured the machine, the report has the rows so far, and its field `interrupted`
    is the exit status.
    """
    sections: dict[str, list[Row]] = {}
    left_out: list[Row] = []
    machine: Row = {}
    interrupted: dict[str, Any] = {}
    try:
        for section, row in rows:
            if "skipped" in row:
                left_out.append({"section": section, **row})
            elif section == "memory":
                machine = row
            else:
                sections.setdefault(section, []).append(row)
    except (KeyboardInterrupt, SystemExit) as end:
        if not machine:
            raise
        left_out.append({"section": suite, **skipped("the remaining cases", "interrupted")})
        interrupted = {"interrupted": end.code if isinstance(end, SystemExit) else INTERRUPTED}
    ceilings = Ceilings(**machine["ceilings"])
    return {
        "suite": suite,
        **({"dry_run": NOTHING_MEANT} if dry else {}),
        **interrupted,
        **machine,
        "sections": {name: [_completed(row, ceilings) for row in rows] for name, rows in sections.items()},
        "skipped": left_out,
    }


def _completed(row: Row, ceilings: Ceilings) -> Row:
    row = with_shares(row, ceilings)
    return {**row, "tokens_a_second": row["tokens"] / row["median"]} if "tokens" in row else row


def as_text(report: Mapping[str, Any]) -> str:
    """Render the machine and the tables, and list the skipped cases with the reasons."""
    lines = [*([report["dry_run"], ""] if "dry_run" in report else []), *machine_lines(report)]
    for name, (title, columns) in SECTIONS.items():
        if rows := report["sections"].get(name):
            lines += ["", title, "", table(columns, rows)]
    if report["skipped"]:
        lines += ["", "Left out", ""]
        for (section, why), rows in groupby(report["skipped"], key=lambda row: (row["section"], row["why"])):
            first, *more = [row["skipped"] for row in rows]
            lines.append(f"{section}: {first}{f' and {len(more)} more' if more else ''} ({why})")
    if "dry_run" in report:
        lines += ["", report["dry_run"]]
    return "\n".join(lines) + "\n"


def as_svg(report: Mapping[str, Any]) -> str:
    """Draw the speeds of decoding and of memory-bound kernels, as shares of the measured copy bandwidth."""
    rows: dict[str, dict[str, float]] = {}
    for row in report["sections"].get("models", []):
        if row["what"].startswith("decode, greedy"):
            rows.setdefault(f"{row['case']}, after {row['context']}", {})[row["by"]] = row["share"]
    for row in report["sections"].get("kernels", []):
        if row["bytes"] >= LARGE and row["of_floor"] and row["op"] != "attention_prefill":
            rows[row["case"]] = {"kernels": row["share"], "XLA": row["share"] / row["speedup"]}
    about = report["about"]
    remark = report.get("dry_run", f"{about['device']}, driver {about['driver']}, jax {about['versions']['jax']}")
    return svg.bars("Share of the measured copy bandwidth", remark, rows)


def wrong(report: Mapping[str, Any]) -> list[str]:
    """List the kernels with wrong results, and the kernels that failed."""
    return [row["case"] for row in report["sections"].get("right", []) if row["outcome"] in ("wrong", "failed")]


def tuned(table: Mapping[str, list[int | None]], report: Mapping[str, Any]) -> dict[str, list[int | None]]:
    """Update the table of tiles with the faster tiles of a report.

    If a product has several cases, we use the tile of its first case.

    >>> tuned({"a": [16, 4]}, {"sections": {"tuning": [{"key": "b", "tile": [8, 8], "faster": True}]}})
    {'a': [16, 4], 'b': [8, 8]}
    """
    faster: dict[str, list[int | None]] = {}
    for row in report["sections"].get("tuning", []):
        if row["faster"]:
            faster.setdefault(row["key"], row["tile"])
    return dict(sorted({**table, **faster}.items()))
