"""A product with a low-rank adapter (LoRA), and its backward pass.

An implementation may apply the adapter, W x + s B (A x), or merge it, (W + s B A) x, and may put the factor s anywhere.
So the bound grows with |W| |x| + |s| |B| |A| |x|, the sum of the magnitudes of all terms. |B| |A x| would be too small:
terms of A x may cancel, but in the product with a merged matrix these terms do not meet.
"""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.lora import lora, lora_backward, lora_merged
from llamaspec.verify.bounds.precision import TINY, Precision, precision
from llamaspec.verify.bounds.running_error import gamma
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
from llamaspec.verify.draws.draw import Values, sizes, values


def arguments(
    *,
    precision: Precision,
    batch: int,
    rows: int,
    cols: int,
    rank: int,
    x: Values,
    weight: Values,
    a: Values,
    b: Values,
    scale: float,
) -> Arguments:
    return {
        "x": x.array("x", batch, cols, precision=precision),
        "weight": weight.array("weight", rows, cols, precision=precision),
        "a": a.array("a", rank, cols, precision=precision),
        "b": b.array("b", rows, rank, precision=precision),
        "scale": scale,
    }


def backward_arguments(*, precision: Precision, batch: int, rows: int, dy: Values, **draws) -> Arguments:
    forward = arguments(precision=precision, batch=batch, rows=rows, **draws)
    scale = forward.pop("scale")
    return {**forward, "dy": dy.array("dy", batch, rows, precision=precision), "scale": scale}


def _expected(value: np.ndarray, size: np.ndarray, *, terms: int, factors: list[np.ndarray]) -> Expected:
    """Bound the error of a sum of products after `terms` roundings. The magnitudes of the products sum to `size`.

    Hardware may flush a product of some of `factors` to zero before it is multiplied by the others.
    """
    largest = np.prod([1 + np.max(np.abs(factor), initial=0) for factor in factors])
    error = gamma(terms) * size + 4 * TINY * terms * largest
    return Expected(value, error, error, size)


def expect(x: np.ndarray, weight: np.ndarray, a: np.ndarray, b: np.ndarray, *, scale: float) -> Expected:
    matrices = [as_float64(m) for m in (x, weight, a, b)]
    terms = x.shape[-1] + len(a) + 3
    size = lora(*map(np.abs, matrices), scale=abs(scale))
    return _expected(lora(*matrices, scale=scale), size, terms=terms, factors=[*matrices, np.asarray(scale)])


def expect_backward(
    x: np.ndarray, weight: np.ndarray, a: np.ndarray, b: np.ndarray, dy: np.ndarray, *, scale: float
) -> tuple[Expected, ...]:
    matrices = [as_float64(m) for m in (x, weight, a, b, dy)]
    (batch, cols), (rows, rank) = x.shape, b.shape
    all_terms = rows + rank + 3, batch + rows + 2, batch + cols + 2  # of dx, dA and dB
    slopes = lora_backward(*matrices, scale=scale)
    sizes_of_slopes = lora_backward(*map(np.abs, matrices), scale=abs(scale))
    return tuple(
        _expected(slope, size, terms=terms, factors=[*matrices, np.asarray(scale)])
        for slope, size, terms in zip(slopes, sizes_of_slopes, all_terms, strict=True)
    )


def _merged(trial: Trial) -> Claim | None:
    """Check that the product with the merged matrix, without an adapter, is the same within the bounds.

    In float16, the merged matrix may overflow.
    """
    x, weight, a, b, scale = (trial.arguments[name] for name in ("x", "weight", "a", "b", "scale"))
    exact = lora_merged(weight, a, b, scale=scale)
    kind = precision(weight.dtype.name)
    with np.errstate(over="ignore"):
        merged = exact.astype(weight.dtype)
    if not np.isfinite(as_float64(merged)).all():
        return None
    moved = kind.unit * np.abs(exact) + kind.smallest
    bound = 2 * trial.bounds[0] + as_float64(np.abs(x)) @ moved.T * (1 + gamma(x.shape[-1]))
    outputs = trial.again(weight=merged, b=np.zeros_like(b))[0]
    return Claim(outputs, trial.outputs[0], bound + kind.unit * np.abs(as_float64(outputs)))


def _untrained(trial: Trial) -> Claim:
    """Check that A has no effect if B is 0, as at the start of training."""
    a, nothing = trial.arguments["a"], np.zeros_like(trial.arguments["b"])
    return Claim(trial.again(b=nothing)[0], trial.again(b=nothing, a=np.zeros_like(a))[0], 0.0)


def _first_step(trial: Trial) -> Claim:
    """Check that the gradient of A is 0 if B is 0."""
    return Claim(trial.again(b=np.zeros_like(trial.arguments["b"]))[1], 0 * trial.bounds[1], 0.0)


SHAPES = {
    "batch": st.sampled_from([1, 2, 3, 7, 9]),
    "rows": sizes(4, 8, 16, 32, most=65),
    "cols": sizes(8, 32, 64, most=129),
    "rank": st.sampled_from([1, 2, 3, 4, 8, 16]),
}
VALUES = {
    **{name: values(-6, 6) for name in ("x", "weight", "a", "b")},
    "scale": st.sampled_from([2.0, 0.5, 1.0, 0.75, 2.0**0.5]),
}
LARGE = Large(
    {"batch": beyond(128, 1024, 8192), "rows": beyond(1024, 8192), "cols": beyond(1024, 8192), "rank": beyond(64, 256)},
    beside={"batch": [2], "rows": [3], "cols": [5], "rank": [2]},
    ends={"rank": "published adapters have ranks of at most 2,048"},
)

LORA = Contract(
    definition=lora,
    shapes=SHAPES,
    values=VALUES,
    arguments=arguments,
    expect=expect,
    domain="x [batch cols], weight [rows cols], a [rank cols] and b [rows rank] of one dtype, A x kept in float32",
    bound="hard and alarm: gamma_(cols + rank + 3) of |W| |x| + |s| |B| |A| |x|, for an applied or merged adapter",
    laws=[
        independent("a vector", "x"),
        Law("the merged matrix W + s B A gives the same product", _merged),
        Law("A has no effect if B is 0, bit for bit", _untrained),
    ],
    large=LARGE,
)
BACKWARD = Contract(
    definition=lora_backward,
    shapes=SHAPES,
    values={**VALUES, "dy": values(-6, 6)},
    arguments=backward_arguments,
    expect=expect_backward,
    domain="x [batch cols], weight [rows cols], a [rank cols], b [rows rank] and dy [batch rows] of one dtype, sums in "
    "float32",
    bound="hard and alarm: gamma_n of the sum of magnitudes; n is rows + rank + 3 for dx, batch + rows + 2 for dA, "
    "batch + cols + 2 for dB",
    laws=[Law("the gradient of A is 0 if B is 0, bit for bit", _first_step)],
    large=LARGE,
)
