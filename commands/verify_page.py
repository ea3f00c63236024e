"""The page of `verify --html`: verdicts, plots of errors and bounds, and the random inputs ("draws")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import inf
from typing import TYPE_CHECKING

from llamaspec.commands.page import document

if TYPE_CHECKING:
    from llamaspec.verify.contract import Contract
    from llamaspec.verify.judging.judge import Point
    from llamaspec.verify.judging.runner import Report

WITHIN, BEYOND = "within", "beyond"  # series of a chart
LEAST = 1e-6  # we plot only errors of at least this share of their bound


def page(reports: Sequence[Report], contracts: Mapping[str, Contract], lines: Sequence[Sequence[str]]) -> str:
    """Return a self-contained HTML page. `lines` are the lines that `verify` prints for each report."""
    parts = [_summary(reports)]
    for number, (report, printed) in enumerate(zip(reports, lines, strict=True)):
        parts += [
            f'<h2 id="r{number}">{escape(f"{report.op} {report.dtype}  {report.candidate}")}</h2>',
            f"<pre>{escape(chr(10).join(printed))}</pre>",
            '<div class="plots">',
            *_plots(report),
            "</div>",
            *_draw_rows(report, contracts.get(report.op)),
        ]
    return document("llamaspec verify", parts)


def _summary(reports: Sequence[Report]) -> str:
    rows = [
        f'<tr><td class="{report.outcome.split()[0]}">{report.outcome}</td><td><a href="#r{number}">{escape(report.op)}'
        f"</a></td><td>{report.dtype}</td><td>{escape(report.candidate)}</td><td>{report.examples}</td>"
        f"<td>{report.compared:,}</td><td>{max(report.worst.hard, report.nearest.hard):.2g}</td></tr>"
        for number, report in enumerate(reports)
    ]
    heads = ("verdict", "op", "dtype", "candidate", "examples", "numbers compared", "of the bound, at most")
    head = "".join(f"<th>{head}</th>" for head in heads)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{chr(10).join(rows)}\n</table></div>'


def _plots(report: Report) -> Iterator[str]:
    """Yield SVG plots: error and bound by magnitude, and the share of the bound by size, position and kind of array."""
    from llamaspec.benchmarks.common import svg
    from llamaspec.verify.draws.draw import KINDS

    points = [*report.points, *(report.worst.points if report.outcome == "violated" else ())]
    plotted = [point for point in points if LEAST * point.bound <= point.error < inf and point.error > 0 < point.bound]
    if plotted:
        exact = f"{len(plotted)} of {len(points)} points; the others have (almost) no error"
        sized = [point for point in plotted if point.magnitude > 0]
        if sized:
            rows = {
                "bound": [(point.magnitude, point.bound) for point in sized],
                "error": [(point.magnitude, point.error) for point in sized],
            }
            yield svg.scatter("Error and bound", exact, rows, x="magnitude of the exact value", y="error")
        remark = "each point: the value nearest to its bound in one eighth of a result"
        for what, x, numbers in (
            ("size", "numbers in the result", [point.of for point in plotted]),
            ("position", "position in the result, from 1", [point.position + 1 for point in plotted]),
        ):
            rows = _shares(plotted, numbers)
            yield svg.scatter(f"Share of the bound by {what}", remark, rows, x=x, y="error / bound", level=1)
    kinds = {
        f"{name}: {kind}": {WITHIN if share <= 1 else BEYOND: share}
        for name, used in report.shares_used.items()
        if set(used) <= set(KINDS)
        for kind, share in sorted(used.items(), key=lambda entry: -entry[1])
        if share
    }
    if kinds:
        remark = "the largest share over all draws"
        yield svg.bars("Share of the bound by kind of array", remark, kinds, names=(WITHIN, BEYOND))


def _shares(points: Sequence[Point], numbers: Sequence[int]) -> dict[str, list[tuple[int, float]]]:
    rows: dict[str, list[tuple[int, float]]] = {WITHIN: [], BEYOND: []}  # both keys, so that each keeps its color
    for point, number in zip(points, numbers, strict=True):
        share = point.error / point.bound
        rows[WITHIN if share <= 1 else BEYOND].append((number, share))
    return rows


def _draw_rows(report: Report, contract: Contract | None) -> Iterator[str]:
    """Yield HTML that describes one random input ("draw"), and explains each of its names.

    It is the counterexample, or else the input with the largest error relative to its bound.
    """
    from llamaspec.verify.reports.report import legend, short

    examination = report.worst if report.worst.finding else report.nearest
    if contract is None or not examination.draw:
        return
    rows = [
        f"<tr><td>{escape(name)}</td><td>{escape(short(value))}</td><td>{escape(meaning)}</td></tr>"
        for name, value, meaning in legend(contract, examination.draw)
    ]
    title = "The counterexample's draw" if report.worst.finding else "The draw nearest to its bound"
    yield f'<h3>{title}</h3>\n<div class="wide"><table>\n{chr(10).join(rows)}\n</table></div>'
    yield f"<p>Domain: {escape(contract.domain)}<br>Bound: {escape(contract.bound)}</p>"
