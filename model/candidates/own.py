"""A function that is called as the definition of an op, with the draws that it is made for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OwnCandidate:
    """A candidate for the contract of `op`, which is called as the function itself is."""

    op: str
    function: Callable[..., Any]
    only: dict[str, list[Any]] = field(default_factory=dict)  # narrowed draws of the contract
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    kernel: bool = False  # interpreted if there is no GPU

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)


def own_candidate(op: str, **how: Any) -> Callable[[Callable[..., Any]], OwnCandidate]:
    """Declare the function below as a candidate for `op`; `how` are the fields of `OwnCandidate`.

    >>> @own_candidate("add", dtypes=("float32",))
    ... def plus(x, y):
    ...     return x + y
    >>> plus.op, plus.dtypes, plus(1, 2)
    ('add', ('float32',), 3)
    """

    def declare(function: Callable[..., Any]) -> OwnCandidate:
        return OwnCandidate(op, function, **how)

    return declare
