"""Exercises: kernels with one wrong line each, and layers to write; contracts are the judges."""
