"""Draws charts as SVG, without a plotting library, which would need a dozen packages."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, isfinite, log10

COLORS = ("#4053d3", "#b51d14", "#00b25d", "#ddb310", "#00beff", "#fb49b0")  # distinct for color-blind readers
WIDTH, LABELS, NUMBER, ROW, TOP, BOTTOM = 900, 330, 44, 20, 64, 28  # pixels
HEIGHT = 480  # of charts that have axes
AXES_TOP = 84  # of charts that have axes: the label of the vertical axis stands below the legend
LETTER = 8  # pixels, in the largest font that a page gives to a chart
FINE, DECADES = 5, 12  # axes of fewer decades than FINE have ticks at 1, 2 and 5; longer ones at up to DECADES powers
BEYOND = 1.1  # bars longer than this share of a full bar are cut
Series = Mapping[str, float]  # by the label of a bar
Point = tuple[float, float]


def bars(
    title: str, remark: str, rows: Mapping[str, Series], *, full: float = 1.0, names: Sequence[str] | None = None
) -> str:
    """Draw a bar for each row and series. Its length and its label show the value in percent of `full`.

    `names` gives the order of the series, which decides their colors; by default, series keep the order of the rows. A
    bar much longer than `full` is cut, and its label is in the bar.
    """
    if names is None:
        names = list(dict.fromkeys(name for series in rows.values() for name in series))
    height = TOP + BOTTOM + ROW * sum(len(series) for series in rows.values())
    span = (WIDTH - LABELS - NUMBER) / BEYOND
    body = _legend(names, LABELS)
    for tenth in range(0, 11, 2):
        x = LABELS + span * tenth / 10
        body.append(_line(x, TOP - 4, x, height - BOTTOM, "#ddd"))
        body.append(_text(x, height - 10, f"{10 * tenth} %", anchor="middle"))
    y = TOP
    for row, series in rows.items():
        body.append(_text(LABELS - 8, y + 14, row, anchor="end"))
        for name, value in series.items():
            length = span * min(value / full, BEYOND)
            color = COLORS[names.index(name) % len(COLORS)]
            body.append(f'<rect x="{LABELS}" y="{y + 3}" width="{length:.1f}" height="{ROW - 6}" fill="{color}"/>')
            if value / full < BEYOND:
                body.append(_text(LABELS + length + 4, y + 14, f"{100 * value / full:.0f} %"))
            else:
                label = f"{100 * value / full:,.0f} %" if isfinite(value) else "\N{INFINITY} %"
                body.append(_text(LABELS + length - 4, y + 14, label, anchor="end", fill="white"))
            y += ROW
    return _page(title, remark, height, body)


def lines(title: str, remark: str, rows: Mapping[str, Sequence[Point]], *, x: str, y: str) -> str:
    """Draw a line through the points of each row, on logarithmic axes. Numbers must be above 0."""
    place, body = _axes([point for row in rows.values() for point in row], list(rows), x=x, y=y)
    for i, row in enumerate(rows.values()):
        color = COLORS[i % len(COLORS)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in map(place, row))
        body.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        body += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>' for a, b in map(place, row)]
    return _page(title, remark, HEIGHT, body)


def scatter(
    title: str, remark: str, rows: Mapping[str, Sequence[Point]], *, x: str, y: str, level: float | None = None
) -> str:
    """Draw a dot for each point on logarithmic axes. If `level` is given, draw a horizontal line at y = `level`.

    There must be at least one point, and all numbers must be above 0.
    """
    points = [point for row in rows.values() for point in row]
    place, body = _axes([*points, *([(points[0][0], level)] if level else [])], list(rows), x=x, y=y)
    if level:
        first, right = (place((end(point[0] for point in points), level)) for end in (min, max))
        body.append(_line(*first, *right, "#222"))
    for i, row in enumerate(rows.values()):
        color = COLORS[i % len(COLORS)]
        dots = dict.fromkeys((f"{a:.1f}", f"{b:.1f}") for a, b in map(place, row))  # each once
        body += [f'<circle cx="{a}" cy="{b}" r="2.5" fill="{color}" fill-opacity="0.5"/>' for a, b in dots]
    return _page(title, remark, HEIGHT, body)


def _axes(points: Sequence[Point], names: Sequence[str], *, x: str, y: str) -> tuple[Callable[[Point], Point], list]:
    """Return a function that converts a point to pixels, and the SVG elements of a frame with logarithmic axes."""
    start, right, foot = 70, WIDTH - 30, HEIGHT - 50
    (x_low, x_high), (y_low, y_high) = (_decades([point[i] for point in points]) for i in (0, 1))

    def place(point: Point) -> Point:
        across = (log10(point[0]) - x_low) / (x_high - x_low)
        up = (log10(point[1]) - y_low) / (y_high - y_low)
        return start + (right - start) * across, foot - (foot - AXES_TOP) * up

    body = _legend(names, start)
    for value in _ticks(x_low, x_high):
        at, _ = place((value, 10**y_low))
        body += [_line(at, AXES_TOP, at, foot, "#ddd"), _text(at, foot + 16, f"{value:g}", anchor="middle")]
    for value in _ticks(y_low, y_high):
        _, at = place((10**x_low, value))
        body += [_line(start, at, right, at, "#ddd"), _text(start - 6, at + 4, f"{value:g}", anchor="end")]
    body += [_text((start + right) / 2, HEIGHT - 10, x, anchor="middle"), _text(8, AXES_TOP - 10, y)]
    return place, body


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis: a little below the smallest number and above the largest."""
    low, high = log10(min(values)), log10(max(values))
    return low - 0.05, max(high, low + 0.3) + 0.05


def _ticks(low: float, high: float) -> list[float]:
    """List the ticks of an axis from 10^`low` to 10^`high`.

    A short axis has ticks at 1, 2 and 5 times each power of ten, a longer one at powers of ten, a very long one only at
    some of them.

    >>> _ticks(0.2, 1.1), _ticks(-0.1, 5.5), _ticks(-0.1, 16.0)[:3]
    ([2.0, 5.0, 10.0], [1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0], [1.0, 100.0, 10000.0])
    """
    every = ceil((high - low) / DECADES)
    digits = (1, 2, 5) if high - low < FINE else (1,)
    steps = [float(f"{m}e{e}") for e in range(int(low) - 2, int(high) + 2) for m in digits if e % every == 0]
    return [value for value in steps if low <= log10(value) <= high]


def _legend(names: Sequence[str], x: float) -> list[str]:
    marks = []
    for i, name in enumerate(names):
        marks.append(f'<rect x="{x}" y="40" width="10" height="10" fill="{COLORS[i % len(COLORS)]}"/>')
        marks.append(_text(x + 14, 49, name))
        x += 30 + LETTER * len(name)
    return marks


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, fill: str = "black") -> str:
    color = "" if fill == "black" else f' fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{color}>{escape(text)}</text>'


def _page(title: str, remark: str, height: float, body: Sequence[str]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(8, 18, title, size=14),
        _text(8, 34, remark),
        *body,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
