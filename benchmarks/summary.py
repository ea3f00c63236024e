"""Summaries of benchmark runs, short enough to keep in the repository.

    python -m llamaspec.benchmarks.summary benchmarks/results/raw/gpu.json

A benchmark writes all numbers to a raw file under benchmarks/results/raw/, which git ignores. This program writes the
tables of a raw file to benchmarks/results/NAME.md, with the device, the versions and the date. It refuses dry runs, and
summaries of more than 300 lines. It reads the files of `llamaspec bench --json` (all suites), of `gates --json`, and of
`peers`, `schemes`, `process_memory` and `no_false_alarms` in audits/.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from llamaspec.benchmarks.common.report import RESULTS, Column, Row, table

MOST_LINES = 300

CHECKED = (
    Column("op", "op"),
    Column("cases", "cases", "d"),
    Column("right", "right", "d"),
    Column("largest error, of its bound", "error", ".4f"),
    Column("repeats that differ", "differing", "d"),
)
COMPILED = (
    Column("kernel", "kernel"),
    Column("cases", "cases", "d"),
    Column("most registers", "registers", "d"),
    Column("most bytes spilled", "spilled", "d"),
    Column("most shared memory, B", "shared", ",d"),
    Column("most instructions a weight", "instructions", ".2f"),
)
CAMPAIGNS = (
    Column("op", "op"),
    Column("candidate", "candidate"),
    Column("dtype", "dtype"),
    Column("outcome", "outcome"),
    Column("examples", "examples", ",d"),
    Column("of the bound", "of the bound", ".3f"),
    Column("of the alarm", "of the alarm", ".3f"),
    Column("seconds", "seconds", ",.0f"),
)


def summary(report: Any, *, name: str) -> str:
    """Render a report of any of our benchmarks as Markdown. Raises ValueError for any other report."""
    match report:
        case {"dry_run": _} | {"model": {"tiny": True}}:
            raise ValueError("cannot summarize a dry run: it says nothing about speed")
        case {"interrupted": _}:
            raise ValueError("cannot summarize the run: it was interrupted")
        case {"suite": _, "sections": _}:
            body = _gpu(report)
        case {"suite": _, "rows": _}:
            body = _models([report])
        case [{"suite": _, "rows": _}, *_]:
            body = _models(report)
        case {"rates": _, "ratios": _}:
            from llamaspec.benchmarks.audits.peers import markdown

            body = f"Measured on {report['date']}.\n\n{markdown(report)}"
        case {"decoding": _, "models": _}:
            from llamaspec.benchmarks.audits.schemes import markdown

            body = f"{machine(report['machine'])}\n\n{markdown(report)}"
        case {"kernels": _, "steps": _}:
            body = _compiled(report)
        case {"about": _, "rows": _}:
            from llamaspec.benchmarks.audits.process_memory import COLUMNS

            body = f"{machine(report['about'])}\n\n{table(COLUMNS, report['rows'])}"
        case [{"candidate": _, "outcome": _}, *_]:
            body = _campaigns(report)
        case _:
            raise ValueError("expected a report that one of this repository's benchmarks wrote")
    return f"# {name}\n\n{body.rstrip()}\n"


def machine(about: Mapping[str, Any]) -> str:
    """Describe the device, the versions and the date of a run in one line."""
    words = [about["device"], about["processor"], f"driver {about['driver']}" if about["driver"] else None]
    words += [f"{name} {version}" for name, version in {"Python": about["python"], **about["versions"]}.items()]
    return f"Measured on {about['date']}: {', '.join(filter(None, words))}."


def _date(report: Mapping[str, Any]) -> str:
    """Write a line with the date and the Python version. The report's text names the device and other versions."""
    return f"Measured on {report['about']['date']}, Python {report['about']['python']}."


def _gpu(report: Mapping[str, Any]) -> str:
    """Render a report of a GPU suite. Checks of kernels become one row per op; all other rows stay."""
    from llamaspec.benchmarks.suites.gpu.report import as_text

    sections = {name: rows for name, rows in report["sections"].items() if name != "right"}
    lines = [_date(report), "", as_text({**report, "sections": sections})]
    if checks := report["sections"].get("right"):
        lines += ["Kernels against exact numbers", "", table(CHECKED, checked(checks))]
    return "\n".join(lines)


def checked(rows: Iterable[Row]) -> list[Row]:
    """Count the checks of each op.

    >>> right = {"case": "add 8 float32", "outcome": "right", "share_of_bound": 0.5, "differing": 0}
    >>> checked([right, {**right, "share_of_bound": 0.25}, {"case": "add 9 float32", "outcome": "failed"}])
    [{'op': 'add', 'cases': 3, 'right': 2, 'error': 0.5, 'differing': 0}]
    """
    rows_by_op: dict[str, Row] = {}
    for row in rows:
        op = row["case"].split()[0]
        of_op = rows_by_op.setdefault(op, {"op": op, "cases": 0, "right": 0, "error": 0.0, "differing": 0})
        of_op["cases"] += 1
        of_op["right"] += row["outcome"] == "right"
        of_op["error"] = max(of_op["error"], row.get("share_of_bound", 0.0))
        of_op["differing"] += row.get("differing", 0)
    return list(rows_by_op.values())


def _models(reports: Sequence[Mapping[str, Any]]) -> str:
    from llamaspec.benchmarks.suites.model_report import as_text

    return "\n\n".join(f"{_date(report)}\n\n{as_text(report)}" for report in reports)


def _compiled(report: Mapping[str, Any]) -> str:
    from llamaspec.benchmarks.gates.report import STEP_COLUMNS
    from llamaspec.benchmarks.gates.report import table as compile_table

    kernels: dict[str, Row] = {}
    for row in report["kernels"]:
        of_kernel = kernels.setdefault(row["name"], {"kernel": row["name"], "cases": 0})
        of_kernel["cases"] += 1
        facts = {key: row[key] for key in ("registers", "spilled", "shared")}
        for key, value in {**facts, "instructions": row["instructions_per_weight"] or 0.0}.items():
            of_kernel[key] = max(of_kernel.get(key, 0), value)
    about = ", ".join(f"{name} {version}" for name, version in report["about"].items() if name != "models")
    tables = [table(COMPILED, kernels.values()), compile_table(STEP_COLUMNS, report["steps"])]
    return "\n\n".join([f"Compiled for sm_90a by {about}.", *tables])


def _campaigns(rows: Sequence[Row]) -> str:
    """Render the log of `benchmarks.audits.no_false_alarms`, with a table for each group."""
    lines = []
    for group in dict.fromkeys(row["group"] for row in rows):
        of_group = [row for row in rows if row["group"] == group]
        last = of_group[-1]
        versions = {**last["versions"], **last.get("versions of the candidate", {})}
        about = ", ".join(f"{name} {version}" for name, version in versions.items())
        days = sorted(row["ended"][:10] for row in of_group)
        lines += [f"## {group}", "", f"{days[0]} to {days[-1]}, {last['machine']}, seed {last['seed']}, {about}.", ""]
        lines += [table(CAMPAIGNS, of_group), ""]
    return "\n".join(lines)


def read(raw: Path) -> Any:
    """Read a raw file: JSON, or a line of JSON per row if its name ends in .jsonl. Raises ValueError for other text."""
    text = raw.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if raw.suffix == ".jsonl" else json.loads(text)


@click.command(help=__doc__)
@click.argument("raw", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", "folder", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(raw: tuple[Path, ...], folder: Path):
    """Write the summary of each raw file."""
    for path in raw:
        try:
            text = summary(read(path), name=path.stem)
        except (ValueError, KeyError) as error:
            raise click.ClickException(f"{path}: {error}") from error
        if (lines := text.count("\n")) > MOST_LINES:
            raise click.ClickException(f"{path}: expected a summary of at most {MOST_LINES} lines, got {lines}")
        (folder / f"{path.stem}.md").write_text(text, encoding="utf-8")
        click.echo(folder / f"{path.stem}.md")


if __name__ == "__main__":
    main()
