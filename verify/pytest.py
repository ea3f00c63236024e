"""Contracts as tests: three lines for a kernel.

    from llamaspec.verify.pytest import contract

    @contract("softmax")
    def test_softmax(x):
        return my_kernels.softmax(x)

A contract of one's own is given itself, or by its name and the file that holds it:

    @contract("layernorm", file="layernorm.py", dtype=["float32", "bfloat16"])
    def test_layernorm(x, weight, bias, *, eps):
        return my_kernels.layernorm(x, weight, bias, eps)

The function is the candidate: it takes the arguments of the definition (`llamaspec verify --list`), and returns the
result. Further parameters are pytest's, fixtures and those of `parametrize`; a method takes `self` first.
"""

import inspect
import os
import secrets
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

import hypothesis
import numpy as np

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct, check_seconds
from llamaspec.verify.candidates.guard import Guarded, snapshot
from llamaspec.verify.catalogue import CONTRACTS, contract_for, in_file
from llamaspec.verify.contract import Contract
from llamaspec.verify.draws.domain import narrowed
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.loose import dtype_of, dtypes_for, loosened
from llamaspec.verify.reports.report import counterexample


def contract(
    op: str | Contract,
    *,
    file: str | os.PathLike[str] | None = None,
    arrays: str = "jax",
    dtype: str | Sequence[str] | None = None,
    loose: str | None = None,
    examples: int | None = None,
    seed: int | None = None,
    seconds: float = np.inf,
    shapes: int | None = None,
    strict: bool = False,
    **only: Sequence[Any],
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a candidate for `op`, called in this process with the arrays of a library.

    `op` is a contract, or the name of one, of ours or in a `file` of one's own. Each `dtype`, float32 unless given, is
    judged in turn, and the test fails with the counterexamples of all that are violated. `loose="u=bfloat16"` declares
    a weaker contract, as `verify.loose` has it.

    `examples` is that of Hypothesis's profile unless given, and so is whether draws are the same in every run; `seed`
    fixes them. `only` narrows draws: `contract("rmsnorm", dim=[128, 256])`. `strict` fails on what is only suspicious.
    The test fails with NoVerdict where nothing was compared. Raises ValueError for an op without a contract, a dtype
    that contracts do not speak of, a number of examples, shapes or seconds that is none, and a draw that it does not
    have or cannot have that value; ImportError for a file that cannot be imported.
    """
    known = CONTRACTS if file is None else in_file(os.fspath(file))[0]
    held = op if isinstance(op, Contract) else contract_for(op, known)
    asked = ["float32"] if dtype is None else [dtype] if isinstance(dtype, str) else list(dtype)
    if loose is not None:
        narrow = dtype_of(loose)
        held, asked = loosened(held, narrow), dtypes_for(narrow, [] if dtype is None else asked)
    precisions = [precision(name) for name in asked]
    if not precisions:
        raise ValueError("dtype names no dtype: nothing would be judged")
    check_seconds(seconds)
    for name, count in (("examples", examples), ("shapes", shapes)):
        if count is not None and count < 1:
            raise ValueError(f"{name} is a number from 1; got {count}")
    chosen = narrowed(held, only)

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        before = snapshot()

        def test(*method: Any, **of_pytest: Any) -> None:
            __tracebackhide__ = True
            profile = hypothesis.settings()
            drawn = 0 if profile.derandomize else secrets.randbelow(2**32)

            def candidate(*positional: Any, **keyword: Any) -> Any:
                return function(*method, *positional, **keyword, **of_pytest)

            name = f"{function.__module__}:{function.__qualname__}"
            reports = [
                verify(
                    held,
                    Guarded(Direct(candidate, arrays=arrays, name=name), before),
                    precision=one,
                    examples=examples or profile.max_examples,
                    seed=drawn if seed is None else seed,
                    seconds=float(seconds),
                    shapes=shapes,
                    only=chosen,
                )
                for one in precisions
            ]
            wrong = ("violated", "suspicious") if strict else ("violated",)
            failures = [counterexample(report, held) for report in reports if report.outcome in wrong]
            if failures:
                raise AssertionError("\n" + "\n".join(line for lines in failures for line in lines))

        update_wrapper(test, function)  # its name, and the marks that pytest put on it
        del test.__dict__["__wrapped__"]  # or pytest would look for fixtures called as the op's arguments
        test.__signature__ = _of_pytest(function, held)  # type: ignore
        return test

    return decorate


def _of_pytest(function: Callable[..., Any], held: Contract) -> inspect.Signature:
    """The parameters of `function` that are pytest's: `self`, and all that the definition does not give."""
    arguments = inspect.signature(held.definition).parameters.values()
    by_name = {one.name for one in arguments if one.kind is one.KEYWORD_ONLY}
    own = list(inspect.signature(function).parameters.values())
    method = own[:1] if own and own[0].name == "self" else []
    positional = [one for one in own[len(method) :] if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    taken = {one.name for one in positional[: len(arguments) - len(by_name)]} | by_name
    rest = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for one in own[len(method) :]
        if one.name not in taken and one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    return inspect.Signature([*method, *rest])
