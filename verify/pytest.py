"""Contracts as tests: three lines for a kernel.

    from verify.pytest import contract

    @contract("softmax")
    def test_softmax(x):
        return my_kernels.softmax(x)

The function is the candidate: it takes what the reference takes (`llamaspec verify --list`), and returns the result.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import numpy as np

from verify.candidate import Direct
from verify.catalogue import contract_for
from verify.precision import precision
from verify.report import counterexample
from verify.runner import verify


def contract(
    op: str,
    *,
    arrays: str = "jax",
    dtype: str = "float32",
    examples: int | None = None,
    seed: int | None = None,
    seconds: float = np.inf,
    shapes: int | None = None,
    strict: bool = False,
    **only: Sequence[Any],
) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """A decorator that makes a test of a candidate for `op`, called in this process with the arrays of a library.

    `examples` is that of Hypothesis's profile unless given, and so is whether draws are the same in every run; `seed`
    fixes them. `only` narrows draws: `contract("rmsnorm", dim=[128, 256])`. `strict` fails on what is only suspicious.
    The test fails with the counterexample. Raises ValueError for an op without a contract.
    """
    held = contract_for(op)

    def decorate(function: Callable[..., Any]) -> Callable[[], None]:
        def test() -> None:
            __tracebackhide__ = True
            profile = hypothesis.settings()
            drawn = 0 if profile.derandomize else secrets.randbelow(2**32)
            report = verify(
                held,
                Direct(function, arrays=arrays),
                precision=precision(dtype),
                examples=examples or profile.max_examples,
                seed=drawn if seed is None else seed,
                seconds=float(seconds),
                shapes=shapes,
                only=only,
            )
            if report.outcome == "violated" or (strict and report.outcome == "suspicious"):
                raise AssertionError("\n" + "\n".join(counterexample(report, held)))

        test.__name__, test.__qualname__, test.__doc__ = function.__name__, function.__qualname__, function.__doc__
        test.__module__ = function.__module__
        return test

    return decorate
