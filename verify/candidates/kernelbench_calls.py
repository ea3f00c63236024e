"""Call the modules of a KernelBench problem (https://arxiv.org/abs/2502.10517) with the arguments of an op.

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
    """A class of a problem, wrapped as a function.

    We create one module for each list of constructor arguments.
    """

    def __init__(self, module: Any, name: str):
        self.kind = getattr(module, name)
        self.init_inputs = list(getattr(module, "get_init_inputs", list)())
        self.inputs = getattr(module, "get_inputs", None)
        self.modules: dict[str, Any] = {}

    def __call__(self, *arrays: Any, init_inputs: list | None = None, **named: Any) -> Any:
        arguments = self.init_inputs if init_inputs is None else init_inputs
        key = repr(arguments)
        if key not in self.modules:
            self.modules[key] = self.kind(*arguments)
        module = self.modules[key]
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(arrays[0], torch.Tensor):
            return (module if callable(module) else module.forward)(*arrays, **named)
        with torch.no_grad():
            return module.to(arrays[0].device)(*arrays, **named)


def ranks(problem: Problem) -> Call:
    """Make a function without arguments that returns the number of axes of each of the problem's inputs.

    If the problem uses torch, we create the inputs on the device "meta", where they take no memory.
    """

    def call() -> np.ndarray:
        torch = sys.modules.get("torch")
        with torch.device("meta") if torch else nullcontext():
            inputs = problem.inputs() if problem.inputs else []
        return np.array([getattr(array, "ndim", 0) for array in inputs], np.int64)

    return call


def as_defined(problem: Problem) -> Call:
    """Call the problem with the op's positional arguments, and with the keyword arguments that `forward` accepts."""
    parameters = inspect.signature(problem.kind.forward).parameters

    def call(*positional: Any, **named: Any) -> Any:
        return problem(*positional, **{name: value for name, value in named.items() if name in parameters})

    return call


def product(problem: Problem) -> Call:
    """Call a problem that computes A @ B. The op multiplies by a transpose, so we transpose the second argument."""
    return lambda x, weight: problem(x, weight.T)


def product_with_vector(problem: Problem) -> Call:
    """Call a problem that computes A @ b with b [cols, 1]. The op takes b [cols], so we convert the shapes."""
    return lambda x, weight: problem(weight, x[:, None])[:, 0]


def over_channels(problem: Problem) -> Call:
    """Call a problem that computes RMSNorm over the second of four axes, and multiply its result by `weight`."""

    def call(x: Any, weight: Any, *, eps: float) -> Any:
        y = problem(x.reshape(*x.shape, 1, 1), init_inputs=[x.shape[1], eps])
        return y.reshape(*x.shape) * weight

    return call


def gate_alone(problem: Problem) -> Call:
    """Call a problem that computes SiLU. The op is SwiGLU, so we multiply the result by `up`."""
    return lambda gate, up: problem(gate) * up


def heads_first(problem: Problem) -> Call:
    """Call a problem that computes attention without a mask and takes q, k and v [batch heads seq head_dim]."""

    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return problem(*(a.swapaxes(1, 2) for a in (q, k, v))).swapaxes(1, 2)

    return call


CALLS: dict[str, Callable[[Problem], Call]] = {
    function.__name__: function
    for function in (ranks, as_defined, product, product_with_vector, over_channels, gate_alone, heads_first)
}
