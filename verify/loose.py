"""Weaker contracts, for a kernel that rounds every intermediate result to a narrower dtype.

We derive the bound by calling the definition with arrays that carry their errors (`verify.bounds.carried`), with the
rounding of that dtype in every operation. So a plain exp(x) / sum(exp(x)) in bfloat16 may have the rounding errors of
bfloat16 in each step, but no larger errors.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from llamaspec.verify.bounds.carried import Rounding
from llamaspec.verify.bounds.precision import PRECISIONS
from llamaspec.verify.contract import Claim, Contract, Law, Trial
from llamaspec.verify.declare import derived
from llamaspec.verify.draws.drawing import draws_from

TRIED = 8  # draws to test whether `verify.bounds.carried` covers a definition
NARROW = tuple(name for name, limits in PRECISIONS.items() if limits.unit)


def dtype_of(text: str) -> str:
    """Parse the value of `--loose`. Raises ValueError.

    >>> dtype_of("u=bfloat16")
    'bfloat16'
    """
    name, _, dtype = (part.strip() for part in text.partition("="))
    if name != "u" or dtype not in NARROW:
        raise ValueError(f"expected u={' or u='.join(NARROW)}, got {text}")
    return dtype


def dtypes_for(dtype: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return (`dtype`,), the only dtype for arrays of a weaker contract. Raises ValueError if `names` has another one.

    >>> dtypes_for("bfloat16", [])
    ('bfloat16',)
    """
    if unsupported := [name for name in names if name != dtype]:
        raise ValueError(f"expected arrays of {dtype} for a weaker contract in {dtype}, got {', '.join(unsupported)}")
    return (dtype,)


def loosened(contract: Contract, dtype: str) -> Contract:
    """Weaken `contract` for a candidate that rounds every intermediate result to `dtype`.

    Raises ValueError if `verify.bounds.carried` does not cover the definition.
    """
    rounding = Rounding.of(PRECISIONS[dtype])
    expect = derived(contract.definition, rounding=rounding)
    loose = replace(
        contract,
        expect=expect,
        bound=f"hard and alarm: derived from the definition, step by step, with u = {rounding.unit:g} for each",
        weaker=f"each intermediate of the definition rounded to {dtype}; sums and products of matrices in float32, "
        "rounded once",
    )
    try:
        for draw in itertools.islice(draws_from(contract.draws, Random(0)), TRIED):
            loose.expected(contract.arguments(precision=PRECISIONS[dtype], **draw))
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no weaker contract can be derived for {contract.name}: {error}") from None
    return replace(loose, laws=[_loosened(law, loose) for law in contract.laws])


def _loosened(law: Law, contract: Contract) -> Law:
    """Weaken a law: increase its tolerance by the error bounds of all results that the law compares.

    A law with the tolerance 0 (equal bits) does not change.
    """

    def check(trial: Trial) -> Claim | None:
        bounds = [_largest(contract, trial.arguments)]

        def again(**changes: Any) -> tuple[np.ndarray, ...]:
            bounds.append(_largest(contract, {**trial.arguments, **changes}))
            return trial.again(**changes)

        claim = law.check(trial._replace(again=again))
        if claim is None or not np.any(claim.tolerance):
            return claim
        return claim._replace(tolerance=claim.tolerance + sum(bounds))

    return law._replace(check=check)


def _largest(contract: Contract, arguments: dict[str, Any]) -> float:
    """Return the largest error bound of the results for `arguments`. It may be infinite, which allows any value."""
    return max(float(np.max(output.hard, initial=0)) for output in contract.expected(arguments))
