"""Hypothesis strategies that many tests draw from, and assertions about numerical errors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import example, settings
from hypothesis import strategies as st
from numpy.typing import DTypeLike

dtypes = st.sampled_from([np.dtype("float32"), np.dtype("bfloat16")])


@dataclass
class Noise:
    """A recipe for noise arrays. Hypothesis prints and shrinks only these few fields, not the arrays."""

    seed: int
    exponent: int = 0  # the typical magnitude is 2**exponent
    mean: int = 0  # in typical magnitudes: with 0, sums cancel; with 4, nearly all numbers have one sign
    outliers: bool = False  # a few features 64 times larger, as activations have (arXiv:2208.07339)
    blank: bool = False  # the first row all zeros
    peak: bool = False  # one element 2^15 times larger (activations: arXiv:2402.17762)

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)

    def __call__(self, *shape: int, dtype: DTypeLike = np.float32) -> np.ndarray:
        """Draw the next array of this shape, which has at least one axis.

        >>> Noise(seed=0, blank=True)(2, 3)[0]
        array([0., 0., 0.], dtype=float32)
        """
        a = (self.rng.normal(size=shape) + self.mean) * 2.0**self.exponent
        if self.outliers:
            a[..., self.rng.random(shape[-1]) < 1 / 32] *= 64
        if self.blank:
            a[:1] = 0
        if self.peak:
            a.flat[self.rng.integers(a.size)] *= 2.0**15
        return a.astype(dtype)


EXAMPLES = 20  # examples of a property by default; `make test` draws fewer


def share_of(examples: int, *, part: int = 4, thorough: int | None = None) -> int:
    """Return the number of examples for a test: `examples`, or `examples` / `part` in `make test`.

    With the profile thorough, it is `thorough`, if that is given. A plain number in `@settings` would override the
    profile.
    """
    if thorough is not None and settings().max_examples > EXAMPLES:
        return thorough
    return max(1, examples // part) if settings().max_examples < EXAMPLES else examples


seeds = st.integers(0, 2**32 - 1)
noises = st.builds(
    Noise,
    seed=seeds,
    exponent=st.integers(-12, 12),
    mean=st.sampled_from([0, 4, -4]),
    outliers=st.booleans(),
    blank=st.booleans(),
)

DENORMAL = -124  # with this exponent, a fifth of the numbers are subnormal in float32


def at_extremes[Test: Callable[..., None]](**arguments: Any) -> Callable[[Test], Test]:
    """Add two examples to a test of `noise`: denormals, and one outlier. `arguments` are the test's other arguments."""

    def decorated(test: Test) -> Test:
        for extreme in (Noise(seed=0, exponent=DENORMAL), Noise(seed=1, peak=True)):
            test = example(noise=extreme, **arguments)(test)
        return test

    return decorated


def sizes(block: int, most: int | None = None) -> st.SearchStrategy[int]:
    """Draw lengths at which a loop over blocks can go wrong: 1, 2, and lengths near one and two blocks, up to `most`.

    >>> sizes(4, most=7)
    sampled_from([1, 2, 3, 4, 5, 7])
    """
    edges = {1, 2, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1}
    return st.sampled_from(sorted(n for n in edges if 0 < n <= (most or 2 * block + 1)))


def roundoff(dtype: DTypeLike) -> float:
    """Return the largest relative error of one correct rounding to `dtype`.

    >>> [roundoff(dtype) for dtype in ("float64", "float32", "bfloat16")] == [2**-53, 2**-24, 2**-8]
    True
    """
    return float(ml_dtypes.finfo(dtype).eps) / 2


U = roundoff(np.float64)  # for the arithmetic of the reference


def assert_within(actual, exact, bound):
    """Check that `actual` has the shape of `exact`, and that each element is within `bound` of the exact one."""
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    assert actual.shape == exact.shape
    if not actual.size:
        return
    excess = np.abs(actual - exact) - bound
    worst = tuple(int(i) for i in np.unravel_index(excess.argmax(), excess.shape))  # a NaN, if there is one
    assert excess[worst] <= 0, f"at {worst}: expected {exact[worst]}, got {actual[worst]}, {excess[worst]} too far"


def attention_bound(
    q, k, v, mask, *, scale: float | None = None, dtype: DTypeLike = "float64", sums: DTypeLike = "float64"
) -> float:
    """Bound the error of attention that computes in `dtype` and accumulates dot products in `sums`.

    A score is a dot product of head_dim terms, times a scale, plus a mask. Its size is at most `top` = |q| |k| scale +
    |mask| (Cauchy-Schwarz), and its error is at most (head_dim u_sums + 8 u) top. The exponent is the score minus the
    row's maximum. Its size is at most 2 top, and it is rounded, too. A probability's relative error is twice the
    exponent's error (once in the numerator, once in the sum over all keys), plus keys u for that sum. The weighted sum
    of the values adds keys u_sums. For any probabilities, two averages of the values differ by at most 2 max |v|.
    """
    head_dim, keys = q.shape[-1], k.shape[-3]
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    scale = 1 / np.sqrt(head_dim) if scale is None else scale
    longest = [np.sqrt(np.max(np.sum(a**2, axis=-1))) for a in (q, k)]
    top = longest[0] * longest[1] * scale + np.max(np.abs(mask), initial=0, where=np.isfinite(mask))
    u, u_sums = roundoff(dtype), roundoff(sums)
    exponent = (head_dim * u_sums + 8 * u) * top + 2 * top * u
    off = np.expm1(min(2 * exponent, np.log(3)))
    return float((off + keys * (u + u_sums) + 8 * u) * np.max(np.abs(v)))
