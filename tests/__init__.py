"""The tests; pyproject.toml has `lazily` check every call of the package."""

from collections.abc import Callable
from typing import Any


def lazily(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make beartype's check of a function when the function is first called; most of 7,000 never are."""
    checked: Callable[..., Any] | None = None

    def check(*arguments: Any, **named: Any) -> Any:
        nonlocal checked
        if checked is None:
            from beartype import beartype  # not sooner: this package has programs, too, which check nothing

            checked = beartype(function)
        return checked(*arguments, **named)

    return check
