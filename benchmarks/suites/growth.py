"""Computes the cost of more work: the slope of a series of times, and the slope that the machine's rates allow."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from llamaspec.benchmarks.common.report import Row
from llamaspec.model.insight.machine import Ceilings


class Series(NamedTuple):
    """A series of measurements that differ in one number."""

    grows: str  # the key of this number in a row
    step: str  # words for an increase by one, such as "another sequence"
    of: str  # words for the work that takes longer, such as "a step"
    share: Callable[[Row], float]  # the part of a row's time that counts


SERIES = {
    "context": Series("context", "a token more before it", "a step of decoding", lambda row: 1.0),
    "prefill": Series("tokens", "a token more in a prompt", "each of its tokens", lambda row: 1 / row["tokens"]),
    "batch": Series("batch", "a sequence more", "a step of decoding", lambda row: 1.0),
}


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Compute the slope of the least-squares line through the points.

    >>> slope([(0, 1.0), (1, 3.0), (2, 5.0)])
    2.0
    """
    x, y = np.array(points, float).T
    x = x - x.mean()
    return float(x @ y / (x @ x))


def slopes(rows: Sequence[Row], ceilings: Ceilings) -> list[Row]:
    """Compute how much time one more unit of work takes in each series, such as one more token in a prompt.

    `seconds` is measured. `reading` and `computing` are the times to read the unit's bytes and to do its operations at
    the machine's rates. A series with only one amount of work is left out.
    """
    slope_rows = []
    for name, series in SERIES.items():
        chosen = [row for row in rows if row.get("series") == name]
        if len({row[series.grows] for row in chosen}) < 2:
            continue

        def of(key: str, series: Series = series, chosen: list[Row] = chosen) -> float:
            return slope([(row[series.grows], row[key] * series.share(row)) for row in chosen])

        reading, computing = of("bytes") / ceilings.read, of("flops") / ceilings.flops[chosen[0]["dtype"]]
        slope_rows.append(
            {
                **{"series": name, "each": series.step, "of": series.of, "seconds": of("median")},
                **{"reading": reading, "computing": computing},
            }
        )
    return slope_rows


def sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe slopes in sentences.

    >>> row = {"each": "a sequence more", "of": "a step", "seconds": 3e-6, "reading": 1e-6, "computing": 2e-6}
    >>> print(*sentences([row]))
    a sequence more adds 3.000 us to a step; reading its bytes would take 1.000, computing it 2.000
    """
    return [
        f"{row['each']} adds {row['seconds'] * 1e6:,.3f} us to {row['of']}; reading its bytes would take "
        f"{max(0.0, row['reading']) * 1e6:,.3f}, computing it {row['computing'] * 1e6:,.3f}"
        for row in rows
    ]
