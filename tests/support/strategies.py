"""Strategies that the tests draw from, and assertions that judge results."""

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
    """Arrays on demand; Hypothesis prints and shrinks only the few numbers that make them."""

    seed: int
    exponent: int = 0  # typical magnitude is 2**exponent
    mean: int = 0  # in typical magnitudes: around 0 sums cancel, at 4 nearly all has one sign and they never do
    outliers: bool = False  # a few features 64 times larger, as activations have (arXiv:2208.07339)
    blank: bool = False  # the first row all zeros
    peak: bool = False  # one element 2^15 times larger (activations: arXiv:2402.17762)

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)

    def __call__(self, *shape: int, dtype: DTypeLike = np.float32) -> np.ndarray:
        """The next array, of at least one axis.

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


EXAMPLES = 20  # that are drawn of a property, but in `make test`


def share_of(examples: int, *, part: int = 4, thorough: int | None = None) -> int:
    """Count the examples to draw: `examples`, and one in `part` of them in `make test`.

    With the profile thorough they are as many as `thorough` says, if it does. A number in `@settings` would otherwise
    stand above the profile of the run.
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

DENORMAL = -124  # an exponent at which a fifth of the numbers are smaller than any normal one of float32


def at_extremes[Test: Callable[..., None]](**arguments: Any) -> Callable[[Test], Test]:
    """Examples of a test of `noise`: denormals, and one outlier. `others` are the test's other arguments."""

    def decorated(test: Test) -> Test:
        for extreme in (Noise(seed=0, exponent=DENORMAL), Noise(seed=1, peak=True)):
            test = example(noise=extreme, **arguments)(test)
        return test

    return decorated


def sizes(block: int, most: int | None = None) -> st.SearchStrategy[int]:
    """Lengths at which a loop over blocks can go wrong: 1, 2, and around one and two blocks, but at most `most`.

    >>> sizes(4, most=7)
    sampled_from([1, 2, 3, 4, 5, 7])
    """
    edges = {1, 2, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 1}
    return st.sampled_from(sorted(n for n in edges if 0 < n <= (most or 2 * block + 1)))


def roundoff(dtype: DTypeLike) -> float:
    """The relative error of one correct rounding.

    >>> [roundoff(dtype) for dtype in ("float64", "float32", "bfloat16")] == [2**-53, 2**-24, 2**-8]
    True
    """
    return float(ml_dtypes.finfo(dtype).eps) / 2


U = roundoff(np.float64)  # the reference's own arithmetic


def assert_within(actual, exact, bound):
    """Every element of `actual` is within `bound` of the value `exact`, and the shapes are the same."""
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
    """How far attention computed in `dtype`, with dot products accumulated in `sums`, may be from its exact value.

    A score is a dot product of head_dim terms times a scale, to which a mask is added, and is at most `top` =
    |q| |k| scale + |mask| (Cauchy-Schwarz). Its error is (head_dim u_sums + 8 u) top, its distance from the row's
    maximum at most 2 top, rounded too. A probability is off relatively by twice the error of its exponent, once as
    numerator and once in the sum over all keys, which takes keys u; then the sum over values takes keys u_sums. However
    far off the probabilities are, two averages of the values are at most 2 max |v| apart.
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
