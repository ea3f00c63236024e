"""Run-time checks of the types and shapes that functions of llamaspec state in their annotations."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import install_import_hook

ROOT = Path(__file__).parents[1]
PACKAGES = ("reference", "pallas_kernels", "model", "verify", "serving", "training", "judge", "learn")


def check_shapes() -> None:
    """Check every function of the modules that state shapes. Must be called before these modules are imported.

    Only pyright checks the other modules, because a check at run time takes longer than most functions that are called
    often. With such checks, a test that generates stories took ten times as long.
    """
    modules = [
        ".".join(("llamaspec", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "from jaxtyping import" in path.read_text("utf-8")
    ]
    install_import_hook(modules, f"{__name__}.lazily")


def lazily(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in beartype's type check, and build this check only at the function's first call.

    There are thousands of functions, and a test run calls few of them.
    """
    checked: Callable[..., Any] | None = None

    def check(*arguments: Any, **named: Any) -> Any:
        nonlocal checked
        if checked is None:
            from beartype import beartype  # imported late, because programs that only use this package check no types

            checked = beartype(function)
        return checked(*arguments, **named)

    return check
