"""The kernels as a table of ops without routes: only for decoding, and a refusal is raised."""

from llamaspec.model.ops.gpu import KERNELS
from llamaspec.model.ops.xla import XLA

KERNEL_OPS = XLA._replace(**{name: op.kernel for name, op in KERNELS.items()})
