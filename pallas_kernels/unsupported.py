"""The one error that means "use the plain form"."""


class Unsupported(ValueError):
    """A kernel is not made for the arguments, although they make sense together: their dtype, sizes or layout.

    The message names the limit and what was given instead. Arguments that contradict each other (a norm of another
    length than the rows that it scales) are a plain ValueError, and so is a mistake inside a kernel: neither may end
    in the plain form.
    """
