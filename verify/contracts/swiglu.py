"""SwiGLU: element by element, with a sigmoid that must not overflow."""

from llamaspec.reference.swiglu import swiglu
from llamaspec.verify.bounds.running_error import gated
from llamaspec.verify.contracts.parts.gating import gating_contract

CONTRACT = gating_contract(
    swiglu,
    gated,
    low=-80.0,
    bound="hard and alarm: (8 + 2 max(-gate, 1)) u |y|, from exp, sum, quotient and two products",
)
