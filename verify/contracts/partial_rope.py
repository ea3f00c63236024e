"""RoPE of a head's first features, multiplied by a magnitude: partial RoPE (Phi-4-mini), YaRN and LongRoPE."""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.rope import frequencies as exact_frequencies
from llamaspec.reference.rope import partial_rope
from llamaspec.verify.bounds.precision import Precision
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
from llamaspec.verify.contracts.rope import PACKED, THETA
from llamaspec.verify.contracts.rope import positions as counted
from llamaspec.verify.draws import reach
from llamaspec.verify.draws.draw import Values, sizes, values


def arguments(
    *,
    precision: Precision,
    batch: int,
    seq: int,
    heads: int,
    pairs: int,
    kept: int,
    start: int | str,
    theta: float,
    magnitude: float,
    x: Values,
) -> Arguments:
    return {
        "x": x.array("x", batch, seq, heads, 2 * pairs + kept, precision=precision),
        "positions": counted(start, batch, seq),
        "frequencies": exact_frequencies(2 * pairs, theta=theta).astype(np.float32),
        "magnitude": magnitude,
    }


def expect(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, *, magnitude: float) -> Expected:
    """Bound the rotated features as `verify.contracts.rope` does. Other features must be copied exactly."""
    turns, pairs = as_float64(frequencies), len(frequencies)
    exact = as_float64(x)
    a, b = (np.abs(exact[..., part]) for part in (slice(pairs), slice(pairs, 2 * pairs)))
    angle = positions[..., None, None] * turns  # [batch, seq, 1, pairs]
    cos, sin = np.abs(np.cos(angle)), np.abs(np.sin(angle))
    off = turn_error(angle) * (a + b)
    sizes = [a * cos + b * sin, b * cos + a * sin]
    # Two products and a sum; the magnitude rounds to float32, and so does its product.
    hard = [off + gamma(5) * (size + off) + flushed(a + b, magnitude) for size in sizes]
    unturned = np.zeros(exact[..., 2 * pairs :].shape)
    bound = np.concatenate([magnitude * hard[0], magnitude * hard[1], unturned], axis=-1)
    size = np.concatenate([magnitude * sizes[0], magnitude * sizes[1], np.abs(exact[..., 2 * pairs :])], axis=-1)
    return Expected(partial_rope(x, positions, turns, magnitude=magnitude), bound, bound, size)


def _unrotated(trial: Trial) -> Claim:
    first = 2 * len(trial.arguments["frequencies"])
    return Claim(trial.outputs[0][..., first:], trial.arguments["x"][..., first:], 0.0)


def _twice(trial: Trial) -> Claim:
    """Double the magnitude: the result must double exactly, except for tiny results that hardware flushes to zero."""
    pairs = len(trial.arguments["frequencies"])
    again = trial.again(magnitude=2 * trial.arguments["magnitude"])[0]
    turned = slice(0, 2 * pairs)
    return Claim(again[..., turned], 2 * as_float64(trial.outputs[0][..., turned]), 4 * trial.bounds[0][..., turned])


CONTRACT = Contract(
    definition=partial_rope,
    shapes={
        "batch": st.sampled_from([1, 2, 3]),
        "seq": st.sampled_from([1, 2, 3, 5, 8, 9]),
        "heads": st.sampled_from([1, 2, 3, 7]),
        "pairs": sizes(8, 16, 32, most=48),
        "kept": st.sampled_from([0, 2, 6, 16, 32]),
    },
    values={
        "start": st.sampled_from([0, 1, 2, 63, 250, 1000, 4095, 100_000, *PACKED]),
        "theta": THETA,
        "magnitude": st.sampled_from([1.0, 1.1902380714238083, 1.3862943611198906]),
        "x": values(-8, 8),
    },
    arguments=arguments,
    expect=expect,
    domain="x [batch seq heads head_dim] with head_dim of 2 pairs or more, positions [batch seq] int32 from 0 to "
    "100,019, which may start again at 0 within a row (packed texts), frequencies [pairs] float32, magnitude about 1",
    bound="hard and alarm: magnitude ((2 u angle + 4 u) (|a| + |b|) + gamma_5 (|a cos| + |b sin|)); 0 for features "
    "that RoPE does not rotate",
    laws=[
        independent("a sequence", "x", "positions"),
        Law("features after the pairs do not change, bit for bit", _unrotated),
        Law("twice the magnitude gives twice the result", _twice, sets=("magnitude",)),
    ],
    large=Large(
        {
            "batch": beyond(8, 64, 8192),
            "seq": beyond(16, 128, 1024, 8192),
            "heads": beyond(8, 32, 8192),
            "pairs": (65, 96, 257),
            "kept": (130, 514),
            "start": (131_072, 1_048_576),
        },
        beside={"batch": [2], "seq": [3], "heads": [2], "pairs": [8], "kept": [6]},
        closer={"batch": {"seq": [1]}, "seq": {"batch": [1]}, "heads": {"batch": [1]}},
        ends={"pairs": reach.WIDTH, "kept": reach.WIDTH},
    ),
)
