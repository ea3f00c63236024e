"""Ops of other libraries, called as the reference is. Each file runs in any Python that has its library."""
