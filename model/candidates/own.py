"""`OwnCandidate`: a function with the signature of an op in the reference, and the inputs that it supports."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OwnCandidate:
    """An implementation of the op `op` that `llamaspec verify` can judge. Calling it calls `function`."""

    op: str
    function: Callable[..., Any]
    only: dict[str, list[Any]] = field(default_factory=dict)  # argument: the only values to draw for it
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    kernel: bool = False  # whether it is a kernel, which we interpret on a machine without a GPU

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)


def own_candidate(op: str, **how: Any) -> Callable[[Callable[..., Any]], OwnCandidate]:
    """Decorate a function as our implementation of `op`. `how` sets the other fields of `OwnCandidate` by name.

    >>> @own_candidate("add", dtypes=("float32",))
    ... def plus(x, y):
    ...     return x + y
    >>> plus.op, plus.dtypes, plus(1, 2)
    ('add', ('float32',), 3)
    """

    def declare(function: Callable[..., Any]) -> OwnCandidate:
        return OwnCandidate(op, function, **how)

    return declare
