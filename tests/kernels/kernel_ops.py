"""Ops for decode steps that call the kernels directly: unsupported arguments raise an error and never fall back to XLA."""

from llamaspec.model.ops.gpu import KERNELS
from llamaspec.model.ops.xla import XLA

KERNEL_OPS = XLA._replace(**{name: op.kernel for name, op in KERNELS.items()})
