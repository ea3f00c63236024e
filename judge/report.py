"""Writes the report of an examination: one screen of text, or JSON."""

import math
from typing import Any

from llamaspec.judge.conform import Report

MARKS = {"right": "ok", "wrong": "WRONG", "unclear": "?", "note": "note"}


def as_rows(report: Report) -> list[str]:
    """Write a row for each finding, and the verdict as the last row."""
    rows = [f"{report.url} as {report.served}, compared with {report.model} in {report.arithmetic}"]
    part = ""
    for finding in report.findings:
        if finding.part != part:
            part = finding.part
            rows.append(part)
        rows.append(f"  {MARKS[finding.verdict]:5}  {finding.check:22}  {finding.message}")
    rows.append(_last(report))
    return rows


def _last(report: Report) -> str:
    asked = f"{report.requests} requests, {report.seconds:.1f} s"
    wrong = sum(finding.verdict == "wrong" for finding in report.findings)
    if wrong:
        return f"does not conform: {wrong} wrong of {len(report.findings)} checks; {asked}"
    if report.ended:
        return f"no verdict: {report.ended}; {asked}"
    if report.outcome == "no verdict":
        return f"no verdict: no numbers could be compared; {asked}"
    unclear = sum(finding.verdict == "unclear" for finding in report.findings)
    return f"conforms{f', with {unclear} checks unclear' if unclear else ''}; {asked}"


def as_json(report: Report) -> dict[str, Any]:
    """Return the report for JSON. A number that is not finite becomes null."""
    positions = [
        {**position._asdict(), "verdict": position.verdict, "greedy": position.is_greedy}
        for position in report.positions
    ]
    return _finite(
        {
            "outcome": report.outcome,
            "url": report.url,
            "model": report.model,
            "served": report.served,
            "arithmetic": report.arithmetic,
            "findings": [finding._asdict() for finding in report.findings],
            "positions": positions,
            "requests": report.requests,
            "seconds": report.seconds,
            "ended": report.ended or None,
        }
    )


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(entry) for key, entry in value.items()}
        case list():
            return [_finite(entry) for entry in value]
    return value
