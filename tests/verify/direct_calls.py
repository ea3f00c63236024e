"""Verify a candidate that is a function of this process."""

from collections.abc import Callable

from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.judging.runner import Report, verify


def judged(
    op: str,
    candidate: Callable,
    *,
    dtype: str = "float32",
    examples: int = 200,
    seed: int = 1,
    contiguous: bool = False,
    **options,
) -> Report:
    """Verify `candidate` with as many examples as the command line uses, and return the report."""
    drawn = {"precision": precision(dtype), "examples": examples, "seed": seed, "shrink": False}
    return verify(CONTRACTS[op], Direct(candidate, contiguous=contiguous), **drawn, **options)
