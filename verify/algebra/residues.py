"""Arrays of residues: a number modulo p, the same number modulo q, and a float64 number that decides comparisons.

`Residues` behaves like a NumPy array in the functions of `reference`, so the definition itself is evaluated. The walk
through a kernel's jaxpr uses the same operations.

The residues and the float64 numbers of an input are drawn independently. The float64 numbers decide which number is the
maximum, what is masked (-inf, or so far below 0 that exp gives 0), and which branch is taken.

A residue is doubtful if its computation divides by 0 modulo the prime, or takes the root of a number that is not a
square modulo the prime. Both results have no meaning, so only other residues are compared.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Bool
from numpy.lib.mixins import NDArrayOperatorsMixin

from llamaspec.verify.algebra.constants import constant
from llamaspec.verify.algebra.primes import Integers, Primes, inverse, matmul, power, root

VANISHES = -5e3  # exp is 0 for smaller arguments, such as a score masked with -1e4
ROUNDINGS = 4  # units in the last place by which a constant may differ from the same number in the definition
IDENTITIES = 1e-10  # relative error of float64 numbers that two equal formulas of sines may have

Mask = Bool[np.ndarray, "..."] | None


class OutsideError(ValueError):
    """A computation uses an operation outside the algebra."""


class Residues(NDArrayOperatorsMixin):
    """An array of residues.

    `parts` has the residues modulo p and modulo q. The second is None for results of exp: omega^x is known modulo p
    only. `real` has the float64 numbers. If one is infinite or NaN, its residues have no meaning. `doubtful` marks the
    doubtful residues modulo p and modulo q; None: there are none.

    `degree` bounds the degrees of each element's numerator and denominator, as polynomials in the inputs.
    """

    __array_priority__ = 1000

    def __init__(
        self,
        primes: Primes,
        parts: tuple[Integers, Integers | None],
        real: np.ndarray,
        degree: tuple[int, int] = (0, 0),
        doubtful: tuple[Mask, Mask] = (None, None),
    ):
        self.primes, self.parts, self.real, self.degree = primes, parts, np.asarray(real, np.float64), degree
        self.doubtful = doubtful

    shape = property(lambda self: self.real.shape)
    ndim = property(lambda self: self.real.ndim)
    size = property(lambda self: self.real.size)
    dtype = property(lambda self: self.real.dtype)
    T = property(lambda self: self.moved(np.transpose))

    @classmethod
    def random(cls, primes: Primes, real: np.ndarray, rng: np.random.Generator) -> "Residues":
        """Draw residues for an input. Numbers that are 0, infinite or NaN keep their values."""
        real = np.asarray(real, np.float64)
        fixed = (real == 0) | ~np.isfinite(real)
        p, q = (np.where(fixed, 0, rng.integers(1, m, real.shape)) for m in primes.moduli)
        return cls(primes, (p, q), real, (1, 0))

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, index: Any) -> "Residues":
        return self.moved(lambda part: part[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        def changed(array: np.ndarray, elements: np.ndarray) -> np.ndarray:
            array = array.copy()
            array[index] = elements
            return array

        result = self.merged(changed, self.operand(value))
        self.parts, self.real, self.degree, self.doubtful = result.parts, result.real, result.degree, result.doubtful

    def __bool__(self) -> bool:
        return bool(self.real)

    def astype(self, dtype: Any, **_: Any) -> "Residues":
        """Return the array unchanged: residues are exact."""
        if np.dtype(dtype).kind not in "fV":
            raise OutsideError(f"a conversion of floating-point numbers to {np.dtype(dtype).name}")
        return self

    def sum(self, axis: Any = None, *, keepdims: bool = False) -> "Residues":
        return total(self, axis, keepdims=keepdims)

    def reshape(self, *shape: Any) -> "Residues":
        return self.moved(lambda part: part.reshape(*shape))

    def swapaxes(self, first: int, second: int) -> "Residues":
        return self.moved(lambda part: part.swapaxes(first, second))

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> "Residues":
        """Apply `move`, which only moves elements."""

        def optional(part: np.ndarray | None) -> np.ndarray | None:
            return None if part is None else np.asarray(move(part))

        first, second = self.parts
        doubtful = (optional(self.doubtful[0]), optional(self.doubtful[1]))
        parts = (np.asarray(move(first)), optional(second))
        return Residues(self.primes, parts, np.asarray(move(self.real)), self.degree, doubtful)

    def merged(self, merge: Callable[..., np.ndarray], *others: "Residues") -> "Residues":
        """Apply `merge`, which only chooses elements of several arrays."""
        arrays = (self, *others)
        known = all(x.parts[1] is not None for x in arrays)
        second = merge(*(x.parts[1] for x in arrays)) if known else None

        def masks(number: int) -> Mask:
            if all(x.doubtful[number] is None for x in arrays):
                return None
            return merge(*(np.broadcast_to(doubt(x, number), x.shape) for x in arrays))

        parts = (merge(*(x.parts[0] for x in arrays)), second)
        real = merge(*(x.real for x in arrays))
        return Residues(self.primes, parts, real, joint_degree(arrays), (masks(0), masks(1)))

    def computed(
        self,
        compute: Callable[..., Integers],
        real: Any,
        *others: "Residues",
        degree: tuple[int, int],
        spread: Callable[..., np.ndarray] = lambda masks: reduce(np.logical_or, masks),
    ) -> "Residues":
        """Make the result of `compute(modulus, *residues)`, modulo q only if all operands are known modulo q.

        `spread` computes which results are doubtful from a list with a mask for each operand; by default elementwise.
        """
        arrays = (self, *others)
        residues: list[Integers | None] = []
        masks: list[Mask] = []
        for number, modulus in enumerate(self.primes.moduli):
            operands = [x.parts[number] for x in arrays]
            known = all(part is not None for part in operands)
            residues.append(compute(modulus, *operands) % modulus if known else None)
            certain = all(x.doubtful[number] is None for x in arrays)
            masks.append(None if certain or not known else spread([doubt(x, number) for x in arrays]))
        first, second = residues
        assert first is not None
        return Residues(self.primes, (first, second), real, degree, (masks[0], masks[1]))

    def marked(self, *doubts: Mask) -> "Residues":
        """Mark more elements as doubtful, modulo p and modulo q."""
        masks = [
            new if old is None else old if new is None else old | new
            for old, new in zip(self.doubtful, doubts, strict=True)
        ]
        return Residues(self.primes, self.parts, self.real, self.degree, (masks[0], masks[1]))

    def operand(self, value: Any) -> "Residues":
        """Convert constants to residues."""
        if isinstance(value, Residues):
            return value
        values = np.asarray(value)
        if values.dtype.kind not in "fV":
            values = values.astype(np.float64) if values.dtype.kind in "biu" else values
        if values.dtype.kind not in "fV":
            raise OutsideError(f"numbers of {values.dtype.name}")
        dtype, real = values.dtype.name, values.astype(np.float64)
        unique, places = np.unique(real.ravel(), return_inverse=True)
        residues = np.zeros((2, len(unique)), np.int64)
        for number, entry in enumerate(unique.tolist()):
            if math.isfinite(entry) and entry:
                simple = constant(entry, dtype)
                residues[:, number] = simple.modulo(self.primes)
                unique[number] = float(simple)
                if simple.literal:
                    slack = ROUNDINGS * float(ml_dtypes.finfo(dtype).eps)
                    self.primes.excuse(slack, f"a rounding error of the constant {entry:.9g} may explain it")
        p, q = (part[places].reshape(real.shape) for part in residues)
        return Residues(self.primes, (p, q), np.where(real == 0, real, unique[places].reshape(real.shape)))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or ufunc not in UFUNCS or options:
            raise OutsideError(f"np.{ufunc.__name__}")
        return apply(UFUNCS[ufunc], *inputs)

    def __array_function__(self, function: Callable[..., Any], types: Any, arguments: Any, options: Any) -> Any:
        if function not in FUNCTIONS:
            raise OutsideError(f"np.{function.__name__}")
        with np.errstate(all="ignore"):
            return FUNCTIONS[function](*arguments, **options)


def apply(operation: str, *inputs: Any) -> Any:
    """Apply one of `OPERATIONS` or `COMPARISONS` elementwise. At least one input has residues."""
    known = next(value for value in inputs if isinstance(value, Residues))
    operands = [known.operand(value) for value in inputs]
    with np.errstate(all="ignore"):
        if operation in COMPARISONS:
            return COMPARISONS[operation](*(x.real for x in operands))
        return OPERATIONS[operation](*operands)


def doubt(x: Residues, number: int) -> np.ndarray:
    """Return the mask of doubtful residues: modulo p if `number` is 0, modulo q if it is 1."""
    mask = x.doubtful[number]
    return np.zeros(x.shape, bool) if mask is None else mask


def _sum_degree(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return (max(a[0] + b[1], b[0] + a[1]), a[1] + b[1]) if a[1] or b[1] else (max(a[0], b[0]), 0)


def _total_degree(degree: tuple[int, int], terms: int) -> tuple[int, int]:
    """Bound the degrees of a sum of `terms` fractions with different denominators."""
    above, below = degree
    return above + max(terms - 1, 0) * below, terms * below


def joint_degree(arrays: Sequence[Residues]) -> tuple[int, int]:
    """Bound the degrees of the elements of several arrays."""
    return max(x.degree[0] for x in arrays), max(x.degree[1] for x in arrays)


def _add(a: Residues, b: Residues) -> Residues:
    return a.computed(lambda m, x, y: x + y, a.real + b.real, b, degree=_sum_degree(a.degree, b.degree))


def _subtract(a: Residues, b: Residues) -> Residues:
    return a.computed(lambda m, x, y: x - y, a.real - b.real, b, degree=_sum_degree(a.degree, b.degree))


def _multiply(a: Residues, b: Residues) -> Residues:
    degree = (a.degree[0] + b.degree[0], a.degree[1] + b.degree[1])
    return a.computed(lambda m, x, y: x * y, a.real * b.real, b, degree=degree)


def _divide(a: Residues, b: Residues) -> Residues:
    degree = (a.degree[0] + b.degree[1], a.degree[1] + b.degree[0])
    quotient = a.computed(lambda m, x, y: x * inverse(y, m), a.real / b.real, b, degree=degree)
    vanishing = np.isinf(b.real) & np.isfinite(a.real)
    quotient = quotient.computed(lambda m, part: np.where(vanishing, 0, part), quotient.real, degree=degree)
    nonzero = (b.real != 0) & np.isfinite(b.real)
    zeros = [None if part is None else nonzero & (part == 0) for part in b.parts]
    shape = quotient.shape
    return quotient.marked(
        *(np.broadcast_to(part, shape) if part is not None and np.any(part) else None for part in zeros)
    )


def _square(x: Residues) -> Residues:
    return _multiply(x, x)


def _power(x: Residues, exponent: Residues) -> Residues:
    count = exponent.real.flat[0] if exponent.size == 1 and exponent.degree == (0, 0) else np.nan
    if count in (0.5, -0.5):
        return _root(x) if count > 0 else _reciprocal_root(x)
    if count != np.rint(count):
        raise OutsideError("a power that is not a constant integer or one half")
    return integer_power(x, int(count))


def integer_power(x: Residues, exponent: int) -> Residues:
    """Compute x to the power of a constant integer."""
    above, below = (abs(exponent) * degree for degree in x.degree)
    result = x.computed(lambda m, part: power(part, abs(exponent), m), x.real ** abs(exponent), degree=(above, below))
    return result if exponent >= 0 else _divide(x.operand(1.0), result)


def _exp(x: Residues) -> Residues:
    exponents = x.parts[1]
    if exponents is None:
        raise OutsideError("an exponential of an exponential, a sine or a cosine")
    x.primes.products |= x.degree[0] > 1 or x.degree[1] > 0
    vanishing = x.real < VANISHES
    # exp(a / b) becomes a new indeterminate, to the power of 1 or -1. Two exponents of degree d may also be equal.
    degree = max(1, *x.degree)
    residues = np.where(vanishing, 0, x.primes.exp(exponents))
    return Residues(x.primes, (residues, None), np.exp(x.real), (degree, degree), (x.doubtful[1], None))


def _root(x: Residues) -> Residues:
    positive = np.isfinite(x.real) & (x.real > 0)
    odd = [
        None if part is None else positive & (root(part, modulus) ** 2 % modulus != part)
        for part, modulus in zip(x.parts, x.primes.moduli, strict=True)
    ]
    if x.degree != (0, 0) and np.any(positive):
        constants = (_is_constant(x[tuple(place)]) for place in np.argwhere(positive))
        x.primes.odd_roots.append(bool(np.any(odd[0])) or all(constants))
    degree = sum(x.degree)
    degrees = (degree, degree) if degree else (0, 0)
    roots = x.computed(lambda m, part: root(part, m), np.sqrt(x.real), degree=degrees)
    return roots.marked(*(mask if mask is not None and np.any(mask) else None for mask in odd))


def _is_constant(x: Residues) -> bool:
    """Tell whether the residue of a number is that of the float64 number, as for a variance of 0 plus 1e-5."""
    return constant(float(x.real), "float64").modulo(x.primes)[0] == x.parts[0]


def _reciprocal_root(x: Residues) -> Residues:
    return _divide(x.operand(1.0), _root(x))


def _logistic(x: Residues) -> Residues:
    return _divide(x.operand(1.0), _add(x.operand(1.0), _exp(_negative(x))))


def _tanh(x: Residues) -> Residues:
    return _subtract(x.operand(1.0), _divide(x.operand(2.0), _add(_exp(_add(x, x)), x.operand(1.0))))


def _exp2(x: Residues) -> Residues:
    return _exp(_multiply(x, x.operand(math.log(2))))


def _negative(x: Residues) -> Residues:
    return x.computed(lambda m, part: -part, -x.real, degree=x.degree)


def _absolute(x: Residues) -> Residues:
    return chosen(x.real < 0, _negative(x), x)


def _circle(x: Residues) -> tuple[Residues, Residues]:
    """Make sine and cosine of the angles x: for a random t(x) with t(-x) = -t(x), 2 t / (1 + t^2) and its cofactor.

    So sin^2 + cos^2 = 1, sin is odd, and cos is even.
    """
    p, angle = x.primes.p, x.parts[0]
    negative = angle > p // 2
    word = (np.where(negative, p - angle, angle) + x.primes.key).astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
    t = ((word ^ (word >> np.uint64(31))) % np.uint64(p)).astype(np.int64)
    t = np.where(angle == 0, 0, np.where(negative, (p - t) % p, t))
    below = inverse((1 + t * t) % p, p)  # -1 is not a square, so 1 + t^2 is not 0
    x.primes.excuse(IDENTITIES, "an identity of sines and cosines may explain it, and we know only a few")

    def function(residues: Integers, real: np.ndarray) -> Residues:
        return Residues(x.primes, (residues, None), real, (2, 2), (x.doubtful[0], None))

    return function(2 * t % p * below % p, np.sin(x.real)), function((1 - t * t) % p * below % p, np.cos(x.real))


def chosen(condition: Any, a: Residues, b: Residues) -> Residues:
    """Choose elements of `a` where the condition is true, and elements of `b` elsewhere."""
    condition = np.asarray(condition.real if isinstance(condition, Residues) else condition) != 0
    return a.merged(lambda x, y: np.where(condition, x, y), b)


def _larger(a: Residues, b: Residues) -> Residues:
    return chosen((a.real >= b.real) | np.isnan(a.real), a, b)


def _smaller(a: Residues, b: Residues) -> Residues:
    return chosen((a.real <= b.real) | np.isnan(a.real), a, b)


def total(x: Residues, axis: Any = None, *, keepdims: bool = False) -> Residues:
    """Sum over an axis, several axes, or all."""
    real = np.sum(x.real, axis=axis, keepdims=keepdims)
    terms = x.size // max(real.size, 1)
    return x.computed(
        lambda m, part: np.sum(part, axis=axis, keepdims=keepdims),
        real,
        degree=_total_degree(x.degree, terms),
        spread=lambda masks: np.any(masks[0], axis=axis, keepdims=keepdims),
    )


def running_total(x: Residues, axis: int) -> Residues:
    """Sum the elements up to each place along an axis."""
    degree = _total_degree(x.degree, x.shape[axis])
    return x.computed(
        lambda m, part: np.cumsum(part, axis=axis),
        np.cumsum(x.real, axis=axis),
        degree=degree,
        spread=lambda masks: np.logical_or.accumulate(masks[0], axis=axis),
    )


def _mean(x: Residues, axis: Any = None, *, keepdims: bool = False) -> Residues:
    sums = total(x, axis=axis, keepdims=keepdims)
    return _divide(sums, x.operand(float(x.size // max(sums.size, 1))))


def extreme(x: Residues, axis: Any = None, *, keepdims: bool = False, initial: Any = None, least: bool = False) -> Any:
    """Find the maximum over an axis, several axes, or all; with `least`, the minimum."""
    axes = tuple(range(x.ndim)) if axis is None else tuple(np.atleast_1d(axis) % x.ndim)
    others = [n for n in range(x.ndim) if n not in axes]
    flat = x.moved(lambda part: part.transpose(*others, *axes).reshape(*(part.shape[n] for n in others), -1))
    if initial is not None:
        bound = x.operand(initial)
        flat = joined(
            np.concatenate, [flat, bound.moved(lambda part: np.broadcast_to(part, (*flat.shape[:-1], 1)))], -1
        )
    places = np.argmin(flat.real, axis=-1) if least else np.argmax(flat.real, axis=-1)
    result = flat.moved(lambda part: np.take_along_axis(part, places[..., None], axis=-1)[..., 0])
    shape = tuple(1 if n in axes else length for n, length in enumerate(x.shape))
    return result.reshape(shape) if keepdims else result


def product(a: Residues, b: Residues) -> Residues:
    """Multiply matrices, or stacks of matrices. Either factor may be a single vector."""
    if a.ndim == 1:
        return product(a.reshape(1, -1), b)[..., 0, :]
    if b.ndim == 1:
        return product(a, b.reshape(-1, 1))[..., 0]
    degree = _total_degree((a.degree[0] + b.degree[0], a.degree[1] + b.degree[1]), a.shape[-1])
    real = a.real @ b.real

    def spread(masks: Sequence[np.ndarray]) -> np.ndarray:
        rows, columns = np.any(masks[0], axis=-1), np.any(masks[1], axis=-2)
        return rows[..., :, None] | columns[..., None, :]

    return a.computed(lambda m, x, y: matmul(x, y, m), real, b, degree=degree, spread=spread)


def joined(join: Callable[..., np.ndarray], arrays: Any, axis: int = 0) -> Residues:
    """Apply np.concatenate or np.stack to arrays. At least one has residues."""
    known = next(array for array in arrays if isinstance(array, Residues))
    operands = [known.operand(array) for array in arrays]
    return operands[0].merged(lambda *parts: join(parts, axis=axis), *operands[1:])


def _where(condition: Any, a: Any, b: Any) -> Residues:
    known = next(value for value in (a, b, condition) if isinstance(value, Residues))
    return chosen(condition, known.operand(a), known.operand(b))


def _split(x: Residues, sections: Any, axis: int = 0) -> list[Residues]:
    counts = range(len(np.split(x.real, sections, axis)))
    return [x.moved(lambda part, n=n: np.split(part, sections, axis)[n]) for n in counts]


OPERATIONS: dict[str, Callable[..., Residues]] = {
    "add": _add,
    "add_any": _add,
    "sub": _subtract,
    "mul": _multiply,
    "div": _divide,
    "neg": _negative,
    "abs": _absolute,
    "square": _square,
    "pow": _power,
    "exp": _exp,
    "exp2": _exp2,
    "expm1": lambda x: _subtract(_exp(x), x.operand(1.0)),
    "tanh": _tanh,
    "logistic": _logistic,
    "sqrt": _root,
    "rsqrt": _reciprocal_root,
    "sin": lambda x: _circle(x)[0],
    "cos": lambda x: _circle(x)[1],
    "matmul": product,
    "max": _larger,
    "min": _smaller,
}
COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "is_finite": np.isfinite,
    "is_nan": np.isnan,
    "is_inf": np.isinf,
}
UFUNCS: dict[np.ufunc, str] = {
    np.add: "add",
    np.subtract: "sub",
    np.multiply: "mul",
    np.divide: "div",
    np.negative: "neg",
    np.absolute: "abs",
    np.square: "square",
    np.power: "pow",
    np.exp: "exp",
    np.tanh: "tanh",
    np.sqrt: "sqrt",
    np.sin: "sin",
    np.cos: "cos",
    np.matmul: "matmul",
    np.maximum: "max",
    np.minimum: "min",
    np.equal: "eq",
    np.not_equal: "ne",
    np.less: "lt",
    np.less_equal: "le",
    np.greater: "gt",
    np.greater_equal: "ge",
    np.isfinite: "is_finite",
    np.isnan: "is_nan",
    np.isinf: "is_inf",
}
FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.where: _where,
    np.clip: lambda x, low, high: apply("min", apply("max", x, low), high),
    np.sum: total,
    np.mean: _mean,
    np.max: extreme,
    np.isneginf: lambda x: np.isneginf(x.real),
    np.concatenate: partial(joined, np.concatenate),
    np.stack: partial(joined, np.stack),
    np.split: _split,
    np.shape: lambda x: x.shape,
    np.broadcast_to: lambda x, shape: x.moved(lambda part: np.broadcast_to(part, shape)),
    np.moveaxis: lambda x, source, target: x.moved(lambda part: np.moveaxis(part, source, target)),
    np.repeat: lambda x, count, axis=None: x.moved(lambda part: np.repeat(part, count, axis)),
}
