"""Arrays of balls: numbers that are known up to a proven radius. Arb computes with them (https://arblib.org).

A ball is a midpoint and a radius. The result of an operation is a ball that contains every possible exact result, so no
rounding is lost. Arb is part of python-flint.

`Balls` behaves like a NumPy array in the functions of `reference`, so the definition itself is evaluated, not a copy of
it. All floating-point constants of the definition count as exact.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flint import arb, arb_mat
from numpy.lib.mixins import NDArrayOperatorsMixin


class UndecidedError(ArithmeticError):
    """Two balls overlap, so the precision does not suffice to compare them."""


class Balls(NDArrayOperatorsMixin):
    """An array of balls, or of exact float64 numbers that become balls when they are needed.

    Comparisons raise UndecidedError for balls that overlap, unless both are exact.
    """

    __array_priority__ = 1000

    def __init__(self, values: np.ndarray):
        """Wrap an array of balls (dtype object), or of exact numbers."""
        self._values = values if values.dtype == object else np.asarray(values, np.float64)
        self._matrix: arb_mat | None = None
        self._transposed: Balls | None = None

    shape = property(lambda self: self._values.shape)
    ndim = property(lambda self: self._values.ndim)
    dtype = property(lambda self: np.dtype(np.float64))

    @property
    def balls(self) -> np.ndarray:
        """The balls, in an array of dtype object."""
        return self._values if self._values.dtype == object else _to_balls(self._values)

    @property
    def T(self) -> "Balls":
        """The transposed matrix. We keep it, because every token needs the transposed weights."""
        if self._transposed is None:
            self._transposed = Balls(self._values.T)
        return self._transposed

    def matrix(self) -> arb_mat:
        """Return the array as a matrix of Arb. We keep it for later calls."""
        if self._matrix is None:
            rows, cols = self.shape
            self._matrix = arb_mat(rows, cols, list(self.balls.ravel()))
        return self._matrix

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> "Balls":
        return self._moved(lambda values: values[index])

    def astype(self, dtype: Any, **_: Any) -> "Balls":
        """Return the array unchanged: balls are more precise than any dtype."""
        return self

    def reshape(self, *shape: Any) -> "Balls":
        return self._moved(lambda values: values.reshape(*shape))

    def swapaxes(self, first: int, second: int) -> "Balls":
        return self._moved(lambda values: values.swapaxes(first, second))

    def _moved(self, move: Callable[[np.ndarray], Any]) -> "Balls":
        """Apply `move`, which only moves elements."""
        return Balls(_array(move(self._values)))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or ufunc not in UFUNCS or options:
            raise TypeError(f"np.{ufunc.__name__} cannot be computed with balls")
        return UFUNCS[ufunc](*map(operand, inputs))

    def __array_function__(self, function: Callable[..., Any], types: Any, arguments: Any, options: Any) -> Any:
        if function not in FUNCTIONS:
            raise TypeError(f"np.{function.__name__} cannot be computed with balls")
        return FUNCTIONS[function](*arguments, **options)


def operand(value: Any) -> Balls:
    """Convert a number, a ball, or an array of either to `Balls`."""
    if isinstance(value, Balls):
        return value
    return Balls(_array(value) if isinstance(value, arb) else np.asarray(value))


def _array(values: Any) -> np.ndarray:
    """Put a single ball into an array without axes."""
    if isinstance(values, np.ndarray):
        return values
    array = np.empty((), object if isinstance(values, arb) else np.float64)
    array[()] = values
    return array


def _to_balls(numbers: np.ndarray) -> np.ndarray:
    return _array(np.frompyfunc(lambda number: arb(float(number)), 1, 1)(numbers))


def _by_numpy(ufunc: np.ufunc) -> Callable[..., Balls]:
    """Convert `ufunc` to a function of `Balls`. NumPy computes it by an operator or a method of each element."""
    return lambda *inputs: Balls(_array(ufunc(*(x.balls for x in inputs))))


def _power(x: Balls, exponent: Balls) -> Balls:
    """Compute x to the power of a small integer, by products."""
    count = exponent._values
    if count.dtype == object or count.size != 1 or count.flat[0] not in (2, 3):
        raise TypeError("only squares and cubes can be computed with balls")
    product = x.balls
    for _ in range(int(count.flat[0]) - 1):
        product = product * x.balls
    return Balls(_array(product))


def _less(x: Balls, y: Balls) -> np.ndarray:
    return np.asarray(np.frompyfunc(_is_less, 2, 1)(x.balls, y.balls), bool)


def _is_less(a: arb, b: arb) -> bool:
    if a < b:
        return True
    if a >= b:
        return False
    raise UndecidedError("two balls overlap")


def _equal(x: Balls, y: Balls) -> np.ndarray:
    return np.asarray(np.frompyfunc(_is_equal, 2, 1)(x.balls, y.balls), bool)


def _is_equal(a: arb, b: arb) -> bool:
    if a == b:  # both are exact
        return True
    if a != b:  # they do not overlap
        return False
    raise UndecidedError("two balls overlap")


def _matmul(a: Balls, b: Balls) -> Balls:
    """Multiply matrices, or stacks of matrices. The first factor may be a single vector."""
    if a.ndim == 1:
        return _matmul(a.reshape(1, -1), b)[..., 0, :]
    if a.ndim == b.ndim == 2:
        return Balls(_entries(a.matrix() * b.matrix()))
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    first, second = (np.broadcast_to(x.balls, (*batch, *x.shape[-2:])) for x in (a, b))
    product = np.empty((*batch, a.shape[-2], b.shape[-1]), object)
    for index in np.ndindex(*batch):
        product[index] = _entries(Balls(first[index]).matrix() * Balls(second[index]).matrix())
    return Balls(product)


def _entries(matrix: arb_mat) -> np.ndarray:
    return np.array(matrix.entries(), object).reshape(matrix.nrows(), matrix.ncols())


def _where(condition: Any, x: Any, y: Any) -> Balls:
    return Balls(_array(np.where(condition, operand(x).balls, operand(y).balls)))


def _sum(x: Balls, axis: Any = None, *, keepdims: bool = False) -> Balls:
    return Balls(_array(np.sum(x.balls, axis=axis, keepdims=keepdims)))


def _mean(x: Balls, axis: Any = None, *, keepdims: bool = False) -> Balls:
    total = _sum(x, axis=axis, keepdims=keepdims)
    return total / (np.prod(x.shape) / max(1, np.prod(total.shape)))


def _max(x: Balls, axis: int, *, keepdims: bool = False, initial: float = -np.inf) -> Balls:
    """Return the largest midpoints as exact numbers.

    The definition uses a maximum only as the shift of a softmax, which does not change the result.
    """
    middle = np.asarray(np.frompyfunc(lambda ball: float(ball.mid()), 1, 1)(x.balls), np.float64)
    return Balls(np.max(middle, axis=axis, keepdims=keepdims, initial=initial))


def _isneginf(x: Balls) -> np.ndarray:
    return np.asarray(np.frompyfunc(lambda ball: bool(ball == arb("-inf")), 1, 1)(x.balls), bool)


def _concatenate(parts: Sequence[Any], axis: int = 0) -> Balls:
    return Balls(np.concatenate([operand(part).balls for part in parts], axis=axis))


def _split(x: Balls, places: Any, axis: int = 0) -> list[Balls]:
    return [Balls(part) for part in np.split(x._values, places, axis=axis)]


UFUNCS: dict[np.ufunc, Callable[..., Any]] = {
    **{ufunc: _by_numpy(ufunc) for ufunc in (np.add, np.subtract, np.multiply, np.divide, np.negative, np.absolute)},
    **{ufunc: _by_numpy(ufunc) for ufunc in (np.exp, np.sqrt, np.sin, np.cos, np.tanh)},
    np.power: _power,
    np.less: _less,
    np.equal: _equal,
    np.matmul: _matmul,
}
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.where: _where,
    np.sum: _sum,
    np.mean: _mean,
    np.max: _max,
    np.isneginf: _isneginf,
    np.concatenate: _concatenate,
    np.split: _split,
    np.moveaxis: lambda x, source, target: x._moved(lambda values: np.moveaxis(values, source, target)),
}
