"""Writes a trace as text for a terminal, and as JSON."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from llamaspec.learn.trace import Guess, Output, Trace, Visit, by_layer

BLOCKS = " ▁▂▃▄▅▆▇█"  # blocks whose heights differ by an eighth
KEYS = 48  # number of newest keys that are drawn as blocks, per head
WIDTH = 80  # columns of a line
NAMED = 3  # number of keys that are named, per head


def lines(trace: Trace, *, text_of: Callable[[int], str]) -> Iterator[str]:
    """Yield the lines of a trace, op by op. `text_of` returns the text of an id."""
    yield from _legend(trace)
    for layer, visits in by_layer(trace.visits).items():
        yield ""
        yield "after the last block" if layer is None else f"layer {layer}"
        for visit in visits:
            yield from _visit(visit)
            if visit.op == "attend" and layer is not None:
                yield from _heads(trace.attention[layer], trace.tokens, text_of)
        guesses, start = (
            (trace.next, "  next: ") if layer is None else (trace.guesses[layer], "  if the model ended here: ")
        )
        yield start + _named(guesses, text_of, room=WIDTH - len(start))


def _legend(trace: Trace) -> Iterator[str]:
    yield "The functions of reference/ that define each op, in float64. Below, norm is the"
    yield "Euclidean norm of the op's input and output. Bytes and flop are for one token;"
    yield "times are for the whole text. exact is the definition's value and ours the"
    yield "actual value, at the element that uses the largest share of its bound. An ulp is"
    yield "the distance to the next number of the dtype."
    listed: set[str] = set()
    for op, layers in trace.definitions.items():
        yield f"  {op:13} {', then '.join(layer.name for layer in layers)}"
    yield ""
    for layer in (layer for layers in trace.definitions.values() for layer in layers):
        if layer.name in listed:
            continue
        listed.add(layer.name)
        yield f"  {layer.name:13} {layer.file}:{layer.line}"
        yield from (f"      {line}" for part in layer.formula for line in re.split(" {7,}", part))


def _visit(visit: Visit) -> Iterator[str]:
    results = ", ".join(f"{output.name} {_shape(output.shape)}".strip() for output in visit.outputs)
    work = f"{_amount(visit.bytes, 'B')}, {_amount(visit.flops, 'flop')}, {_time(visit.seconds)}"
    yield f"  {visit.op:13} {_shape(visit.shape)} -> {results}"
    yield f"    norm {visit.norm:.3g} -> {', '.join(f'{output.norm:.3g}' for output in visit.outputs)}; {work}"
    yield from (_output(output) for output in visit.outputs)


def _output(output: Output) -> str:
    values = f"exact {output.reference:<+12.8g} ours {output.running:<+12.8g}"
    distance = f"{output.ulps:.2g} ulp, {output.share:.1%} of bound"
    return f"    {output.name or ' ':1} {values} {distance}"


def _heads(weights: np.ndarray, tokens: list[int], text_of: Callable[[int], str]) -> Iterator[str]:
    for head, row in enumerate(weights):
        top = np.argsort(-row, kind="stable")[:NAMED]
        named = ", ".join(f"{_quoted(text_of(tokens[i]))} {row[i]:.0%}" for i in top)
        yield f"      head {head:<3} |{''.join(_block(p) for p in row[-KEYS:])}| {named}"


def _block(p: float) -> str:
    return BLOCKS[min(len(BLOCKS) - 1, round(p * (len(BLOCKS) - 1) + 0.49))]


def _named(guesses: list[Guess], text_of: Callable[[int], str], *, room: int) -> str:
    """Name as many of the likeliest tokens as fit into `room` characters, but at least one."""
    named = [f"{_quoted(text_of(guess.id))} {guess.probability:.1%}" for guess in guesses]
    fitting = [n for n in range(1, len(named) + 1) if len(", ".join(named[:n])) <= room]
    return ", ".join(named[: max(fitting, default=1)])


def _quoted(text: str) -> str:
    """Quote the text of a token, so that spaces and line breaks are visible and control characters have no effect.

    >>> _quoted(" time"), _quoted(chr(10)), _quoted(chr(27) + "[2J")
    ("' time'", "'\\\\n'", "'\\\\x1b[2J'")
    """
    return repr(text)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{' '.join(map(str, shape))}]"


def _amount(count: int | float, unit: str) -> str:
    """Format a count with a prefix for thousands and a unit.

    >>> _amount(131072, "B"), _amount(7, "flop")
    ('131 kB', '7 flop')
    """
    thousands = min(3, int(np.log10(max(count, 1)) // 3))
    return f"{count / 1000**thousands:.3g} {('', 'k', 'M', 'G')[thousands]}{unit}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def as_json(trace: Trace, *, text_of: Callable[[int], str]) -> dict[str, Any]:
    """Return the contents of a trace as values for JSON."""

    def named(guesses: list[Guess]) -> list[dict[str, Any]]:
        return [{"id": guess.id, "text": text_of(guess.id), "probability": guess.probability} for guess in guesses]

    return {
        "tokens": [{"id": id, "text": text_of(id)} for id in trace.tokens],
        "position": trace.position,
        "definitions": {op: [layer._asdict() for layer in layers] for op, layers in trace.definitions.items()},
        "visits": [
            {**visit._asdict(), "outputs": [output._asdict() for output in visit.outputs]} for visit in trace.visits
        ],
        "guesses": [{"layer": layer, "next": named(guesses)} for layer, guesses in trace.guesses.items()],
        "attention": [{"layer": layer, "weights": rows.tolist()} for layer, rows in trace.attention.items()],
        "next": named(trace.next),
    }
