r"""ggml's searches for the steps of a group of weights, bit for bit.

(https://github.com/ggml-org/llama.cpp, ggml/src/ggml-quants.c.) A search takes a group of weights w and finds codes q
and a step a (and a minimum b) so that a q (or a q - b) is close to w. c says how much the error of a weight counts:

    search       codes            minimizes               tries                                    name in ggml
    `signed`     -N ... N - 1     sum c (w - a q)^2       a = -w* / (N + k / 10), k = -9 ... 9     make_qx_quants
    `descended`  -N ... N - 1     sum w^2 (w - a q)^2     a = -w* / N, then single codes           make_q3_quants
    `shifted`    0 ... N          sum c (w - a q + b)^2   a = (max w + b) / (N + k) for each k     make_qkx2_quants
    `positive`   0 ... N          sum c (w - a q)^2       a = max w / (N + k / 10), k = -4 ... 4,  make_qp_quants
                                                          then single codes

w* is the weight of largest magnitude with its sign, the first one on ties. A try rounds w to codes q, then computes the
best a (and b) for these codes. The search returns the try with the smallest sum:

    a = sum c w q / sum c q^2                   the sum falls by (sum c w q)^2 / sum c q^2
    a = (C sum c q w - sum c w sum c q) / D     D = C sum c q^2 - (sum c q)^2,  C = sum c
    b = (sum c q sum c q w - sum c q^2 sum c w) / D,  but b = 0 and a = sum c q w / sum c q^2 if this b is negative

All numbers are float32, and sums add one term after the other. llama.cpp's library for x86-64 computes the same bits,
because its compiler does not fuse a multiplication with an addition there. On other processors, compilers may fuse
them. Groups are columns here: an array [members, groups] has the weights of a group in a column.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

TINY = np.float32(1e-15)  # a group below this magnitude counts as zero
MIDDLE = np.float32(1.5 * 2**23)  # float32 numbers near this are integers


class Fit(NamedTuple):
    """A step a and a minimum b for each group (0 if the search has none), and the codes q."""

    step: Float32[np.ndarray, " groups"]
    minimum: Float32[np.ndarray, " groups"]
    codes: Int32[np.ndarray, "members groups"]


def nearest(x: Float32[np.ndarray, "*shape"]) -> Int32[np.ndarray, "*shape"]:
    """Round to integers, ties to even, as ggml does: add 1.5 * 2^23 and take the last 23 bits.

    Beyond 2^22 the result is wrong in the same way as in ggml. Infinity gives -2^22, and NaN gives 0.

    >>> nearest(np.array([0.5, 1.5, -2.6, np.inf], np.float32))
    array([       0,        2,       -3, -4194304], dtype=int32)
    """
    return ((x + MIDDLE).view(np.int32) & np.int32(0x7FFFFF)) - np.int32(0x400000)


def total(terms: Float32[np.ndarray, "members groups"]) -> Float32[np.ndarray, " groups"]:
    """Add the rows of `terms`, one after the other.

    NumPy adds the rows of such an array in this order. For a single column, or an array with contiguous columns, NumPy
    uses a different order.

    >>> total(np.array([[2.0**24], [1.0], [1.0], [-(2.0**24)]], np.float32))
    array([0.], dtype=float32)
    """
    if terms.shape[1] == 1:
        return np.cumsum(terms, axis=0)[-1]
    return np.add.reduce(np.ascontiguousarray(terms), axis=0)


def signed(
    w: Float32[np.ndarray, "members groups"], importance: Float32[np.ndarray, "members groups"], *, most: int
) -> Fit:
    """Search steps for codes from -`most` to `most` - 1. A group of zeros gets the step 0 and the codes -`most`.

    >>> w = np.array([[-4.0, 0.0], [2.2, 0.0], [1.1, 0.0]], np.float32)
    >>> fit = signed(w, w * w, most=4)
    >>> fit.step.round(3), fit.codes.tolist()
    (array([1.007, 0.   ], dtype=float32), [[-4, -4], [2, -4], [1, -4]])
    """
    top = largest(w)
    zero = np.abs(top) < TINY
    top = np.where(zero, 1, top)
    along = importance * w

    def sums(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        q = codes(inverse).astype(np.float32)
        return total(along * q), total(importance * q * q)

    def codes(inverse: np.ndarray) -> np.ndarray:
        return nearest(inverse * w).clip(-most, most - 1)

    inverse = np.float32(-most) / top
    wq, qq = sums(inverse)
    step = quotient(wq, qq)
    best, reduction = inverse, step * wq
    for k in (*range(-9, 0), *range(1, 10)):
        inverse = -(np.float32(most) + np.float32(0.1) * np.float32(k)) / top
        wq, qq = sums(inverse)
        better = (qq > 0) & (wq * wq > reduction * qq)
        step = np.where(better, quotient(wq, qq), step)
        best, reduction = np.where(better, inverse, best), np.where(better, step * wq, reduction)
    return Fit(np.where(zero, 0, step), np.zeros_like(step), np.where(zero, -most, codes(best)))


def descended(w: Float32[np.ndarray, "members groups"], *, most: int) -> Fit:
    """Round to codes from -`most` to `most` - 1, then improve one code at a time.

    If w* is positive, sum c w q is negative, and `_improved` changes no code. A group of zeros gets the step 0 and the
    codes -`most`.

    >>> fit = descended(np.array([[-4.0, 4.0], [2.4, -2.4]], np.float32), most=4)
    >>> fit.step.round(3), fit.codes.tolist()
    (array([ 1.315, -1.017], dtype=float32), [[-3, -4], [2, 2]])
    """
    top = largest(w)
    zero = np.abs(top) < TINY
    inverse = np.float32(-most) / np.where(zero, 1, top)
    importance = w * w
    q = nearest(inverse * w).clip(-most, most - 1)
    step, q = _improved(w, importance, q, ends=(-most, most - 1))
    return Fit(np.where(zero, 0, step), np.zeros_like(step), np.where(zero, -most, q))


def shifted(
    w: Float32[np.ndarray, "members groups"],
    importance: Float32[np.ndarray, "members groups"],
    *,
    most: int,
    starts: Float32[np.ndarray, " tries"],
    absolute: bool = False,
) -> Fit:
    """Search steps and minima for codes from 0 to `most`. If `absolute`, |error| counts instead of its square.

    A group of equal weights that are not positive gets the step 0, the codes 0 and the minimum -w.

    >>> w = np.array([[-1.0, -2.0], [2.0, -2.0], [5.1, -2.0]], np.float32)
    >>> fit = shifted(w, np.ones_like(w), most=2, starts=np.zeros(1, np.float32))
    >>> fit.step.round(3), fit.minimum.round(3)
    (array([3.05, 0.  ], dtype=float32), array([1.017, 2.   ], dtype=float32))
    """
    low, high = np.minimum(np.min(w, axis=0), 0), np.max(w, axis=0)
    flat = high <= low
    sum_c, sum_w = total(importance), total(importance * w)

    def codes(inverse: np.ndarray, low: np.ndarray) -> np.ndarray:
        return nearest(inverse * (w - low)).clip(0, most)

    def error(q: np.ndarray, step: np.ndarray, low: np.ndarray) -> np.ndarray:
        differences = step * q + low - w
        return total(importance * (np.abs(differences) if absolute else differences * differences))

    with np.errstate(all="ignore"):  # `flat`, D = 0, and a fitted minimum as large as all weights of its group
        inverse = np.float32(most) / (high - low)
        step, best = 1 / inverse, (inverse, low)
        least = error(codes(*best).astype(np.float32), step, low)
        for start in starts:
            inverse = (start + np.float32(most)) / (high - low)
            q = codes(inverse, low).astype(np.float32)
            cq = importance * q
            sum_q, sum_qq, sum_qw = total(cq), total(cq * q), total(cq * w)
            d = sum_c * sum_qq - sum_q * sum_q
            new_step = (sum_c * sum_qw - sum_w * sum_q) / d
            new_low = (sum_qq * sum_w - sum_q * sum_qw) / d
            new_step = np.where(new_low > 0, sum_qw / sum_qq, new_step)
            new_low = np.where(new_low > 0, 0, new_low)
            loss = error(q, new_step, new_low)
            better = (d > 0) & (loss < least)
            best = np.where(better, inverse, best[0]), np.where(better, low, best[1])
            least, step, low = (
                np.where(better, loss, least),
                np.where(better, new_step, step),
                np.where(better, new_low, low),
            )
        return Fit(np.where(flat, 0, step), -low, np.where(flat, 0, codes(*best)))


def positive(
    w: Float32[np.ndarray, "members groups"], importance: Float32[np.ndarray, "members groups"], *, most: int
) -> Fit:
    """Search steps for codes from 0 to `most` and weights of at least 0, then improve one code at a time.

    >>> w = np.array([[4.0, 0.0], [2.2, 0.0], [1.1, 0.0]], np.float32)
    >>> fit = positive(w, np.ones_like(w), most=4)
    >>> fit.step.round(3), fit.codes.tolist()
    (array([1.024, 0.   ], dtype=float32), [[4, 0], [2, 0], [1, 0]])
    """
    top = np.maximum(np.max(w, axis=0), 0)
    zero = top < TINY
    top = np.where(zero, 1, top)

    def codes(inverse: np.ndarray) -> np.ndarray:
        return np.minimum(nearest(inverse * w), most)

    def error(inverse: np.ndarray) -> np.ndarray:
        differences = w - 1 / inverse * codes(inverse).astype(np.float32)
        return total(importance * differences * differences)

    best = np.float32(most) / top
    least = error(best)
    for k in (*range(-4, 0), *range(1, 5)):
        inverse = (np.float32(0.1) * np.float32(k) + np.float32(most)) / top
        loss = error(inverse)
        better = loss < least
        best, least = np.where(better, inverse, best), np.where(better, loss, least)
    step, q = _improved(w, importance, codes(best), ends=(0, most))
    return Fit(np.where(zero, 0, step), np.zeros_like(step), np.where(zero, 0, q))


def importances(
    w: Float32[np.ndarray, "*batch row"], of_columns: Float32[np.ndarray, "*#batch row"], *, count: int
) -> Float32[np.ndarray, "*batch row"]:
    """Return how much the squared error of each weight counts: importance sqrt(v + w^2).

    v is the sum of w^2 over the last axis, in order, divided by `count`.

    >>> importances(np.array([1.0, 2.0], np.float32), np.array([1.0, 0.5], np.float32), count=1).round(3)
    array([2.449, 1.5  ], dtype=float32)
    """
    squares = w * w
    v = np.cumsum(squares, axis=-1)[..., -1:] / np.float32(count)
    return of_columns * np.sqrt(v + squares)


def evenly(first: float, step: float, count: int) -> Float32[np.ndarray, " count"]:
    """Return `count` numbers from `first` on, at distances of `step`, rounded as the C code rounds them."""
    return np.float32(first) + np.float32(step) * np.arange(count, dtype=np.float32)


STARTS = evenly(-0.9, 0.05, 37)  # of `shifted` with importances


def largest(w: Float32[np.ndarray, "members groups"]) -> Float32[np.ndarray, " groups"]:
    """Return w*, the weight of largest magnitude of each group, with its sign; the first one on ties."""
    return np.take_along_axis(w, np.argmax(np.abs(w), axis=0)[None], axis=0)[0]


def quotient(a: Float32[np.ndarray, "*shape"], b: Float32[np.ndarray, "*shape"]) -> Float32[np.ndarray, "*shape"]:
    """Return a / b, and 0 if b is not positive."""
    return np.where(b > 0, a / np.where(b > 0, b, 1), 0)


def _improved(
    w: Float32[np.ndarray, "members groups"],
    importance: Float32[np.ndarray, "members groups"],
    q: Int32[np.ndarray, "members groups"],
    *,
    ends: tuple[int, int],
) -> tuple[Float32[np.ndarray, " groups"], Int32[np.ndarray, "members groups"]]:
    """Improve one code at a time, at most five times over the group; return the best step for the codes, and the codes.

    For the new code of a weight, we take the step that is best for all other codes, and round to the nearest code.
    """
    codes = q.astype(np.float32)
    along = importance * w
    wq, qq = total(along * codes), total(importance * codes * codes)
    for _ in range(5):
        before = codes.copy()
        for i in range(len(w)):
            base_wq, base_qq = wq - along[i] * codes[i], qq - importance[i] * codes[i] * codes[i]
            usable = base_wq > 0
            if ends[0] == 0:
                usable &= base_qq > 0
            code = nearest(w[i] * base_qq / np.where(usable, base_wq, 1)).clip(*ends).astype(np.float32)
            new_wq, new_qq = base_wq + along[i] * code, base_qq + importance[i] * code * code
            better = usable & (code != codes[i]) & (new_qq > 0) & (new_wq * new_wq * qq > wq * wq * new_qq)
            codes[i] = np.where(better, code, codes[i])
            wq, qq = np.where(better, new_wq, wq), np.where(better, new_qq, qq)
        if np.array_equal(codes, before):
            break
    return quotient(wq, qq), codes.astype(np.int32)
