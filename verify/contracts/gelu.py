"""GELU by tanh, element by element, as in Starcoder 2."""

from llamaspec.reference.gelu import gelu
from llamaspec.verify.bounds.running_error import gelu_of
from llamaspec.verify.contracts.parts.activation import activation_contract

CONTRACT = activation_contract(
    gelu,
    gelu_of,
    low=-3.0,
    bound="hard and alarm: 7.84 u |x|, from tanh and its sum with 1, which may cancel, and from the polynomial; "
    "2 u |y| for two products",
)
