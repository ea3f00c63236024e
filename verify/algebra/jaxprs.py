"""Evaluate a jaxpr with residues instead of floating-point numbers.

Integers, booleans and floating-point constants keep their values. The rules for Pallas kernels are in `kernels`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from llamaspec.verify.algebra.concrete import MOVES, Parameters, arithmetic
from llamaspec.verify.algebra.residues import (
    COMPARISONS,
    OPERATIONS,
    OutsideError,
    Residues,
    apply,
    doubt,
    extreme,
    integer_power,
    joined,
    joint_degree,
    product,
    running_total,
    total,
)

Values = list[Any]  # residues, and concrete arrays of NumPy or JAX

# Other primitives that only move elements: JAX moves their indices.
INDEXED: dict[str, slice] = {"gather": slice(0, 1), "scatter": slice(0, None, 2)}
IDENTITIES = ("copy", "copy_p", "reduce_precision", "stop_gradient", "optimization_barrier", "device_put")
CALLS = ("call_jaxpr", "jaxpr", "fun_jaxpr", "call")  # parameters that hold the jaxpr of a call


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Return a jaxpr and its constants. jax 0.12 stores the constants in the jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def is_concrete(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic | jax.Array | int | float)


class Walk:
    """Evaluates jaxprs with `rules`: for the name of a primitive, a function of this walk, its inputs and parameters.

    With `everywhere`, rules apply even if all inputs of an equation are concrete. The walk ends at `end`, a time of
    `time.monotonic`.
    """

    def __init__(self, rules: Mapping[str, "Rule"], *, everywhere: bool = False, end: float = math.inf):
        self.rules, self.everywhere, self.end = rules, everywhere, end

    def evaluate(self, jaxpr: Any, *inputs: Any) -> Values:
        """Evaluate a jaxpr.

        Raises OutsideError for a primitive outside the algebra, and TimeoutError after the end.
        """
        return self.run(*opened(jaxpr), inputs)

    def run(self, body: Any, constants: Sequence[Any], inputs: Sequence[Any]) -> Values:
        """Evaluate the equations of an open jaxpr in order. Raises exceptions as `evaluate` does."""
        if monotonic() > self.end:
            raise TimeoutError
        values: dict[Any, Any] = dict(zip(body.constvars, constants, strict=True))
        values.update(zip(body.invars, inputs, strict=True))

        def read(atom: Any) -> Any:
            if not isinstance(atom, core.Literal):
                return values[atom]
            aval: Any = atom.aval
            return np.asarray(atom.val, aval.dtype)

        for equation in body.eqns:
            results = self.compute(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in body.outvars]

    def compute(self, equation: Any, inputs: Values) -> Values:
        """Compute the results of one equation."""
        name, parameters = equation.primitive.name, equation.params
        concrete = all(map(is_concrete, inputs))
        if name in self.rules and (self.everywhere or not concrete):
            return self.rules[name](self, inputs, parameters)
        if concrete:
            return self._concrete(equation, [np.asarray(value) for value in inputs])
        if name in OPERATIONS or name in COMPARISONS:
            return [apply(name, *inputs)]
        if name in MOVES:
            return _moved(name, inputs, parameters)
        if name in INDEXED:
            return _moved_by_index(equation, inputs)
        if name in IDENTITIES:
            return inputs
        if (key := _call(parameters)) and not name.endswith("map"):
            return self.evaluate(parameters[key], *inputs)
        raise OutsideError(f"the primitive {name}")

    def _concrete(self, equation: Any, inputs: list[np.ndarray]) -> Values:
        name, parameters = equation.primitive.name, equation.params
        with np.errstate(all="ignore"):
            if name in MOVES:
                results = MOVES[name][1](inputs, parameters)
                return results if isinstance(results, list) else [np.asarray(results)]
            if (result := arithmetic(name, inputs, parameters)) is not None:
                return [result]
        if name == "jit":
            return self.evaluate(parameters["jaxpr"], *inputs)
        return bound(equation, inputs)


Rule = Callable[[Walk, Values, Parameters], Values]


def bound(equation: Any, inputs: Sequence[Any], **changes: Any) -> Values:
    """Let JAX compute an equation with concrete inputs."""
    parameters = equation.primitive.get_bind_params(equation.params)
    if isinstance(parameters, tuple):  # jax 0.11 returns functions to call, too
        functions, parameters = parameters
        inputs = [*functions, *inputs]
    results = equation.primitive.bind(*inputs, **{**parameters, **changes})
    return list(results) if equation.primitive.multiple_results else [results]


def _call(parameters: Parameters) -> str:
    """Return the name of the parameter that holds the jaxpr of a call, or ""."""
    return next((key for key in CALLS if key in parameters), "")


def _moved(name: str, inputs: Values, parameters: Parameters) -> Values:
    """Move the elements of some operands. Residues among the others decide only what moves."""
    of_data, move = MOVES[name]
    places = range(len(inputs))[of_data]
    known = next((inputs[place] for place in places if isinstance(inputs[place], Residues)), None)
    others = [value.real != 0 if isinstance(value, Residues) else np.asarray(value) for value in inputs]
    if known is None:
        results = move(others, parameters)
        return results if isinstance(results, list) else [results]
    operands = {place: known.operand(inputs[place]) for place in places}

    def all_moved(part: Callable[[Residues], Any]) -> list[np.ndarray]:
        arrays = [part(operands[n]) if n in operands else others[n] for n in range(len(inputs))]
        results = move(arrays, parameters)
        return results if isinstance(results, list) else [np.asarray(results)]

    def masks(number: int) -> Sequence[np.ndarray | None]:
        certain = all(x.doubtful[number] is None for x in operands.values())
        return [None] * len(reals) if certain else all_moved(lambda x: doubt(x, number))

    firsts, reals = all_moved(lambda x: x.parts[0]), all_moved(lambda x: x.real)
    in_both = all(x.parts[1] is not None for x in operands.values())
    seconds = all_moved(lambda x: x.parts[1]) if in_both else [None] * len(firsts)
    degree = joint_degree(list(operands.values()))
    return [
        Residues(known.primes, (first, second), real, degree, doubtful)
        for first, second, real, doubtful in zip(
            firsts, seconds, reals, zip(masks(0), masks(1), strict=True), strict=True
        )
    ]


def _moved_by_index(equation: Any, inputs: Values) -> Values:
    """Move the elements of some operands to where JAX moves their indices."""
    places = range(len(inputs))[INDEXED[equation.primitive.name]]
    known = next(value for value in inputs if isinstance(value, Residues))
    if any(isinstance(value, Residues) for n, value in enumerate(inputs) if n not in places):
        raise OutsideError("an index that is a floating-point number")
    operands = [known.operand(inputs[place]) for place in places]
    starts = np.cumsum([0, *(x.size for x in operands)])
    indices = list(inputs)
    for place, start, x in zip(places, starts[:-1], operands, strict=True):
        indices[place] = (start + np.arange(x.size, dtype=np.int32)).reshape(x.shape)
    changes = {"fill_value": -1} if "fill_value" in equation.params else {}
    flat = joined(np.concatenate, [x.reshape(-1) for x in operands])
    results = []
    for result in bound(equation, indices, **changes):
        where = np.asarray(result)
        moved = flat.moved(lambda part, where=where: part[where])
        real = np.where(where < 0, np.nan, moved.real)
        results.append(Residues(moved.primes, moved.parts, real, moved.degree, moved.doubtful))
    return results


def _dot(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    """Multiply along the contracted axes, for each entry of the batch axes."""
    if all(map(is_concrete, inputs)):
        return [jax.lax.dot_general_p.bind(*inputs, **parameters)]
    known = next(value for value in inputs if isinstance(value, Residues))
    left, right = (known.operand(value) for value in inputs)
    (left_sum, right_sum), (left_batch, right_batch) = parameters["dimension_numbers"]
    left_rest = [n for n in range(left.ndim) if n not in (*left_sum, *left_batch)]
    right_rest = [n for n in range(right.ndim) if n not in (*right_sum, *right_batch)]
    batch = tuple(left.shape[n] for n in left_batch)
    rows, columns = tuple(left.shape[n] for n in left_rest), tuple(right.shape[n] for n in right_rest)
    terms = int(np.prod([left.shape[n] for n in left_sum], dtype=int))

    def matrices(x: Residues, axes: Sequence[int], *shape: int) -> Residues:
        return x.moved(lambda part: part.transpose(*axes).reshape(*batch, *shape))

    a = matrices(left, (*left_batch, *left_rest, *left_sum), int(np.prod(rows, dtype=int)), terms)
    b = matrices(right, (*right_batch, *right_sum, *right_rest), terms, int(np.prod(columns, dtype=int)))
    return [product(a, b).reshape(*batch, *rows, *columns)]


def _while(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    of_condition, of_body = parameters["cond_nconsts"], parameters["body_nconsts"]
    condition_inputs, body_inputs = inputs[:of_condition], inputs[of_condition : of_condition + of_body]
    carry = inputs[of_condition + of_body :]
    while bool(_outcome(walk.evaluate(parameters["cond_jaxpr"], *condition_inputs, *carry)[0])):
        carry = walk.evaluate(parameters["body_jaxpr"], *body_inputs, *carry)
    return carry


def _outcome(value: Any) -> Any:
    return value.real if isinstance(value, Residues) else value


def _cond(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    branches = parameters["branches"]
    index = min(max(int(_outcome(inputs[0])), 0), len(branches) - 1)
    return walk.evaluate(branches[index], *inputs[1:])


def _scan(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    if "num_consts" in parameters:
        constants, carries = parameters["num_consts"], parameters["num_carry"]
    else:  # jax 0.12
        constants, carries = (len(part) for part in parameters["ft_in"].unpack()[:2])
    constant, carry, xs = inputs[:constants], inputs[constants : constants + carries], inputs[constants + carries :]
    xs = [x if isinstance(x, Residues) else np.asarray(x) for x in xs]
    length = parameters["length"]
    order = range(length)[::-1] if parameters["reverse"] else range(length)
    slices: dict[int, list[Any]] = {}
    for step in order:
        results = walk.evaluate(parameters["jaxpr"], *constant, *carry, *(x[step] for x in xs))
        carry, slices[step] = results[:carries], results[carries:]
    stacked = []
    body, _ = opened(parameters["jaxpr"])
    for number, atom in enumerate(body.outvars[carries:]):
        parts = [slices[step][number] for step in range(length)]
        if any(isinstance(part, Residues) for part in parts):
            stacked.append(np.stack(parts))
        else:
            stacked.append(np.stack(parts) if parts else np.zeros((0, *atom.aval.shape), atom.aval.dtype))
    return [*carry, *stacked]


def _convert(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    (value,), dtype = inputs, parameters["new_dtype"]
    if not isinstance(value, Residues):
        return [jnp.asarray(value).astype(dtype)]
    if not jnp.issubdtype(dtype, jnp.floating):
        raise OutsideError(f"a conversion of floating-point numbers to {np.dtype(dtype).name}")
    return [value]


def _of_one(rule: Callable[[Residues, Parameters], Any]) -> Rule:
    """Make a rule for a primitive with one operand."""

    def apply_rule(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
        (x,) = inputs
        return [rule(x, parameters)]

    return apply_rule


def _extreme_place(x: Residues, parameters: dict[str, Any], *, least: bool) -> np.ndarray:
    (axis,) = parameters["axes"]
    place = np.argmin(x.real, axis=axis) if least else np.argmax(x.real, axis=axis)
    return place.astype(parameters["index_dtype"])


def _clamp(walk: Walk, inputs: Values, parameters: Parameters) -> Values:
    low, x, high = inputs
    return [apply("min", apply("max", x, low), high)]


def _running(x: Residues, parameters: dict[str, Any]) -> Residues:
    axis = parameters["axis"]
    if not parameters["reverse"]:
        return running_total(x, axis)
    sums = running_total(x.moved(lambda part: np.flip(part, axis)), axis)
    return sums.moved(lambda part: np.flip(part, axis))


RULES: dict[str, Rule] = {
    "dot_general": _dot,
    "while": _while,
    "cond": _cond,
    "scan": _scan,
    "clamp": _clamp,
    "convert_element_type": _convert,
    "reduce_sum": _of_one(lambda x, parameters: total(x, tuple(parameters["axes"]))),
    "reduce_max": _of_one(lambda x, parameters: extreme(x, tuple(parameters["axes"]))),
    "reduce_min": _of_one(lambda x, parameters: extreme(x, tuple(parameters["axes"]), least=True)),
    "argmax": _of_one(partial(_extreme_place, least=False)),
    "argmin": _of_one(partial(_extreme_place, least=True)),
    "integer_pow": _of_one(lambda x, parameters: integer_power(x, parameters["y"])),
    "cumsum": _of_one(_running),
}
