"""Weaker contracts, for a kernel that claims less: every intermediate result is rounded to a narrower dtype.

The bound is derived as that of a declared contract is, by calling the definition with arrays that carry their errors
(`verify.bounds.carried`), each operation with the roundings of that dtype: a plain exp(x) / sum(exp(x)) in bfloat16 may
be as far off as bfloat16 allows, and no further.
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
from llamaspec.verify.draws.drawing import each

TRIED = 8  # draws that show whether a definition is covered
NARROW = tuple(name for name, one in PRECISIONS.items() if one.unit)


def dtype_of(text: str) -> str:
    """Read how a person declares a weaker contract. Raises ValueError.

    >>> dtype_of("u=bfloat16")
    'bfloat16'
    """
    name, _, dtype = (part.strip() for part in text.partition("="))
    if name != "u" or dtype not in NARROW:
        raise ValueError(f"a weaker contract is declared as u={' or u='.join(NARROW)}; got {text}")
    return dtype


def dtypes_for(dtype: str, asked: Sequence[str]) -> tuple[str, ...]:
    """The one dtype of arrays that a weaker contract in `dtype` is for. Raises ValueError where others are asked for.

    >>> dtypes_for("bfloat16", [])
    ('bfloat16',)
    """
    if other := [name for name in asked if name != dtype]:
        raise ValueError(f"a weaker contract in {dtype} is for arrays of {dtype}; got {', '.join(other)}")
    return (dtype,)


def loosened(contract: Contract, dtype: str) -> Contract:
    """`contract` for a candidate that takes arrays of `dtype` and rounds every intermediate to it.

    Raises ValueError for an op whose definition `verify.bounds.carried` does not cover.
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
        for draw in itertools.islice(each(contract.draws, Random(0)), TRIED):
            loose.expected(contract.arguments(precision=PRECISIONS[dtype], **draw))
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no weaker contract can be derived for {contract.name}: {error}") from None
    return replace(loose, laws=[_loosened(law, loose) for law in contract.laws])


def _loosened(law: Law, contract: Contract) -> Law:
    """A law with room for the bounds of the results that it calls for itself. Equal bits stay equal bits."""

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
    """The largest bound of the results for `arguments`: infinite where one is, which allows anything."""
    return max(float(np.max(due.hard, initial=0)) for due in contract.expected(arguments))
