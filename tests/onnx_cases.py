"""The node tests of ONNX: for each operator some inputs, attributes, and the outputs that they ought to give."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx


class Case(NamedTuple):
    name: str
    op: str
    attributes: Mapping[str, Any]
    inputs: Sequence[np.ndarray | None]  # in the order of the operator's signature, None where one is not given
    outputs: Sequence[np.ndarray | None]

    def input(self, index: int) -> np.ndarray | None:
        """An input that may be missing."""
        return self.inputs[index] if index < len(self.inputs) else None


@functools.cache
def node_cases() -> dict[str, list[Case]]:
    """The cases of each operator, without those that only spell an operator out in terms of others."""
    # collect_testcases can be trusted once a process and unfiltered: what its argument leaves out never comes back.
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():  # casts that overflow, divisions by zero, deprecated NumPy: theirs, not ours
        warnings.simplefilter("ignore")
        collected = collect_testcases()

    cases: dict[str, list[Case]] = {}
    for test in collected:
        assert test.model is not None and test.data_sets is not None
        if "_expanded" in test.name or len(test.model.graph.node) != 1:
            continue
        [node] = test.model.graph.node
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        [(inputs, outputs)] = test.data_sets
        case = Case(test.name, node.op_type, attributes, spread(node.input, inputs), spread(node.output, outputs))
        cases.setdefault(case.op, []).append(case)
    return cases


def spread(names: Sequence[str], arrays: Sequence[Any]) -> list[Any]:
    """`arrays` in the places that have a name.

    >>> spread(["Q", "", "V"], [1, 2])
    [1, None, 2]
    """
    remaining = iter(arrays)
    placed = [next(remaining) if name else None for name in names]
    assert next(remaining, None) is None
    return placed
