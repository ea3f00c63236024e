"""Places the boxes of a block in rows, each below the boxes that it reads.

The residual stream is a line on the left. Sums that continue it are on this line, and all other boxes are to the right
of it, below the middle of their inputs where there is room.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from llamaspec.learn.model_graph.boxes import Box

ACROSS, DOWN = 206, 88  # pixels from box to box


class Place(NamedTuple):
    """The center of a box, in pixels from the start of the residual stream."""

    x: float
    y: float


class Layout(NamedTuple):
    """The places of the boxes of a block, and of the bends of lines between them."""

    stream: Sequence[str]  # the block's input, and the sums that continue the residual stream
    places: Mapping[str, Place]
    routes: Mapping[tuple[str, str], list[Place]]  # from each box to each box that reads it, with the bends between
    caches: Mapping[str, Place]  # the KV cache next to attention

    @property
    def right(self) -> float:
        """The center of the box that is farthest to the right."""
        return max(place.x for place in (*self.places.values(), *self.caches.values()))

    @property
    def foot(self) -> float:
        """The center of the lowest box."""
        return max(place.y for place in self.places.values())


def layout(block: Sequence[Box], residual: str) -> Layout:
    """Place the boxes of `block`, which reads the result `residual`.

    A line that passes a row gets a place in this row, as if it were a box, so that no box is on top of it.
    """
    rows: dict[str, int] = {residual: 0}
    for box in block:
        rows[box.name] = 1 + max(rows[name] for name in box.inputs if name in rows)
    stream = _stream(block, residual)
    lines = [(name, box.name) for box in block for name in box.inputs if name in rows]
    bends = {
        (source, target): [f"{source}:{row}" for row in range(rows[source] + 1, rows[target])]
        for source, target in lines
        if source not in stream
    }
    above = {
        box.name: [(bends.get((name, box.name)) or [name])[-1] for name in box.inputs if name in rows] for box in block
    }
    by_row: dict[int, list[str]] = {}
    for box in block:
        by_row.setdefault(rows[box.name], []).append(box.name)
    for (source, _), names in bends.items():
        for row, (upper, name) in enumerate(pairwise([source, *names]), rows[source] + 1):
            above[name] = [upper]
            if name not in by_row.setdefault(row, []):
                by_row[row].append(name)
    attention = {box.name for box in block if "Attention" in box.operators}

    middle = ACROSS * (0.4 + max(3, *(len(names) for names in by_row.values())) / 2)
    places, caches = {residual: Place(0, 0)}, {}
    for row, names in sorted(by_row.items()):
        ideal: dict[str, float] = {}
        for name in names:
            if name in stream:
                places[name] = Place(0, DOWN * row)
                continue
            xs = [middle if source in stream else places[source].x for source in above[name]]
            ideal[name] = sum(xs) / len(xs)
            if name in attention:
                ideal[f"{name}:cache"] = ideal[name] + ACROSS
        for name, x in _spread(ideal).items():
            place = Place(x, DOWN * row)
            if name.endswith(":cache"):
                caches[name.removesuffix(":cache")] = place
            else:
                places[name] = place
    routes = {
        (source, target): [places[name] for name in (source, *bends.get((source, target), ()), target)]
        for source, target in lines
    }
    return Layout(stream, places, routes, caches)


def _stream(block: Sequence[Box], residual: str) -> list[str]:
    names = [residual]
    for box in block:
        if box.operators == ("Add",) and names[-1] in box.inputs:
            names.append(box.name)
    return names


def _spread(ideal: Mapping[str, float]) -> dict[str, float]:
    """Move the boxes of a row apart, as little as needed. Boxes that want the same place stand around it.

    >>> _spread({"a": 0.0, "b": 0.0, "c": 500.0})
    {'a': -103.0, 'b': 103.0, 'c': 500.0}
    """
    groups: list[tuple[float, list[str]]] = []  # the middle of boxes that touch each other, and their names
    for name, x in sorted(ideal.items(), key=lambda item: item[1]):
        groups.append((x, [name]))
        while (
            len(groups) > 1 and groups[-1][0] - groups[-2][0] < ACROSS * (len(groups[-1][1]) + len(groups[-2][1])) / 2
        ):
            (_, left), (_, right) = groups[-2:]
            names = left + right
            groups[-2:] = [(sum(ideal[name] for name in names) / len(names), names)]
    return {name: x + ACROSS * (i - (len(names) - 1) / 2) for x, names in groups for i, name in enumerate(names)}
