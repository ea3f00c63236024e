"""Ops for decode steps that call the kernels directly: a kernel that refuses its arguments raises an error.

The ops of a model would run as XLA ops instead.
"""

from llamaspec.model.ops.gpu import KERNELS
from llamaspec.model.ops.xla import XLA

KERNEL_OPS = XLA._replace(**{name: op.kernel for name, op in KERNELS.items()})
