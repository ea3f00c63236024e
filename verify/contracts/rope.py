"""RoPE: a rotation of pairs. Its angle has the rounding error of position times frequency."""

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from jaxtyping import Int32

from llamaspec.reference.rope import LinearScaling, Llama3Scaling, Scaling, rope_halves, rope_interleaved
from llamaspec.reference.rope import frequencies as exact_frequencies
from llamaspec.verify.bounds.precision import TINY, Precision
from llamaspec.verify.bounds.running_error import flushed, gamma, turn_error
from llamaspec.verify.contract import (
    Arguments,
    Claim,
    Contract,
    Expected,
    Large,
    Law,
    Trial,
    as_float64,
    beyond,
    independent,
)
from llamaspec.verify.draws import reach
from llamaspec.verify.draws.draw import Values, sizes, values

# With scaled frequencies, we notice an implementation that ignores the argument and computes its own.
SCALING: dict[str, Scaling | None] = {
    "none": None,
    "linear": LinearScaling(factor=4.0),
    "llama3": Llama3Scaling(factor=8.0, low_frequency=1.0, high_frequency=4.0, original_context=256),
}
THETA = st.sampled_from([10_000.0, 500_000.0, 2.0])
PACKED = {"packed by 2": 2, "packed by 5": 5}  # values of the draw `start`, with the tokens per text


def positions(start: int | str, batch: int, seq: int) -> Int32[np.ndarray, "batch seq"]:
    """Make the positions of each row: consecutive from a number on, or counted anew in each of several packed texts.

    A number `start` is the first position of row 0; each row starts 5 positions after the row before it. "packed by n"
    means that each text in row 0 has n tokens, and positions count from 0 in each text. In each row, texts are one
    token longer than in the row before it.

    >>> positions(7, 1, 3).tolist(), positions("packed by 2", 2, 5).tolist()
    ([[7, 8, 9]], [[0, 1, 0, 1, 0], [0, 1, 2, 0, 1]])
    """
    row, token = np.arange(batch)[:, None], np.arange(seq)
    counted = token % (PACKED[start] + row) if isinstance(start, str) else start + 5 * row + token
    return counted.astype(np.int32)


def arguments(
    *,
    precision: Precision,
    batch: int,
    seq: int,
    heads: int,
    pairs: int,
    start: int | str,
    theta: float,
    scaling: str,
    x: Values,
) -> Arguments:
    return {
        "x": x.array("x", batch, seq, heads, 2 * pairs, precision=precision),
        "positions": positions(start, batch, seq),
        "frequencies": exact_frequencies(2 * pairs, theta=theta, scaling=SCALING[scaling]).astype(np.float32),
    }


def _expect(rope: Callable[..., np.ndarray]) -> Callable[..., Expected]:
    """Make `expect` of a contract for `rope`, which pairs features either by halves or as neighbors."""

    def expect(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> Expected:
        turns = as_float64(frequencies)
        value = rope(x, positions, turns)
        size = np.abs(as_float64(x))
        quarter = np.full_like(turns, np.pi / 2)
        partner = np.abs(rope(x, np.ones_like(positions), quarter))
        angles = positions[..., None, None] * turns  # [batch, seq, 1, pairs]
        halves = rope is rope_halves
        angle, cos, sin = (
            np.concatenate([a, a], axis=-1) if halves else np.repeat(a, 2, axis=-1)
            for a in (angles, np.abs(np.cos(angles)), np.abs(np.sin(angles)))
        )
        off, terms = turn_error(angle) * (size + partner), size * cos + partner * sin
        hard = off + gamma(3) * (terms + off) + flushed(size + partner, 1.0)
        return Expected(value, hard, hard, terms)

    return expect


def _still(trial: Trial) -> Claim:
    x = trial.arguments["x"]
    return Claim(trial.again(positions=np.zeros_like(trial.arguments["positions"]))[0], x, TINY)


def _length(trial: Trial) -> Claim:
    """Check that the sum of squares of each head is the same before and after RoPE."""
    x, y = (as_float64(a) for a in (trial.arguments["x"], trial.outputs[0]))
    tolerance = np.sum((2 * np.abs(y) + trial.bounds[0]) * trial.bounds[0], axis=-1)
    return Claim(np.sum(y**2, axis=-1), np.sum(x**2, axis=-1), tolerance + 1e-12 * np.sum(x**2, axis=-1))


def _contract(rope: Callable[..., np.ndarray], pairs: str) -> Contract:
    return Contract(
        definition=rope,
        shapes={
            "batch": st.sampled_from([1, 2, 3]),
            "seq": st.sampled_from([1, 2, 3, 5, 8, 9]),
            "heads": st.sampled_from([1, 2, 3, 7]),
            "pairs": sizes(8, 16, 32, most=64),
        },
        values={
            "start": st.sampled_from([0, 1, 2, 63, 250, 255, 1000, 2047, 4095, 100_000, *PACKED]),
            "theta": THETA,
            "scaling": st.sampled_from(list(SCALING)),
            "x": values(-8, 8),
        },
        arguments=arguments,
        expect=_expect(rope),
        domain=f"x [batch seq heads head_dim] of {pairs}, positions [batch seq] int32 from 0 to 100,019, which may "
        "start again at 0 within a row (packed texts), frequencies [head_dim/2] float32",
        bound="hard and alarm: (2 u angle + 4 u) (|a| + |b|) for cos and sin, gamma_3 (|a cos| + |b sin|) for the rest",
        laws=[
            independent("a sequence", "x", "positions"),
            Law("position 0 changes nothing", _still, sets=("start",)),
            Law("a rotation keeps lengths", _length),
        ],
        large=Large(
            {
                "batch": beyond(8, 64, 8192),
                "seq": beyond(16, 128, 1024, 8192),
                "heads": beyond(8, 32, 8192),
                "pairs": (65, 96, 257),
                "start": (131_072, 500_000, 1_048_576),
            },
            beside={"batch": [2], "seq": [3], "heads": [2], "pairs": [8]},
            closer={
                "batch": {"seq": [1]},
                "seq": {"batch": [1]},
                "heads": {"batch": [1]},
            },
            ends={"pairs": reach.WIDTH},
        ),
    )


HALVES = _contract(rope_halves, "pairs (i, i + head_dim/2)")
INTERLEAVED = _contract(rope_interleaved, "pairs (2i, 2i + 1)")
