"""Contracts as pytest tests: three lines per kernel.

    from llamaspec.verify.pytest import contract

    @contract("softmax")
    def test_softmax(x):
        return my_kernels.softmax(x)

Pass a contract of your own as an object, or by its name and file:

    @contract("layernorm", file="layernorm.py", dtype=["float32", "bfloat16"])
    def test_layernorm(x, weight, bias, *, eps):
        return my_kernels.layernorm(x, weight, bias, eps)

The function is the candidate: it takes the arguments of the definition (`llamaspec verify --list`), and returns the
result. All other parameters are pytest's fixtures and parameters. The first parameter of a method is `self`.
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
from llamaspec.verify.loose import dtypes_for, loosened, unit_of
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
    contiguous: bool = False,
    **only: Sequence[Any],
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a candidate for `op`, called in this process with the arrays of a library.

    `op` is a contract, or the name of a contract in this package or in `file`. The test judges every `dtype` (default:
    float32) and fails with the counterexamples of all dtypes with a violation. `loose="u=bfloat16"` declares a weaker
    contract; see `verify.loose`.

    Hypothesis's profile decides the number of `examples` and whether all runs draw the same values, unless you set
    `examples` or `seed`. `only` limits variables of the draws: `contract("rmsnorm", dim=[128, 256])`. With `strict`,
    suspicious results fail too. With `contiguous`, all arrays are contiguous. The test fails with NoVerdict if no
    number was compared. Raises ValueError for an op without a contract, an unknown dtype, an invalid number of
    examples, shapes or seconds, and a variable or value that the contract does not have. Raises ImportError for a file
    that cannot be imported.
    """
    known = CONTRACTS if file is None else in_file(os.fspath(file))[0]
    chosen_contract = op if isinstance(op, Contract) else contract_for(op, known)
    dtypes = ["float32"] if dtype is None else [dtype] if isinstance(dtype, str) else list(dtype)
    if loose is not None:
        unit = unit_of(loose)
        chosen_contract, dtypes = loosened(chosen_contract, unit), dtypes_for(unit, [] if dtype is None else dtypes)
    precisions = [precision(name) for name in dtypes]
    if not precisions:
        raise ValueError("expected at least one dtype")
    check_seconds(seconds)
    for name, count in (("examples", examples), ("shapes", shapes)):
        if count is not None and count < 1:
            raise ValueError(f"expected {name} of at least 1, got {count}")
    chosen = narrowed(chosen_contract, only)

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
                    chosen_contract,
                    Guarded(Direct(candidate, arrays=arrays, name=name, contiguous=contiguous), before),
                    precision=chosen_precision,
                    examples=examples or profile.max_examples,
                    seed=drawn if seed is None else seed,
                    seconds=float(seconds),
                    shapes=shapes,
                    only=chosen,
                )
                for chosen_precision in precisions
            ]
            wrong = ("violated", "suspicious") if strict else ("violated",)
            failures = [counterexample(report, chosen_contract) for report in reports if report.outcome in wrong]
            if failures:
                raise AssertionError("\n" + "\n".join(line for lines in failures for line in lines))

        update_wrapper(test, function)  # copy the name and pytest's marks
        del test.__dict__["__wrapped__"]  # otherwise pytest looks for fixtures named like the op's arguments
        test.__signature__ = _of_pytest(function, chosen_contract)  # type: ignore
        return test

    return decorate


def _of_pytest(function: Callable[..., Any], checked_contract: Contract) -> inspect.Signature:
    """Return the signature for pytest: `self`, and the parameters that the definition does not have."""
    arguments = inspect.signature(checked_contract.definition).parameters.values()
    by_name = {parameter.name for parameter in arguments if parameter.kind is parameter.KEYWORD_ONLY}
    own = list(inspect.signature(function).parameters.values())
    method = own[:1] if own and own[0].name == "self" else []
    positional = [
        parameter
        for parameter in own[len(method) :]
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    by_contract = {parameter.name for parameter in positional[: len(arguments) - len(by_name)]} | by_name
    fixtures = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in own[len(method) :]
        if parameter.name not in by_contract
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return inspect.Signature([*method, *fixtures])
