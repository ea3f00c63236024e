"""Squared ReLU, element by element, as in Nemotron."""

from llamaspec.reference.squared_relu import squared_relu
from llamaspec.verify.bounds.running_error import squared_relu_of
from llamaspec.verify.contracts.parts.activation import activation_contract

CONTRACT = activation_contract(
    squared_relu, squared_relu_of, low=-3.0, bound="hard and alarm: one rounding of the square, and 0 below 0"
)
