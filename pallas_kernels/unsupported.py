"""The error of a kernel that does not support its arguments. The caller then uses XLA instead."""


class Unsupported(ValueError):
    """A kernel does not support the dtype, sizes or layout of its arguments, although these are consistent.

    The message names the limit and the actual value. Inconsistent arguments, such as a norm with a different length
    than its rows, raise a plain ValueError, and so does a mistake inside a kernel. For these errors, the caller must
    not fall back to XLA.
    """
