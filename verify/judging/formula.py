"""Verdict on a candidate's formula, apart from its rounding. `verify.algebra` computes it."""

from dataclasses import dataclass, field
from typing import Any

from llamaspec.verify.draws.draw import Draw

EQUAL, DIFFERENT, UNDECIDED = "equal", "not equal", "no verdict"
ALGEBRA = "algebra"  # kind of a finding
PASSES = 1e-12  # probability with which a wrong formula passes as equal


@dataclass(frozen=True)
class Formula:
    """Whether the candidate's formula equals the definition."""

    outcome: str  # EQUAL, DIFFERENT or UNDECIDED
    message: str = ""  # where it differs, or why there is no verdict
    draw: Draw = field(default_factory=dict)  # for which it differs
    shapes: int = 0  # for which both formulas are equal
    trials: int = 0  # evaluations with other primes and other elements
    seconds: float = 0.0
    estimated: bool = False  # the probability that a wrong formula passes is an estimate, because of exponentials

    def line(self) -> str:
        """Write the verdict in one line."""
        if self.outcome == EQUAL:
            estimated = "estimated " if self.estimated else ""
            shapes = "1 shape" if self.shapes == 1 else f"{self.shapes} shapes"
            return (
                f"algebra: equal to the definition for {shapes} ({self.trials} trials modulo random primes, "
                f"{self.seconds:.1f} s); another formula passes with a probability {estimated}below {PASSES:g}"
            )
        return f"algebra: {self.outcome}: {self.message}"

    def as_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "message": self.message,
            "shapes": self.shapes,
            "trials": self.trials,
            "estimated": self.estimated,
            "seconds": round(self.seconds, 3),
        }
