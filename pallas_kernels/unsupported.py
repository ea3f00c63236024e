"""The one error that means "use the plain form"."""


class Unsupported(ValueError):
    """A kernel does not support the dtype, sizes or layout of its arguments, although they are consistent.

    The message names the limit and the actual value. Inconsistent arguments, such as a norm with a different length
    than its rows, raise a plain ValueError, and so does a mistake inside a kernel: these must not fall back to the
    plain form.
    """
