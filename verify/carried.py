"""Arrays that carry a bound on their error: a definition of straight-line NumPy code derives its own bound.

A definition is called with `Carried` arrays in place of plain ones. Each operation computes the exact value in float64
and bounds how far a computation in float32 may be off: the errors that come in, and one rounding of its own. Sums,
means and products of matrices may be computed in any order, and elementary functions are within 4 u, as everywhere in
`verify.running_error`. The bound holds for code that computes the same formula; a kernel that computes another one,
such as E[x^2] - E[x]^2 for a variance or an online softmax, needs a bound that is written for it.

Covered: + - * / ** 2 to 4, negation, abs, square, sqrt, exp, expm1, log, log1p, tanh, maximum, minimum, where; sum,
mean, max and min; @ and matmul; indexing, reshape, transpose, expand_dims, concatenate, take_along_axis and the like.
Anything else raises TypeError by name. So does a comparison of numbers that are rounded: a rounding could decide it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from verify.precision import TINY, U
from verify.running_error import ELEMENTARY, gamma

POWERS = (2, 3, 4)  # computed as products
LARGEST = float(np.finfo(np.float32).max)
LARGEST_EXPONENT = 700.0  # e to more than that is no float64


class Carried(NDArrayOperatorsMixin):
    """Exact values, a bound on the error of each, and the sum of the magnitudes of the terms that made it.

    An input has no error unless float32 flushes it to zero.

    `unit` and `smallest` are the rounding of every operation: of float32, or of a narrower dtype that a looser contract
    declares.
    """

    __array_priority__ = 1000

    def __init__(self, value: Any, error: Any = 0.0, size: Any = None, *, unit: float = U, smallest: float = TINY):
        self.value = np.asarray(value).astype(np.float64)
        self.error = np.broadcast_to(error, self.value.shape).astype(np.float64)
        self.size = np.abs(self.value) if size is None else np.broadcast_to(size, self.value.shape)
        self.unit, self.smallest = unit, smallest

    shape = property(lambda self: self.value.shape)
    ndim = property(lambda self: self.value.ndim)
    dtype = property(lambda self: self.value.dtype)
    T = property(lambda self: self.moved(np.transpose))

    @property
    def most(self) -> np.ndarray:
        """A bound on the magnitude of the computed value."""
        return np.asarray(np.abs(self.value) + self.error)

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: Any) -> "Carried":
        return self.moved(lambda part: part[index])

    def __bool__(self) -> bool:
        raise TypeError("a rounding could decide which branch is taken: no bound is derived for that")

    def astype(self, dtype: Any, **_: Any) -> "Carried":
        """Stay as it is: values are exact, and their rounding belongs to the operation that made them."""
        return self

    def reshape(self, *shape: Any) -> "Carried":
        return self.moved(lambda part: part.reshape(*shape))

    def transpose(self, *axes: Any) -> "Carried":
        return self.moved(lambda part: part.transpose(*axes))

    def sum(self, axis: Any = None, *, keepdims: bool = False) -> "Carried":
        return _sum(self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Any = None, *, keepdims: bool = False) -> "Carried":
        return _mean(self, axis=axis, keepdims=keepdims)

    def max(self, axis: Any = None, *, keepdims: bool = False) -> "Carried":
        return _extreme(np.max, self, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, *, keepdims: bool = False) -> "Carried":
        return _extreme(np.min, self, axis=axis, keepdims=keepdims)

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> "Carried":
        """Move elements around: the same for values, errors and sizes."""
        return self.like(move(self.value), move(self.error), move(self.size))

    def like(self, value: Any, error: Any, size: Any = None) -> "Carried":
        """Another array of the same roundings."""
        return Carried(value, error, size, unit=self.unit, smallest=self.smallest)

    def beside(self, one: Any) -> "Carried":
        """`one`, or a constant beside this array, which float32 may round."""
        if isinstance(one, Carried):
            return one
        exact = np.asarray(one).astype(np.float64)
        with np.errstate(all="ignore"):
            apart = np.abs(exact - exact.astype(np.float32))
        return self.like(exact, np.where(np.isfinite(exact), apart, 0.0))

    def rounded(self, value: Any, error: Any, size: Any = None) -> "Carried":
        """The result of one operation, whose computed value is off by `error` before it is rounded."""
        most = np.abs(value) + error
        error = np.where(most < LARGEST, error + self.unit * most + self.smallest, np.inf)  # or the result overflows
        return self.like(value, error, size)

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
                f"no bound is derived for np.{ufunc.__name__}{'' if method == '__call__' else f'.{method}'}"
            )
        with np.errstate(all="ignore"):
            return UFUNCS[ufunc](*map(self.beside, inputs))

    def __array_function__(self, function: Callable[..., Any], types: Any, arguments: Any, options: Any) -> Any:
        if function not in FUNCTIONS:
            raise TypeError(f"no bound is derived for np.{function.__name__}")
        with np.errstate(all="ignore"):
            return FUNCTIONS[function](*arguments, **options)


def _add(a: Carried, b: Carried) -> Carried:
    return a.rounded(a.value + b.value, a.error + b.error, a.size + b.size)


def _subtract(a: Carried, b: Carried) -> Carried:
    same = a.value == b.value  # -inf - -inf, say
    value = np.where(same, 0.0, a.value - b.value)
    return a.rounded(value, a.error + b.error, a.size + b.size)


def _multiply(a: Carried, b: Carried) -> Carried:
    value = a.value * b.value
    error = a.most * b.error + np.abs(b.value) * a.error
    flushed = a.smallest * (a.most + b.most)
    return a.rounded(value, error + flushed, np.maximum(a.size * np.abs(b.value), b.size * np.abs(a.value)))


def _divide(a: Carried, b: Carried) -> Carried:
    value = a.value / b.value
    least = np.abs(b.value) - b.error
    error = np.where(least > 0, (a.error + np.abs(value) * b.error + a.smallest) / least, np.inf)
    error = np.where((a.most == 0) & (least > 0), 0.0, error)
    # A divisor that may overflow is at least the largest float32, or infinite.
    error = np.where(
        np.isposinf(b.error) & (np.abs(b.value) >= LARGEST / 2), np.abs(value) + 2 * a.most / LARGEST, error
    )
    # A division may be a product with 1 / b, which rounds once more.
    return a.rounded(value, error + a.unit * (np.abs(value) + error), a.size / np.abs(b.value))


def _power(a: Carried, b: Carried) -> Carried:
    power = int(b.value.flat[0]) if b.value.size == 1 and b.value.flat[0] in POWERS else 0
    if not power:
        raise TypeError(f"no bound is derived for powers other than {', '.join(map(str, POWERS))}")
    product = a
    for _ in range(power - 1):
        product = _multiply(product, a)
    return product


def _monotone(function: Callable[..., np.ndarray], *, low: float = -np.inf) -> Callable[[Carried], Carried]:
    """An elementary function that grows: its values at both ends of an interval enclose the computed one."""

    def apply(x: Carried) -> Carried:
        value = function(x.value)
        up = np.where(x.error == 0, value, function(np.minimum(x.value + x.error, np.finfo(float).max)))
        down = np.where(x.error == 0, value, function(np.maximum(x.value - x.error, low)))
        moved = np.nan_to_num(np.maximum(np.abs(up - value), np.abs(value - down)), nan=0.0, posinf=np.inf)
        own = max(ELEMENTARY, 4 * x.unit) * (np.abs(value) + moved)
        return x.rounded(value, moved + own)

    return apply


def _exp(x: Carried) -> Carried:
    y = _monotone(lambda v: np.exp(np.minimum(v, LARGEST_EXPONENT)))(x)
    # e^(a - b) may be computed as 2^(a log2 e - b log2 e), where each product is rounded before the difference.
    terms = np.where(np.isfinite(x.size), x.size, 0)
    return y.like(y.value, y.error + np.expm1(np.minimum(4 * x.unit * terms, 100)) * (y.value + y.error))


def _absolute(x: Carried) -> Carried:
    return x.like(np.abs(x.value), x.error, x.size)


def _larger(choose: Callable[..., np.ndarray]) -> Callable[[Carried, Carried], Carried]:
    def apply(a: Carried, b: Carried) -> Carried:
        return a.like(choose(a.value, b.value), np.maximum(a.error, b.error), np.maximum(a.size, b.size))

    return apply


def _matmul(a: Carried, b: Carried) -> Carried:
    terms = a.value.shape[-1]
    value, sums = a.value @ b.value, a.most @ b.most
    size = np.abs(a.value) @ np.abs(b.value)
    error = (
        sums
        - size
        + gamma(terms) * sums
        + TINY * (terms + np.sum(a.most, axis=-1, keepdims=True)) * (2 + np.max(b.most, initial=0))
    )
    return a.like(value, np.maximum(error, 0) + _only(a.unit) * (np.abs(value) + error), size)


def _only(unit: float) -> float:
    """The rounding of a sum, which adds up in float32, to a narrower dtype: none for float32 itself."""
    return unit if unit > U else 0.0


def _sum(x: Carried, axis: Any = None, *, keepdims: bool = False, **_: Any) -> Carried:
    value = np.sum(x.value, axis=axis, keepdims=keepdims)
    terms = max(x.value.size // max(value.size, 1), 1)
    sums = np.sum(x.most, axis=axis, keepdims=keepdims)
    error = np.sum(x.error, axis=axis, keepdims=keepdims) + gamma(terms) * sums + terms * TINY
    size = np.sum(x.size, axis=axis, keepdims=keepdims)
    return x.like(value, error + _only(x.unit) * (np.abs(value) + error), size)


def _mean(x: Carried, axis: Any = None, *, keepdims: bool = False, **_: Any) -> Carried:
    total = _sum(x, axis=axis, keepdims=keepdims)
    count = x.value.size // max(total.value.size, 1)
    return _divide(total, total.like(float(count), 0.0))


def _extreme(reduce: Any, x: Carried, axis: Any = None, *, keepdims: bool = False, **options: Any) -> Carried:
    error = np.max(x.error, axis=axis, keepdims=keepdims, initial=0)
    return x.like(reduce(x.value, axis=axis, keepdims=keepdims, **options), error)


def _where(condition: Any, a: Any, b: Any) -> Carried:
    if isinstance(condition, Carried):
        raise TypeError("a rounding could decide np.where: no bound is derived for a condition that is rounded")
    known = a if isinstance(a, Carried) else b
    a, b = known.beside(a), known.beside(b)
    parts = ((a.value, b.value), (a.error, b.error), (a.size, b.size))
    return known.like(*(np.where(condition, one, other) for one, other in parts))


def _compared(ufunc: np.ufunc) -> Callable[[Carried, Carried], np.ndarray]:
    def apply(a: Carried, b: Carried) -> np.ndarray:
        if np.any(a.error) or np.any(b.error):
            raise TypeError(f"a rounding could decide np.{ufunc.__name__}: no bound is derived for that")
        return ufunc(a.value, b.value)

    return apply


def _concatenate(arrays: Any, axis: int = 0) -> Carried:
    known = next(one for one in arrays if isinstance(one, Carried))
    all_of_them = [known.beside(one) for one in arrays]
    return known.like(
        *(np.concatenate([getattr(one, part) for one in all_of_them], axis) for part in ("value", "error", "size"))
    )


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
    np.tanh: _monotone(np.tanh),
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
    np.concatenate: _concatenate,
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
