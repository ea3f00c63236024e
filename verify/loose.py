"""Weaker contracts, for a kernel that rounds intermediate results, or factors of products, to a narrower dtype.

We derive the bound by calling the definition with arrays that carry their errors (`verify.bounds.carried`), with the
rounding of that dtype in every operation. So a plain exp(x) / sum(exp(x)) in bfloat16 may have the rounding errors of
bfloat16 in each step, but no larger errors. If a candidate computes products of matrices by 3xTF32 or bf16x3, they may
have the errors that come from splitting their factors into parts (`verify.bounds.carried.Rounding`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from llamaspec.verify.bounds.carried import FLOAT32, Rounding
from llamaspec.verify.bounds.precision import PRECISIONS, U
from llamaspec.verify.contract import Claim, Contract, Expected, Law, Trial
from llamaspec.verify.declare import derived
from llamaspec.verify.draws.drawing import draws_from

TRIED = 8  # draws to test whether `verify.bounds.carried` covers a definition
# Parts of float32 numbers in products of matrices, by Triton's names: the largest relative error of a part. TF32 has 11
# significant bits and bfloat16 has 8; code may cut off the other bits instead of rounding.
PARTS = {"tf32x3": 2.0**-10, "bf16x3": 2.0**-7}
NARROW = (*(name for name, limits in PRECISIONS.items() if limits.unit), *PARTS)


def unit_of(text: str) -> str:
    """Parse the value of `--loose`. Raises ValueError for an unknown value.

    >>> unit_of("u=bfloat16")
    'bfloat16'
    """
    name, _, unit = (part.strip() for part in text.partition("="))
    if name != "u" or unit not in NARROW:
        raise ValueError(f"expected u={', u='.join(NARROW[:-1])} or u={NARROW[-1]}, got {text}")
    return unit


def dtypes_for(unit: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return a tuple with the only dtype that arrays of a weaker contract may have.

    Raises ValueError if `names` has a different dtype.

    >>> dtypes_for("bfloat16", []), dtypes_for("tf32x3", [])
    (('bfloat16',), ('float32',))
    """
    dtype = "float32" if unit in PARTS else unit
    if unsupported := [name for name in names if name != dtype]:
        raise ValueError(f"expected arrays of {dtype} for a weaker contract in {unit}, got {', '.join(unsupported)}")
    return (dtype,)


def loosened(contract: Contract, unit: str) -> Contract:
    """Weaken `contract` for a candidate that rounds to `unit`, an entry of `NARROW`.

    Raises ValueError if `verify.bounds.carried` does not cover the definition, or if `unit` is for products of matrices
    and the definition has none.
    """
    rounding = FLOAT32._replace(part=PARTS[unit]) if unit in PARTS else Rounding.of(PRECISIONS[unit])
    wide = replace(contract, expect=derived(contract.definition, rounding=rounding))
    plain = replace(contract, expect=derived(contract.definition))
    limits = PRECISIONS[dtypes_for(unit, [])[0]]
    widened = False
    try:
        for draw in itertools.islice(draws_from(contract.draws, Random(0)), TRIED):
            arguments = contract.arguments(precision=limits, **draw)
            pairs = zip(wide.expected(arguments), plain.expected(arguments), strict=True)
            widened |= any(np.any(output.hard > narrow.hard) for output, narrow in pairs)
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"no weaker contract can be derived for {contract.name}: {error}") from None
    if unit in PARTS and not widened:
        raise ValueError(f"{contract.name} multiplies no matrices, so {unit} changes nothing: leave out --loose")
    loose = _in_parts(contract, wide, plain, unit, rounding) if unit in PARTS else _rounding_each(wide, unit, rounding)
    return replace(loose, laws=[_loosened(law, loose) for law in contract.laws])


def _rounding_each(contract: Contract, dtype: str, rounding: Rounding) -> Contract:
    """Describe `contract`, with derived bounds, for a candidate that rounds every intermediate result to `dtype`."""
    return replace(
        contract,
        bound=f"hard and alarm: derived from the definition, step by step, with u = {rounding.unit:g} for each",
        weaker=f"each intermediate of the definition rounded to {dtype}; sums and products of matrices in float32, "
        "rounded once",
    )


def _in_parts(contract: Contract, wide: Contract, plain: Contract, unit: str, rounding: Rounding) -> Contract:
    """Weaken `contract` for a candidate that computes a product of matrices as three products of their parts.

    We take the derived bound of `wide`. `plain` has the derived bound of a float32 kernel. If `contract` allows a
    larger error than `plain`, for example for an online softmax, we add the difference.
    """

    def expect(*positional: Any, **named: Any) -> tuple[Expected, ...]:
        versions = [
            (output,) if isinstance(output, Expected) else output
            for output in (version.expect(*positional, **named) for version in (wide, plain, contract))
        ]
        outputs = []
        for loose, narrow, own in zip(*versions, strict=True):
            more = np.subtract(own.hard, narrow.hard, out=np.zeros_like(own.hard), where=np.isfinite(narrow.hard))
            hard = loose.hard + np.maximum(more, 0)
            outputs.append(own._replace(hard=hard, alarm=hard))
        return tuple(outputs)

    bound = f"a product of n terms may be off by ({rounding.dropped / U:,.0f} + 12 n) u |W| |x|"
    return replace(
        contract,
        expect=expect,
        bound=f"hard and alarm: derived from the definition, step by step; {bound}",
        weaker=f"products of matrices by {unit}: three products of two parts of each factor, added in float32 without "
        "rounding to nearest; all else in float32",
    )


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
