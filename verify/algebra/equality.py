"""Compare a candidate's formula with the definition: both are evaluated with random residues modulo random primes.

If the formulas differ, their difference is a fraction of two polynomials. For random elements, a polynomial of degree d
that is not zero is zero with a probability of at most d / q (Schwartz, 1980, https://doi.org/10.1145/322217.322225). We
bound d while we evaluate, and repeat until a wrong formula passes with a probability below 1e-12.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llamaspec.verify.algebra.jaxprs import Walk
from llamaspec.verify.algebra.kernels import RULES
from llamaspec.verify.algebra.primes import BITS, Primes
from llamaspec.verify.algebra.residues import OutsideError, Residues
from llamaspec.verify.bounds.precision import Precision
from llamaspec.verify.contract import Arguments, Contract
from llamaspec.verify.draws.domain import narrowed, parsed
from llamaspec.verify.draws.draw import OF_THE_CALL, Draw, Values
from llamaspec.verify.draws.drawing import uniform
from llamaspec.verify.judging.formula import DIFFERENT, EQUAL, PASSES, UNDECIDED, Formula

# The product of an equation in r and in -r, for a root r, has twice the degree and no root. Numbers with more than six
# roots are seldom compared, because an element is a square only with a probability of 1/2.
ROOTS = 2**6
TRIES = 64  # most trials for a shape
GROSS = 1e-3  # relative error of float64 numbers that no rounding explains
CANCELED = 1e-12  # the same as an absolute error, since tanh(-50) + 1 is 0 in float64
SHAPES = 12  # usual shapes
LARGE = 6  # shapes beyond a kernel's tile in one dimension
PAIRS = 6  # the same in two dimensions
MOST = 2**19  # most numbers of all inputs of a shape


class _Comparison(NamedTuple):
    """A comparison for one shape."""

    trials: int
    difference: str = ""  # where the formulas differ, or ""
    estimated: bool = False  # the probability is an estimate


class _UndecidedError(Exception):
    """There is no verdict, for the reason in the message."""


def compare(
    contract: Contract,
    function: Callable[..., Any],
    *,
    precision: Precision,
    only: Mapping[str, Sequence[Any]],
    seed: int,
    seconds: float = math.inf,
) -> Formula:
    """Compare the formula of a JAX function with the definition, for several shapes, the smallest first.

    After `seconds`, the shape that is under way is left out, and no other begins.
    """
    start = monotonic()
    end = start + seconds
    rng = np.random.default_rng(seed)
    shapes = trials = 0
    estimated = False
    try:
        for draw in _draws(contract, narrowed(contract, only), seed, precision):
            arguments = contract.arguments(precision=precision, **draw)
            if not any(map(_is_input, arguments.values())):  # for example, all scores are hidden
                continue
            comparison = _compared(contract, function, arguments, rng, end)
            trials += comparison.trials
            if comparison.difference:
                return Formula(DIFFERENT, comparison.difference, draw, shapes, trials, monotonic() - start)
            estimated |= comparison.estimated
            shapes += 1
    except TimeoutError:
        if not shapes:
            return Formula(UNDECIDED, f"the smallest shape took more than {seconds:g} s", seconds=seconds)
    except _UndecidedError as error:
        return Formula(UNDECIDED, str(error), {}, shapes, trials, monotonic() - start)
    if not shapes:
        return Formula(UNDECIDED, "the op has no floating-point inputs", seconds=monotonic() - start)
    return Formula(EQUAL, "", {}, shapes, trials, monotonic() - start, estimated)


def _draws(contract: Contract, only: Mapping[str, Sequence[Any]], seed: int, precision: Precision) -> Iterator[Draw]:
    """Yield draws with normal numbers, the smallest first."""
    usual = itertools.islice(uniform(contract, None, only, seed=seed), SHAPES)
    narrowings = (
        *contract.large.narrowings(only, most=LARGE),
        *contract.large.pair_narrowings(only, most=PAIRS),
    )
    large = [next(uniform(contract, None, parsed(sizes), seed=seed)) for sizes in narrowings]
    sized = []
    for draw in (*usual, *large):
        normal = {
            name: replace(value, kind="normal", exponent=0) if isinstance(value, Values) else value
            for name, value in draw.items()
            if name not in OF_THE_CALL
        }
        try:
            arguments = contract.arguments(precision=precision, **normal)
        except ValueError:  # the sizes of large draws, together, may be too large
            continue
        size = sum(value.size for value in arguments.values() if isinstance(value, np.ndarray))
        sized.append((size, len(sized), normal))
    for size, _, normal in sorted(sized, key=lambda entry: entry[:2]):
        if size <= MOST:
            yield normal


def _is_input(value: Any) -> bool:
    """Tell whether an argument gets random residues: not integers, and not a mask of 0 and -inf."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fV":
        return False
    numbers = value.astype(np.float64)
    return bool(np.any(np.isfinite(numbers) & (numbers != 0)))


def _compared(
    contract: Contract, function: Callable[..., Any], arguments: Arguments, rng: np.random.Generator, end: float
) -> _Comparison:
    """Compare for one set of arguments.

    We compare only certain residues, so that we repeat until each number has been certain in enough trials. If the
    number under a root is a square for all inputs, as in sqrt(x * x), the root's sign depends on the trial. So we also
    repeat until each root has met a number that is not a square.
    """
    jaxpr = _traced(contract, function, arguments)
    agreed: list[np.ndarray] = []
    odd_roots: list[bool] = []
    needed = 1
    difference = ""
    for count in range(1, TRIES + 1):
        primes = Primes.random(rng)
        inputs = {
            name: Residues.random(primes, value.astype(np.float64), rng) if _is_input(value) else value
            for name, value in arguments.items()
        }
        expected, actual = _evaluated(contract, jaxpr, inputs, end)
        odd_roots = [a or b for a, b in zip(odd_roots or primes.odd_roots, primes.odd_roots, strict=True)]
        agreed = agreed or [np.zeros(x.shape, int) for x in expected]
        for number, (x, y) in enumerate(zip(expected, actual, strict=True)):
            near, equal = _near(x, y, GROSS), x.parts[0] == y.parts[0]
            if not np.all(near):
                return _Comparison(count, _difference(x, y, ~near))
            compared = _is_certain(x, y)
            agreed[number] += (compared & equal) | ~np.isfinite(x.real)
            needed = max(needed, _needed(x, y))
            if not difference and np.any(compared & ~equal):
                difference = _difference(x, y, compared & ~equal)
                if primes.slack and np.all(_near(x, y, primes.slack)):
                    raise _UndecidedError(f"{difference}; {primes.excuse_text}")
        if all(odd_roots):
            if difference:
                return _Comparison(count, difference)
            if all(np.all(part >= needed) for part in agreed):
                return _Comparison(count, estimated=primes.products)
    if not all(odd_roots):
        raise _UndecidedError("it takes the root of a square, so a sign is unknown in the algebra")
    raise _UndecidedError("some numbers depend on too many roots")


def _near(x: Residues, y: Residues, slack: float) -> np.ndarray:
    """Compare the float64 numbers of the definition and of the candidate."""
    largest = np.max(np.abs(x.real), initial=0, where=np.isfinite(x.real))
    return np.isclose(y.real, x.real, rtol=0, atol=max(slack * largest, CANCELED), equal_nan=True)


def _is_certain(x: Residues, y: Residues) -> np.ndarray:
    """Find the numbers that we can compare. Numbers that are infinite or NaN have no residues."""
    certain = np.isfinite(x.real)
    for mask in (x.doubtful[0], y.doubtful[0]):
        certain = certain if mask is None else certain & ~mask
    return certain


def _needed(x: Residues, y: Residues) -> int:
    """Compute in how many of `TRIES` trials the formulas must agree."""
    roots = ROOTS if x.primes.odd_roots else 1
    degree = roots * max(x.degree[0] + y.degree[1], y.degree[0] + x.degree[1], 1)
    for trials in range(1, TRIES // 2):
        if math.comb(TRIES, trials) * min(1.0, degree / 2**BITS) ** trials <= PASSES:
            return trials
    raise _UndecidedError(f"the degree of the formulas is {degree}, too large for primes of {BITS + 1} bits")


def _difference(x: Residues, y: Residues, wrong: np.ndarray) -> str:
    place = tuple(np.argwhere(wrong)[0])
    at = ", ".join(map(str, place))
    expected, actual = float(x.real[place]), float(y.real[place])
    return f"at [{at}] another formula: without rounding, expected {expected:.15g}, got {actual:.15g}"


def _traced(contract: Contract, function: Callable[..., Any], arguments: Arguments) -> Any:
    """Trace the candidate. Only arguments with random residues are abstract."""
    positional, keyword = contract.split(arguments)
    abstract = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in arguments.items() if _is_input(value)
    }

    def call(inputs: dict[str, Any]) -> Any:
        def passed(part: Arguments) -> Arguments:
            return {
                name: inputs[name] if name in inputs else jnp.asarray(value) if isinstance(value, np.ndarray) else value
                for name, value in part.items()
            }

        return function(*passed(positional).values(), **passed(keyword))

    try:
        return jax.make_jaxpr(call)(abstract)
    except Exception as error:
        raise _UndecidedError(f"JAX cannot trace the candidate: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    """Return the first line of a message, for JAX adds advice and paths in further lines."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _evaluated(contract: Contract, jaxpr: Any, inputs: Arguments, end: float) -> tuple[list[Residues], list[Residues]]:
    """Evaluate the definition and the candidate. Both must return floating-point numbers of the same shapes."""
    positional, keyword = contract.split(inputs)
    known = next(value for value in inputs.values() if isinstance(value, Residues))
    try:
        results = contract.definition(*positional.values(), **keyword)
        expected = [known.operand(x) for x in (results if isinstance(results, tuple) else (results,))]
    except OutsideError as error:
        raise _UndecidedError(f"the definition uses {error}, which is outside the algebra") from error
    except Exception as error:
        raise _UndecidedError(f"the definition cannot be evaluated: {_one_line(error)}") from error
    ordered = [inputs[name] for name in sorted(inputs) if isinstance(inputs[name], Residues)]  # as JAX orders a dict
    try:
        actual = [known.operand(x) for x in Walk(RULES, end=end).evaluate(jaxpr, *ordered)]
    except TimeoutError:
        raise
    except OutsideError as error:
        raise _UndecidedError(f"the candidate uses {error}, which is outside the algebra") from error
    except Exception as error:
        raise _UndecidedError(f"the candidate's jaxpr cannot be evaluated: {_one_line(error)}") from error
    if [x.shape for x in expected] != [x.shape for x in actual]:
        shapes = [" and ".join(str(list(x.shape)) for x in part) for part in (expected, actual)]
        raise _UndecidedError(f"expected the shape {shapes[0]}, got {shapes[1]}")
    return expected, actual
