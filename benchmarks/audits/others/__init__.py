"""Ops of other libraries, with the signatures of the reference. Each file runs in any Python that has its library."""
