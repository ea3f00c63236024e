"""The tests; pyproject.toml has `lazily` check the types of every call into the package."""

from collections.abc import Callable
from typing import Any


def lazily(function: Callable[..., Any]) -> Callable[..., Any]:
    """Create beartype's check of a function at its first call, since most of 7,000 functions are never called."""
    checked: Callable[..., Any] | None = None

    def check(*arguments: Any, **named: Any) -> Any:
        nonlocal checked
        if checked is None:
            from beartype import beartype  # late: the programs in this package check nothing

            checked = beartype(function)
        return checked(*arguments, **named)

    return check
