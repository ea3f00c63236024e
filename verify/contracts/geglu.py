"""GeGLU, element by element, with GELU by tanh, as in Gemma."""

from llamaspec.reference.geglu import geglu
from llamaspec.verify.bounds.running_error import gelu_gated
from llamaspec.verify.contracts.parts.gating import gating_contract

CONTRACT = gating_contract(
    geglu,
    gelu_gated,
    low=-3.0,
    bound="hard and alarm: 7.84 u |gate up|, from tanh and its sum with 1, which may cancel, and from the polynomial; "
    "3 u |y| for three products",
)
