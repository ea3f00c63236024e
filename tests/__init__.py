"""Tests of llamaspec. pyproject.toml names `lazily` as the type checker of every function in the package."""

from collections.abc import Callable
from typing import Any


def lazily(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in beartype's type check, which is built at the first call: tests call few of 7,000 functions."""
    checked: Callable[..., Any] | None = None

    def check(*arguments: Any, **named: Any) -> Any:
        nonlocal checked
        if checked is None:
            from beartype import beartype  # imported late, because programs that only use this package check no types

            checked = beartype(function)
        return checked(*arguments, **named)

    return check
