"""Exercises: kernels with one wrong line each, and layers to write. Contracts judge the solutions."""
