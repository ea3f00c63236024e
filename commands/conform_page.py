"""The page of `conform --html`: the findings, and plots of the server's errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import exp, isfinite
from typing import TYPE_CHECKING

from llamaspec.commands.page import document

if TYPE_CHECKING:
    from llamaspec.judge.conform import Report
    from llamaspec.judge.numbers import Position

SERIES = ("explained", "not explained", "undecided")  # in the order of the chart's colors: the second is red
MOST_ROWS = 50  # of the table of positions that are not explained


def page(report: Report, rows: Sequence[str]) -> str:
    """Return a self-contained HTML page. `rows` are the lines that `conform` prints."""
    parts = [f"<pre>{escape(chr(10).join(rows))}</pre>", '<div class="plots">', *_plots(report.positions), "</div>"]
    return document(f"llamaspec conform {report.url}", [*parts, *_table(report.positions)])


def _plots(positions: Sequence[Position]) -> Iterator[str]:
    """Yield SVG plots: the ratio by position, and the difference by probability."""
    from llamaspec.benchmarks.common import svg
    from llamaspec.judge.numbers import EXPLAINED

    def series(points: Sequence[tuple[Position, float, float]]) -> dict[str, list[tuple[float, float]]]:
        return {verdict: [(x, y) for position, x, y in points if position.verdict == verdict] for verdict in SERIES}

    ratios = [(position, position.position + 1, position.ratio) for position in positions if isfinite(position.ratio)]
    differences = [
        (position, exp(position.exact), position.difference) for position in positions if isfinite(position.difference)
    ]
    for title, points, x, y, level in (
        ("Error by position", ratios, "position in the text, from 1", "times what the arithmetic explains", EXPLAINED),
        ("Error by probability", differences, "exact probability of the token", "largest difference, nats", None),
    ):
        plotted = [point for point in points if point[1] > 0 < point[2]]
        if plotted:
            remark = f"{len(plotted)} positions"
            if len(plotted) < len(positions):
                remark += f" of {len(positions)}; the others have no error, or an infinite one"
            yield svg.scatter(title, remark, series(plotted), x=x, y=y, level=level)


def _table(positions: Sequence[Position]) -> Iterator[str]:
    """Yield the positions that are not explained, with the largest ratio first."""
    wrong = sorted((p for p in positions if p.verdict == "not explained"), key=lambda p: -p.ratio)
    if not wrong:
        return
    heads = ("request", "position", "times what the arithmetic explains", "largest difference, nats")
    rows = [
        f"<tr><td>{escape(p.trace)}</td><td>{p.position + 1}</td><td>{p.ratio:.3g}</td><td>{p.difference:.3g}</td></tr>"
        for p in wrong[:MOST_ROWS]
    ]
    head = "".join(f"<th>{head}</th>" for head in heads)
    shown = f", the first {MOST_ROWS}" if len(wrong) > MOST_ROWS else ""
    yield f"<h2>{len(wrong)} positions are not explained{shown}</h2>"
    yield f'<div class="wide"><table>\n<tr>{head}</tr>\n{chr(10).join(rows)}\n</table></div>'
