"""Rows of a benchmark, with measured and computed numbers, and tables of rows."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llamaspec.model.insight.machine import Ceilings
from llamaspec.model.insight.timing import Seconds

Row = dict[str, Any]

RESULTS = Path(__file__).parents[1] / "results"  # summaries, which README and docs cite
RAW = RESULTS / "raw"  # every figure of a run; ignored by git


class Column(NamedTuple):
    """A column of a table: the key of its values in a row, and their format."""

    heading: str
    key: str
    form: str = ""  # a format specification
    scale: float = 1  # numbers are multiplied by this


def skipped(name: str, why: str = "there was no time left") -> Row:
    """Make a row for a measurement that did not happen."""
    return {"skipped": name, "why": why}


def in_a_line(error: Exception) -> str:
    """Describe an error in one line: its type and the first line of its message.

    >>> in_a_line(ValueError("no such tile\\nat all"))
    'ValueError: no such tile'
    """
    return f"{type(error).__name__}: {error}".splitlines()[0]


def timed(seconds: Seconds, *, bytes: float, flops: float, dtype: str) -> Row:
    """Make a row with a measured time, and with the bytes and operations of the timed work."""
    return {**seconds._asdict(), "bytes": bytes, "flops": flops, "dtype": dtype}


def with_shares(row: Row, ceilings: Ceilings) -> Row:
    """Add to a timed row its bytes and operations per second, and compare them with the machine's measured rates.

    `share` is bytes per second relative to the copy bandwidth. `floor` is the least time that the machine's bandwidth
    and matrix rate allow, and `of_floor` is this time relative to the median time. A row without a time or without
    bytes is returned unchanged.
    """
    if "median" not in row or "bytes" not in row:
        return row
    floor = ceilings.floor(bytes=row["bytes"], flops=row["flops"], dtype=row["dtype"])
    return {
        **row,
        "bytes_a_second": row["bytes"] / row["median"],
        "flops_a_second": row["flops"] / row["median"],
        "share": row["bytes"] / row["median"] / ceilings.copy,
        "floor": floor,
        "of_floor": floor / row["median"],
    }


def write_report(report: Any, file: Path) -> None:
    """Write a report as JSON with one value per line, so that `diff` can compare two reports."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")


def machine_lines(report: Mapping[str, Any]) -> list[str]:
    """Describe the device, the versions and the measured rates."""
    about, ceilings = report["about"], report["ceilings"]
    words = [about["device"], about["processor"], f"driver {about['driver']}" if about["driver"] else None]
    words += [f"{name} {number}" for name, number in about["versions"].items()]
    rates = [f"{rate / 1e9:,.0f} GFLOP/s in {dtype}" for dtype, rate in ceilings["flops"].items()]
    bandwidths = [f"copy {ceilings['copy'] / 1e9:,.1f} GB/s", f"read {ceilings['read'] / 1e9:,.1f} GB/s"]
    return [", ".join(filter(None, words)), ", ".join([*bandwidths, *rates])]


def model_line(model: Mapping[str, Any]) -> str:
    """Describe a model in one line.

    >>> model_line({"name": "stories", "dtype": "float32", "quantize": "q8"})
    'stories, float32, matrices in q8'
    """
    return f"{model['name']}, {model['dtype']}" + (f", matrices in {model['quantize']}" if model["quantize"] else "")


def table(columns: Iterable[Column], rows: Iterable[Row]) -> str:
    """Render rows as an aligned Markdown table. A column without values is left out.

    >>> print(table([Column("name", "n"), Column("us", "s", ",.1f", 1e6)], [{"n": "a", "s": 8e-6}, {"n": "b"}]))
    | name |  us |
    | :--- | --: |
    | a    | 8.0 |
    | b    |     |
    """
    rows = list(rows)
    columns = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    lines = [[_cell_text(row.get(column.key), column) for column in columns] for row in rows]
    texts = [any(isinstance(row.get(column.key), str | bool | list) for row in rows) for column in columns]
    headings = [column.heading for column in columns]
    widths = [max(3, *map(len, cells)) for cells in zip(headings, *lines, strict=True)]

    def line(cells: Iterable[str], fill: str = " ") -> str:
        sides = zip(cells, widths, texts, strict=True)
        padded = (cell.ljust(width, fill) if text else cell.rjust(width, fill) for cell, width, text in sides)
        return f"| {' | '.join(padded)} |"

    return "\n".join([line(headings), line([":"] * len(columns), "-"), *map(line, lines)])


def _cell_text(value: Any, column: Column) -> str:
    if value is None:
        return ""
    match value:
        case str():
            return value
        case bool():
            return "yes" if value else "no"
        case list():
            return " x ".join("-" if part is None else str(part) for part in value)
        case _:
            return format(value * column.scale, column.form)
