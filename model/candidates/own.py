"""A function with the signature of an op's definition, and the inputs that it supports."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OwnCandidate:
    """A candidate for the contract of `op`: calling it calls `function`."""

    op: str
    function: Callable[..., Any]
    only: dict[str, list[Any]] = field(default_factory=dict)  # fewer values to draw, by argument
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    kernel: bool = False  # a kernel, which is interpreted without a GPU

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)


def own_candidate(op: str, **how: Any) -> Callable[[Callable[..., Any]], OwnCandidate]:
    """Decorate a function as a candidate for `op`; `how` are further fields of `OwnCandidate`.

    >>> @own_candidate("add", dtypes=("float32",))
    ... def plus(x, y):
    ...     return x + y
    >>> plus.op, plus.dtypes, plus(1, 2)
    ('add', ('float32',), 3)
    """

    def declare(function: Callable[..., Any]) -> OwnCandidate:
        return OwnCandidate(op, function, **how)

    return declare
