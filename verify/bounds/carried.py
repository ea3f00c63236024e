"""Arrays that carry a bound on their error, so that NumPy code without branches computes its own error bound.

We call a definition with `Carried` arrays instead of NumPy arrays. Each operation computes the exact value in float64.
It also bounds the error of a float32 computation, from the errors of its operands and one additional rounding. Code may
compute sums, means and products of matrices in any order. We assume that elementary functions have a relative error of
at most 4 u with u = 2^-24 (tanh: 7 u), as in `verify.bounds.running_error`. The bound holds for code that computes the
same formula. A kernel that computes a different formula, such as E[x^2] - E[x]^2 for a variance, or an online softmax,
needs its own bound.

We support + - * /, powers from 2 to 4, negation, abs, square, sqrt, exp, expm1, log, log1p, tanh, sin, cos, maximum,
minimum, where, sum, mean, max, min, @, matmul, indexing, reshape, transpose, split, concatenate and similar functions.
Any other function raises TypeError, and the message names it. If a rounding could decide a comparison, the bound of
`np.where` covers both outcomes. An `if` on such a comparison, or & and | of such comparisons, raises TypeError, too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from llamaspec.verify.bounds.precision import TINY, Precision, U
from llamaspec.verify.bounds.running_error import ELEMENTARY, TANH, gamma

POWERS = (2, 3, 4)  # computed as products
LARGEST = float(np.finfo(np.float32).max)
LARGEST_EXPONENT = 700.0  # e to a larger power overflows float64


class Rounding(NamedTuple):
    """The rounding of every operation: to float32, or to the narrower dtype of a weaker contract.

    `part` > 0 models a kernel that computes a product of float32 matrices as three products of narrower matrices:
    3xTF32 (Ootomo & Yokota, 2022, https://arxiv.org/abs/2203.03341), and bf16x3 (Henry, Tang &
    Heinecke, 2019, https://arxiv.org/abs/1904.06376). It splits each factor into two parts, x = b + s + r: b is x in
    the narrower dtype, and s is x - b in the narrower dtype. Then

        x y ~ b b' + b s' + s b'        |s| <= h |x| (1 + h)        |r| <= h^2 |x|

    where h = `part` bounds the relative error of a conversion. The products of parts are exact in float32. The result
    lacks s s', r y and x r', so the error of x y is at most h^2 ((1 + h)^2 + 2 + h^2) |x y|. The sum has 3 n terms.
    Matrix units cut off bits instead of rounding (Fasi, Higham, Mikaitis & Pranesh, 2021,
    https://doi.org/10.7717/peerj-cs.330): they cut each term when they align it to the largest term, and they cut each
    partial sum. So we count four roundings for each term.
    """

    unit: float = U  # largest relative error
    smallest: float = TINY  # largest absolute error of a tiny number
    largest: float = LARGEST
    part: float = 0.0  # largest relative error of a part of a factor of a matrix product; 0: factors are not split

    @property
    def dropped(self) -> float:
        """Bound the relative error of a product of two split factors."""
        return self.part**2 * ((1 + self.part) ** 2 + 2 + self.part**2)

    @property
    def widest(self) -> float:
        """Bound the sum of the magnitudes of a product's three parts, relative to the product."""
        return (1 + self.part) ** 2 * (1 + 2 * self.part)

    def summed(self, terms: int) -> float:
        """Bound the relative error of a sum of `terms` products in a matrix product."""
        return gamma(4 * 3 * terms) if self.part else gamma(terms)

    @staticmethod
    def of(precision: Precision) -> "Rounding":
        """Build the `Rounding` of a computation that rounds every result to the dtype `precision`."""
        return Rounding(precision.unit, precision.smallest, precision.largest)


FLOAT32 = Rounding()


class Carried(NDArrayOperatorsMixin):
    """Exact values. Each element has a bound on its error, and a size: for a sum, the size is sum |term|.

    An input has no error, unless it is so small that float32 flushes it to zero.
    """

    __array_priority__ = 1000

    def __init__(self, value: Any, error: Any = 0.0, size: Any = None, *, rounding: Rounding = FLOAT32):
        self.value = np.asarray(value).astype(np.float64)
        self.error = np.broadcast_to(error, self.value.shape).astype(np.float64)
        self.size = np.abs(self.value) if size is None else np.broadcast_to(size, self.value.shape)
        self.rounding = rounding
        self.unit, self.smallest, self.largest, _ = rounding

    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)
    dtype = property(lambda self: self.value.dtype)
    T = property(lambda self: self.moved(np.transpose))

    @property
    def magnitude(self) -> np.ndarray:
        """Bound the magnitude of the computed value."""
        return np.asarray(np.abs(self.value) + self.error)

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: Any) -> "Carried":
        return self.moved(lambda part: part[index])

    def __bool__(self) -> bool:
        raise TypeError("rounding could change which branch is taken: cannot derive a bound")

    def astype(self, dtype: Any, **_: Any) -> "Carried":
        """Return the array unchanged: the operation that made it has already added the error of its rounding."""
        return self

    def reshape(self, *shape: Any) -> "Carried":
        return self.moved(lambda part: part.reshape(*shape))

    def transpose(self, *axes: Any) -> "Carried":
        return self.moved(lambda part: part.transpose(*axes))

    def swapaxes(self, first: int, second: int) -> "Carried":
        return self.moved(lambda part: part.swapaxes(first, second))

    def sum(self, axis: Any = None, *, keepdims: bool = False) -> "Carried":
        return _sum(self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Any = None, *, keepdims: bool = False) -> "Carried":
        return _mean(self, axis=axis, keepdims=keepdims)

    def max(self, axis: Any = None, *, keepdims: bool = False) -> "Carried":
        return _extreme(np.max, self, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, *, keepdims: bool = False) -> "Carried":
        return _extreme(np.min, self, axis=axis, keepdims=keepdims)

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> "Carried":
        """Apply `move`, which only moves elements, to the values, errors and sizes."""
        return self.like(move(self.value), move(self.error), move(self.size))

    def like(self, value: Any, error: Any, size: Any = None) -> "Carried":
        """Make a `Carried` of `value` and `error` with this array's rounding."""
        return Carried(value, error, size, rounding=self.rounding)

    def operand(self, value: Any) -> "Carried":
        """Convert `value` to a `Carried` with this array's rounding.

        If float32 cannot hold a constant exactly, the result has an error.
        """
        if isinstance(value, Carried):
            return value
        exact = np.asarray(value).astype(np.float64)
        with np.errstate(all="ignore"):
            mantissa, exponent = np.frexp(exact)
            apart = np.abs(exact - np.ldexp(np.rint(mantissa / self.unit) * self.unit, exponent))
            apart = np.where((apart > 0) | ((exact != 0) & (np.abs(exact) < self.smallest)), apart + self.smallest, 0)
            apart = np.where(np.abs(exact) > self.largest, np.inf, apart)
        return self.like(exact, np.where(np.isfinite(exact), apart, 0.0))

    def rounded(self, value: Any, error: Any, size: Any = None) -> "Carried":
        """Add one rounding to the result of an operation that already has the error `error`.

        A zero or an infinity without an error rounds to itself.
        """
        error = np.where(np.isnan(error), np.inf, error)  # a zero times a number without a bound
        most = np.abs(value) + error
        own = np.where(most < self.largest, self.unit * most + self.smallest, np.inf)  # inf: it may overflow
        return self.like(value, np.where((error == 0) & ((value == 0) | np.isinf(value)), 0.0, error + own), size)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "reduce" and ufunc is np.add:
            return _sum(inputs[0], axis=options.get("axis", 0), keepdims=options.get("keepdims", False))
        if method == "reduce" and ufunc in (np.maximum, np.minimum):
            reduce = np.max if ufunc is np.maximum else np.min
            return _extreme(
                reduce,
                inputs[0],
                axis=options.get("axis", 0),
                keepdims=options.get("keepdims", False),
                **({"initial": options["initial"]} if "initial" in options else {}),
            )
        if method != "__call__" or ufunc not in UFUNCS or options:
            raise TypeError(
                f"cannot derive a bound for np.{ufunc.__name__}{'' if method == '__call__' else f'.{method}'}"
            )
        with np.errstate(all="ignore"):
            return UFUNCS[ufunc](*map(self.operand, inputs))

    def __array_function__(self, function: Callable[..., Any], types: Any, arguments: Any, options: Any) -> Any:
        if function not in FUNCTIONS:
            raise TypeError(f"cannot derive a bound for np.{function.__name__}")
        with np.errstate(all="ignore"):
            return FUNCTIONS[function](*arguments, **options)


def _add(a: Carried, b: Carried) -> Carried:
    return a.rounded(a.value + b.value, a.error + b.error, a.size + b.size)


def _subtract(a: Carried, b: Carried) -> Carried:
    equal = a.value == b.value  # for example -inf - -inf
    value = np.where(equal, 0.0, a.value - b.value)
    return a.rounded(value, a.error + b.error, a.size + b.size)


def _multiply(a: Carried, b: Carried) -> Carried:
    value = a.value * b.value
    error = a.magnitude * b.error + np.abs(b.value) * a.error
    flushed = a.smallest * (a.magnitude + b.magnitude)
    return a.rounded(value, error + flushed, np.maximum(a.size * np.abs(b.value), b.size * np.abs(a.value)))


def _divide(a: Carried, b: Carried) -> Carried:
    value = a.value / b.value
    least = np.abs(b.value) - b.error
    error = np.where(least > 0, (a.error + np.abs(value) * b.error + a.smallest) / least, np.inf)
    error = np.where((a.magnitude == 0) & (least > 0), 0.0, error)
    # If a divisor overflows, it is infinite, or at least the largest float32.
    error = np.where(
        np.isposinf(b.error) & (np.abs(b.value) >= a.largest / 2), np.abs(value) + 2 * a.magnitude / a.largest, error
    )
    # Code may divide by multiplying by 1 / b, which rounds once more.
    error = error + a.unit * (np.abs(value) + error) + a.smallest * a.magnitude
    return a.rounded(value, error, a.size / np.abs(b.value))


def _power(a: Carried, b: Carried) -> Carried:
    power = int(b.value.flat[0]) if b.value.size == 1 and b.value.flat[0] in POWERS else 0
    if not power:
        raise TypeError(f"cannot derive a bound for powers other than {', '.join(map(str, POWERS))}")
    product = a
    for _ in range(power - 1):
        product = _multiply(product, a)
    return product


def _monotone(
    function: Callable[..., np.ndarray], *, low: float = -np.inf, off: float = ELEMENTARY
) -> Callable[[Carried], Carried]:
    """Convert an increasing NumPy function to one for `Carried` arrays.

    To bound the result, we compute the function at both ends of the interval [x - error, x + error]. The function's
    domain begins at `low`.

    `off` is the relative error of the function's float32 implementation.
    """

    def apply(x: Carried) -> Carried:
        value = function(x.value)
        up = np.where(x.error == 0, value, function(np.minimum(x.value + x.error, np.finfo(float).max)))
        down = np.where(x.error == 0, value, function(np.maximum(x.value - x.error, low)))
        moved = np.nan_to_num(np.maximum(np.abs(up - value), np.abs(value - down)), nan=0.0, posinf=np.inf)
        own = max(off, 4 * x.unit) * (np.abs(value) + moved)
        return x.rounded(value, moved + own)

    return apply


def _exp(x: Carried) -> Carried:
    y = _monotone(lambda v: np.exp(np.minimum(v, LARGEST_EXPONENT)))(x)
    # Code may compute e^(a - b) as 2^(a log2 e - b log2 e), and round each product to float32 before the difference.
    terms = np.where(np.isfinite(x.size), x.size, 0)
    return y.like(y.value, y.error + np.expm1(np.minimum(4 * U * terms, 100)) * (y.value + y.error))


def _turning(function: Callable[..., np.ndarray]) -> Callable[[Carried], Carried]:
    """Convert np.sin or np.cos to a function for `Carried` arrays.

    The error of the result is at most the error of the angle plus a rounding, and at most 2.
    """

    def apply(x: Carried) -> Carried:
        return x.rounded(function(x.value), np.minimum(x.error + max(ELEMENTARY, 4 * x.unit), 2))

    return apply


def _absolute(x: Carried) -> Carried:
    return x.like(np.abs(x.value), x.error, x.size)


def _larger(choose: Callable[..., np.ndarray]) -> Callable[[Carried, Carried], Carried]:
    def apply(a: Carried, b: Carried) -> Carried:
        return a.like(choose(a.value, b.value), np.maximum(a.error, b.error), np.maximum(a.size, b.size))

    return apply


def _matmul(a: Carried, b: Carried) -> Carried:
    terms = a.value.shape[-1]
    value, sums = a.value @ b.value, a.magnitude @ b.magnitude
    size = np.abs(a.value) @ np.abs(b.value)
    error = (
        sums
        - size
        + a.rounding.summed(terms) * a.rounding.widest * sums
        + a.rounding.dropped * sums
        + (3 if a.rounding.part else 1)  # parts may be flushed to zero, too
        * TINY
        * (terms + np.sum(a.magnitude, axis=-1, keepdims=True))
        * (2 + np.max(b.magnitude, initial=0))
    )
    return _added_up(a, value, np.maximum(error, 0), size)


def _added_up(x: Carried, value: Any, error: Any, size: Any) -> Carried:
    """Build the result of a sum in float32. It is rounded again if the declared dtype is narrower."""
    error = np.where(np.isnan(error), np.inf, error)  # a zero times a number without a bound
    return x.like(value, error, size) if x.unit == U else x.rounded(value, error, size)


def _sum(x: Carried, axis: Any = None, *, keepdims: bool = False, **_: Any) -> Carried:
    value = np.sum(x.value, axis=axis, keepdims=keepdims)
    terms = max(x.value.size // max(value.size, 1), 1)
    sums = np.sum(x.magnitude, axis=axis, keepdims=keepdims)
    own = np.where(sums == 0, 0.0, gamma(terms) * sums + terms * TINY)
    error = np.sum(x.error, axis=axis, keepdims=keepdims) + own
    return _added_up(x, value, error, np.sum(x.size, axis=axis, keepdims=keepdims))


def _mean(x: Carried, axis: Any = None, *, keepdims: bool = False, **_: Any) -> Carried:
    total = _sum(x, axis=axis, keepdims=keepdims)
    count = x.value.size // max(total.value.size, 1)
    return _divide(total, total.like(float(count), 0.0))


def _extreme(reduce: Any, x: Carried, axis: Any = None, *, keepdims: bool = False, **options: Any) -> Carried:
    error = np.max(x.error, axis=axis, keepdims=keepdims, initial=0)
    return x.like(reduce(x.value, axis=axis, keepdims=keepdims, **options), error)


class Undecided:
    """The result of comparing two arrays, if rounding errors could change the result for some elements.

    `outcome` is the result for the exact values. `sure` is True for elements where no rounding can change the outcome.
    """

    def __init__(self, ufunc: np.ufunc, a: Carried, b: Carried, sure: np.ndarray):
        self.outcome, self.sure = ufunc(a.value, b.value), sure
        self.name, self.rounding = ufunc.__name__, a.rounding

    def __array_function__(self, function: Callable[..., Any], types: Any, arguments: Any, options: Any) -> Any:
        if function is not np.where:
            raise TypeError(f"rounding could change np.{self.name}: cannot derive a bound for np.{function.__name__}")
        return _where(*arguments, **options)

    def __array_ufunc__(self, ufunc: np.ufunc, *_: Any, **options: Any) -> Any:
        raise TypeError(f"rounding could change np.{self.name}: cannot derive a bound for np.{ufunc.__name__}")

    def __bool__(self) -> bool:
        raise TypeError(f"rounding could change np.{self.name}: cannot derive a bound for a branch")


def _where(condition: Any, a: Any, b: Any) -> Carried:
    if isinstance(condition, Carried):
        raise TypeError("rounding could change the condition of np.where: cannot derive a bound")
    carried = [branch for branch in (a, b) if isinstance(branch, Carried)]
    known = carried[0] if carried else Carried(0, rounding=condition.rounding)
    a, b = known.operand(a), known.operand(b)
    outcome = condition.outcome if isinstance(condition, Undecided) else condition
    parts = ((a.value, b.value), (a.error, b.error), (a.size, b.size))
    value, error, size = (np.where(outcome, branch, branch_b) for branch, branch_b in parts)
    if isinstance(condition, Undecided):
        apart = np.where(a.value == b.value, 0.0, np.abs(a.value - b.value)) + np.where(outcome, b.error, a.error)
        error = np.where(condition.sure, error, np.maximum(error, apart))
    return known.like(value, error, size)


def _compared(ufunc: np.ufunc) -> Callable[[Carried, Carried], np.ndarray | Undecided]:
    """Convert a NumPy comparison, such as np.less, to a function for `Carried` arrays.

    No rounding can change an element's outcome if both numbers are exact, or differ by more than the sum of their
    errors. If this is not true of all elements, the function returns `Undecided`.
    """

    def apply(a: Carried, b: Carried) -> np.ndarray | Undecided:
        error = a.error + b.error
        sure = (error == 0) | (np.abs(a.value - b.value) > error)
        return ufunc(a.value, b.value) if np.all(sure) else Undecided(ufunc, a, b, sure)

    return apply


def _split(x: Carried, sections: Any, axis: int = 0) -> list[Carried]:
    parts = [np.split(part, sections, axis) for part in (x.value, x.error, x.size)]
    return [x.like(*part) for part in zip(*parts, strict=True)]


def _joining(join: Callable[..., np.ndarray]) -> Callable[..., Carried]:
    def apply(arrays: Any, axis: int = 0) -> Carried:
        known = next(array for array in arrays if isinstance(array, Carried))
        all_of_them = [known.operand(array) for array in arrays]
        return known.like(
            *(join([getattr(array, part) for array in all_of_them], axis) for part in ("value", "error", "size"))
        )

    return apply


def _moving(function: Callable[..., np.ndarray]) -> Callable[..., Carried]:
    def apply(x: Carried, *arguments: Any, **options: Any) -> Carried:
        return x.moved(lambda part: function(part, *arguments, **options))

    return apply


UFUNCS: dict[np.ufunc, Callable[..., Any]] = {
    np.add: _add,
    np.subtract: _subtract,
    np.multiply: _multiply,
    np.divide: _divide,
    np.power: _power,
    np.square: lambda x: _multiply(x, x),
    np.negative: lambda x: x.like(-x.value, x.error, x.size),
    np.positive: lambda x: x,
    np.absolute: _absolute,
    np.sqrt: _monotone(np.sqrt, low=0.0),
    np.exp: _exp,
    np.expm1: _monotone(lambda v: np.expm1(np.minimum(v, LARGEST_EXPONENT))),
    np.log: _monotone(np.log, low=0.0),
    np.log1p: _monotone(np.log1p, low=-1.0),
    np.tanh: _monotone(np.tanh, off=TANH),
    np.sin: _turning(np.sin),
    np.cos: _turning(np.cos),
    np.maximum: _larger(np.maximum),
    np.minimum: _larger(np.minimum),
    np.matmul: _matmul,
    np.isfinite: lambda x: np.isfinite(x.value),
    **{
        ufunc: _compared(ufunc)
        for ufunc in (np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal)
    },
}
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.sum: _sum,
    np.mean: _mean,
    np.max: lambda x, axis=None, **options: _extreme(np.max, x, axis, **options),
    np.min: lambda x, axis=None, **options: _extreme(np.min, x, axis, **options),
    np.where: _where,
    np.concatenate: _joining(np.concatenate),
    np.stack: _joining(np.stack),
    np.split: _split,
    np.shape: lambda x: x.shape,
    np.isneginf: lambda x: np.isneginf(x.value),
    **{
        move: _moving(move)
        for move in (
            np.reshape,
            np.transpose,
            np.swapaxes,
            np.moveaxis,
            np.expand_dims,
            np.squeeze,
            np.broadcast_to,
            np.repeat,
            np.take_along_axis,
            np.flip,
        )
    },
}
