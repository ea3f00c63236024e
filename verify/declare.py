"""Declare a contract of your own: a definition, inputs to draw, and an error bound, which we can derive for you.

    # layernorm.py
    import numpy as np
    from llamaspec.verify.declare import declare, sizes

    def layernorm(x, weight, bias, *, eps):
        centered = x - np.mean(x, axis=-1, keepdims=True)
        return centered / np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + eps) * weight + bias

    CONTRACT = declare(
        layernorm,
        arrays={"x": "rows dim", "weight": "dim", "bias": "dim"},
        sizes={"rows": [1, 2, 3, 5], "dim": sizes(8, 32, 128, most=257)},
        options={"eps": [1e-5, 0.5]},
    )

`llamaspec verify --contract layernorm.py --candidate mine.py:layernorm` verifies a function with it.

Sizes that depend on each other are sums and products of `sizes`: `arrays={"x": "rows groups*width"}` gives each group
the same number of channels, and `{"q": "rows 2*pairs+rest"}` rotates at most all features of a head.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from llamaspec.verify.bounds.carried import FLOAT32, Carried, Rounding
from llamaspec.verify.bounds.precision import TINY, Precision
from llamaspec.verify.contract import Arguments, Contract, Expected, Large, Law, as_float64, beyond
from llamaspec.verify.draws.domain import domain as domain_of
from llamaspec.verify.draws.draw import integers, seeds, sizes, values
from llamaspec.verify.draws.reach import FAR

__all__ = ["Ids", "declare", "derived", "sizes", "values"]

BEYOND = beyond(64, 1024, FAR)  # sizes beyond tiles, for every size
MOST = 2**20  # most numbers in an array at such a size


class Ids(NamedTuple):
    """An array of int32 from 0 to `below` - 1, where `below` names a size: `Ids("tokens", below="vocab")`."""

    shape: str
    below: str


def derived(definition: Callable[..., Any], *, rounding: Rounding = FLOAT32):
    """Make `expect` of a contract: a function that calls `definition` with arrays that carry their errors.

    Every operation rounds with `rounding`, and inputs have the dtype of `rounding`. The function raises TypeError for
    operations that `verify.bounds.carried` does not cover.
    """

    def expect(*positional: Any, **named: Any) -> Expected | tuple[Expected, ...]:
        def carried(value: Any) -> Any:
            floating = isinstance(value, np.ndarray) and value.dtype.kind in "fV"
            if not floating:
                return value
            exact = as_float64(value)
            return Carried(exact, np.where(np.abs(exact) < TINY, np.abs(exact), 0.0), rounding=rounding)

        results = definition(*map(carried, positional), **named)
        outputs = tuple(map(_expected, results if isinstance(results, tuple) else (results,)))
        return outputs[0] if len(outputs) == 1 else outputs

    return expect


def _expected(result: Any) -> Expected:
    if not isinstance(result, Carried):
        zeros = np.zeros(np.shape(result))
        return Expected(np.asarray(result), zeros, zeros, zeros)
    return Expected(result.value, result.error, result.error, np.maximum(result.size, np.abs(result.value)))


def declare(
    definition: Callable[..., Any],
    *,
    arrays: Mapping[str, str | Ids],
    sizes: Mapping[str, Sequence[int] | st.SearchStrategy],
    options: Mapping[str, Sequence[Any]] | None = None,
    draws: Mapping[str, st.SearchStrategy] | None = None,
    expect: Callable[..., Expected | tuple[Expected, ...]] | None = None,
    laws: Sequence[Law] = (),
    large: Mapping[str, Sequence[int]] | None = None,
    domain: str = "",
    bound: str = "",
) -> Contract:
    """Declare a contract for what `definition` computes in float64.

    `arrays` gives the shape of each array argument as names of `sizes`, or an `Ids` for an array of ids. A dimension
    may be a sum or a product of sizes and whole numbers, such as `groups*width` or `2*pairs+rest`. An argument with the
    name of a size gets that size. `options` gives the values of the other arguments. We draw the numbers of arrays from
    `values(-4, 4)`, or from the strategy that `draws` gives for the array. `expect` takes the arguments of the
    definition, and returns exact values and bounds. Without it, we derive them (`verify.bounds.carried` says for which
    code). `large` gives sizes larger than a kernel's tile, for one dimension at a time.

    Raises ValueError if the definition has an argument that neither `arrays`, `options` nor `sizes` describes, if it
    lacks an argument that they describe, if `sizes` lacks a size of a shape, and if a dimension is not such a sum or
    product.
    """
    options, draws = dict(options or {}), dict(draws or {})
    parameters = inspect.signature(definition).parameters
    if missing := [name for name in parameters if name not in {*arrays, *options, *sizes}]:
        what = f"{definition.__name__} takes {', '.join(missing)}"
        raise ValueError(f"{what}, but neither `arrays` nor `options` describes this argument")
    if unknown := [name for name in (*arrays, *options) if name not in parameters]:
        raise ValueError(f"{definition.__name__} has no argument {', '.join(unknown)}")
    dimensions = {name: [_Dimension(text) for text in _shape_of(shape).split()] for name, shape in arrays.items()}
    used = {size for axes in dimensions.values() for axis in axes for size in axis.names}
    if used - {*sizes}:
        raise ValueError(f"`arrays` uses dimensions that `sizes` lacks: {', '.join(sorted(used - {*sizes}))}")
    shapes = {
        name: size if isinstance(size, st.SearchStrategy) else st.sampled_from(list(size))
        for name, size in sizes.items()
    }
    numbers = {name: seeds if isinstance(shape, Ids) else values(-4, 4) for name, shape in arrays.items()}

    def arguments(*, precision: Precision, **drawn: Any) -> Arguments:
        named = {}
        for name in parameters:
            if name not in arrays:
                named[name] = drawn[name]
                continue
            shape = arrays[name]
            lengths = [axis.length(drawn) for axis in dimensions[name]]
            if isinstance(shape, Ids):
                named[name] = integers(drawn[name], name, *lengths, below=drawn[shape.below])
            else:
                named[name] = drawn[name].array(name, *lengths, precision=precision)
        return named

    return Contract(
        definition=definition,
        shapes=shapes,
        values={**numbers, **draws, **{name: st.sampled_from(list(choices)) for name, choices in options.items()}},
        arguments=arguments,
        expect=_naming_sizes(expect or derived(definition), list(sizes)),
        domain=domain or "; ".join(f"{name} [{_shape_text(shape)}]" for name, shape in arrays.items()),
        bound=bound or ("given by `expect`" if expect else "hard and alarm: derived from the definition, step by step"),
        laws=laws,
        large=_beyond(sizes, dimensions, large),
    )


class _Dimension:
    """A dimension of an array: a size, or a sum or product of sizes and whole numbers.

    Raises ValueError for any other text.
    """

    def __init__(self, text: str):
        self.text = text
        try:
            self.tree = ast.parse(text, mode="eval").body
            self.names = frozenset(_names(self.tree))
        except (SyntaxError, TypeError):
            raise ValueError(
                f"cannot read the dimension {text}: expected sizes and whole numbers with + and *, without spaces"
            ) from None

    def length(self, drawn: Mapping[str, Any]) -> int:
        """Compute the length from the drawn sizes."""

        def value(node: ast.expr) -> int:
            if isinstance(node, ast.BinOp):
                left, right = value(node.left), value(node.right)
                return left + right if isinstance(node.op, ast.Add) else left * right
            return drawn[node.id] if isinstance(node, ast.Name) else node.value  # type: ignore[attr-defined]

        return value(self.tree)


def _names(node: ast.expr) -> Iterator[str]:
    """Yield the names in a sum or product. Raises TypeError for other expressions."""
    match node:
        case ast.BinOp(left, ast.Add() | ast.Mult(), right):
            yield from _names(left)
            yield from _names(right)
        case ast.Name(name):
            yield name
        case ast.Constant(int()):
            pass
        case _:
            raise TypeError


def _naming_sizes(expect: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Make `expect` say what to do if the definition cannot compute arrays of the drawn sizes."""

    def checked(*positional: Any, **named: Any) -> Any:
        try:
            return expect(*positional, **named)
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"{error}; if some of {', '.join(names)} depend on each other, write a dimension in `arrays` as a sum "
                "or product of sizes, such as groups*width"
            ) from error

    return checked


def _shape_of(shape: str | Ids) -> str:
    return shape.shape if isinstance(shape, Ids) else shape


def _shape_text(shape: str | Ids) -> str:
    return f"{shape.shape}] ids [0, {shape.below}" if isinstance(shape, Ids) else shape


def _beyond(
    sizes: Mapping[str, Any], dimensions: Mapping[str, Sequence[_Dimension]], large: Mapping[str, Sequence[int]] | None
) -> Large:
    """Make the large draws, one large size at a time: from `large`, or by default for every name in `sizes`.

    The other sizes stay small.
    """
    small = {name: _small(size) for name, size in sizes.items()}
    if large is None:

        def most_numbers(drawn: Mapping[str, int]) -> int:
            return max((prod(axis.length(drawn) for axis in axes) for axes in dimensions.values()), default=0)

        large = {
            name: [
                size
                for size in BEYOND
                if size <= _upper_end(sizes[name]) and most_numbers({**small, name: size}) <= MOST
            ]
            for name in sizes
        }
    return Large(large, beside={name: [size] for name, size in small.items()})


SMALL = 5  # about the size of all other dimensions while one is large


def _small(size: Sequence[int] | st.SearchStrategy) -> int:
    if isinstance(size, Sequence):
        return list(size)[-1]
    values = domain_of(size)
    low, high = values.integers or (SMALL, SMALL)
    return min(values.drawn or range(low, high + 1), key=lambda value: (abs(value - SMALL), value))


def _upper_end(size: Sequence[int] | st.SearchStrategy) -> int:
    """Return the largest value of `size`, or `MOST` for a strategy that is not a range of integers."""
    values = None if isinstance(size, Sequence) else domain_of(size)
    return values.integers[1] if values and values.integers else MOST
