"""Tests of llamaspec. pyproject.toml names `lazily` as the type checker of every function in the package."""

from collections.abc import Callable
from typing import Any


def lazily(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in beartype's type check, and build this check only at the function's first call.

    There are about 7,000 functions, and a test run calls few of them.
    """
    checked: Callable[..., Any] | None = None

    def check(*arguments: Any, **named: Any) -> Any:
        nonlocal checked
        if checked is None:
            from beartype import beartype  # imported late, because programs that only use this package check no types

            checked = beartype(function)
        return checked(*arguments, **named)

    return check
