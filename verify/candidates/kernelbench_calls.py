"""Call the modules of a KernelBench problem (https://arxiv.org/abs/2502.10517) as ops are called.

A problem is a file with a class `Model`, its replacement `ModelNew`, and the functions `get_init_inputs` and
`get_inputs`. `verify.candidates.worker` loads this file in the candidate's process, so it imports nothing of this
project, and torch only if the arrays are torch's.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

Call = Callable[..., Any]


class Problem:
    """A class of a problem, whose modules are made once for the arguments that they are made with."""

    def __init__(self, module: Any, name: str):
        self.kind = getattr(module, name)
        self.given = list(getattr(module, "get_init_inputs", list)())
        self.inputs = getattr(module, "get_inputs", None)
        self.made: dict[str, Any] = {}

    def __call__(self, *arrays: Any, made_with: list | None = None, **named: Any) -> Any:
        arguments = self.given if made_with is None else made_with
        key = repr(arguments)
        if key not in self.made:
            self.made[key] = self.kind(*arguments)
        module = self.made[key]
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(arrays[0], torch.Tensor):
            return (module if callable(module) else module.forward)(*arrays, **named)
        with torch.no_grad():
            return module.to(arrays[0].device)(*arrays, **named)


def ranks(problem: Problem) -> Call:
    """A function of nothing: the number of axes of each input, made without memory where torch can."""

    def call() -> np.ndarray:
        torch = sys.modules.get("torch")
        with torch.device("meta") if torch else nullcontext():
            inputs = problem.inputs() if problem.inputs else []
        return np.array([getattr(one, "ndim", 0) for one in inputs], np.int64)

    return call


def as_defined(problem: Problem) -> Call:
    """Call it with the arguments of the definition in order, and those by name that `forward` takes."""
    taken = inspect.signature(problem.kind.forward).parameters

    def call(*positional: Any, **named: Any) -> Any:
        return problem(*positional, **{name: value for name, value in named.items() if name in taken})

    return call


def product(problem: Problem) -> Call:
    """A @ B, where the op multiplies with the transpose of its second argument."""
    return lambda x, weight: problem(x, weight.T)


def product_with_vector(problem: Problem) -> Call:
    """A @ b with b [cols, 1]."""
    return lambda x, weight: problem(weight, x[:, None])[:, 0]


def over_channels(problem: Problem) -> Call:
    """RMSNorm over the second of four axes, for so many features, without a weight: that is multiplied afterwards."""

    def call(x: Any, weight: Any, *, eps: float) -> Any:
        y = problem(x.reshape(*x.shape, 1, 1), made_with=[x.shape[1], eps])
        return y.reshape(*x.shape) * weight

    return call


def gate_alone(problem: Problem) -> Call:
    """SiLU, which is SwiGLU before the product."""
    return lambda gate, up: problem(gate) * up


def heads_first(problem: Problem) -> Call:
    """Attention of q, k and v [batch heads seq head_dim], without a mask."""

    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return problem(*(a.swapaxes(1, 2) for a in (q, k, v))).swapaxes(1, 2)

    return call


CALLS: dict[str, Callable[[Problem], Call]] = {
    one.__name__: one
    for one in (ranks, as_defined, product, product_with_vector, over_channels, gate_alone, heads_first)
}
