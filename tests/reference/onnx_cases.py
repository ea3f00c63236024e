"""The node tests of ONNX: inputs, attributes and expected outputs of each operator."""

import functools
import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx.backend.test.case import node


class Case(NamedTuple):
    name: str
    op: str
    attributes: Mapping[str, Any]
    inputs: Sequence[np.ndarray | None]  # in the order of the operator's signature; None for an omitted one
    outputs: Sequence[np.ndarray | None]

    def input(self, index: int) -> np.ndarray | None:
        """Return an input, or None if the case omits it."""
        return self.inputs[index] if index < len(self.inputs) else None


@functools.cache
def node_cases(op: str) -> list[Case]:
    """List the cases of an operator, except for cases that only expand it into other operators.

    We import only the operator's module: `collect_testcases` imports all modules, and each computes its cases at
    import, which takes 6 seconds.
    """
    with warnings.catch_warnings():  # ONNX's code warns of overflowing casts, divisions by zero and deprecated NumPy
        warnings.simplefilter("ignore")
        importlib.import_module(f"{node.__name__}.{op.lower()}")

    cases = []
    for test in node._NodeTestCases:
        assert test.model is not None and test.data_sets is not None
        if "_expanded" in test.name or [n.op_type for n in test.model.graph.node] != [op]:
            continue
        [only] = test.model.graph.node
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in only.attribute}
        [(inputs, outputs)] = test.data_sets
        cases.append(Case(test.name, op, attributes, spread(only.input, inputs), spread(only.output, outputs)))
    return cases


def spread(names: Sequence[str], arrays: Sequence[Any]) -> list[Any]:
    """Put `arrays` at the positions that have a name, and None at the others.

    >>> spread(["Q", "", "V"], [1, 2])
    [1, None, 2]
    """
    remaining = iter(arrays)
    placed = [next(remaining) if name else None for name in names]
    assert next(remaining, None) is None
    return placed
