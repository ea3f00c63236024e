"""Ops for decode steps that always call the kernels. If a kernel refuses its arguments, the op raises an error.

A model's own ops fall back to XLA instead.
"""

from llamaspec.model.ops.gpu import KERNELS
from llamaspec.model.ops.xla import XLA

KERNEL_OPS = XLA._replace(**{name: op.kernel for name, op in KERNELS.items()})
