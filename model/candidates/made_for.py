"""A function that is called as the definition of an op, with the draws that it is made for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MadeFor:
    """A candidate for the contract of `op`, which is called as the function itself is."""

    op: str
    function: Callable[..., Any]
    only: dict[str, list[Any]] = field(default_factory=dict)  # narrowed draws of the contract
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    kernel: bool = False  # interpreted where there is no GPU

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)


def made_for(op: str, **how: Any) -> Callable[[Callable[..., Any]], MadeFor]:
    """Declare the function below as a candidate for `op`; `how` are the fields of `MadeFor`.

    >>> @made_for("add", dtypes=("float32",))
    ... def plus(x, y):
    ...     return x + y
    >>> plus.op, plus.dtypes, plus(1, 2)
    ('add', ('float32',), 3)
    """

    def declare(function: Callable[..., Any]) -> MadeFor:
        return MadeFor(op, function, **how)

    return declare
