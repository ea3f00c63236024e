"""Findings of an examination: each names a check and its outcome."""

from typing import Any, Literal, NamedTuple

# "note": a difference that many engines have on purpose. It does not change the verdict.
Verdict = Literal["right", "wrong", "unclear", "note"]


class Finding(NamedTuple):
    """The outcome of one check."""

    part: str  # tokens, numbers or protocol
    check: str
    verdict: Verdict
    message: str
    figures: dict[str, Any] = {}  # noqa: RUF012  # never changed: numbers for JSON
