"""How XLA compiles a model for a device; what measures a model compiles as it does.

On a CPU its vectors are halved by default, for fear of clocking down. On a GPU each run of kernels is one CUDA graph by
default, but the loop around them is the host's, which is asked after every token whether there is another: up to 70 us
of a step, as busy as the host is (docs/performance-gpu.md). With loops and branches in the graph nothing is asked.
"""

from typing import Any

import jax

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"  # by default
LOOPS_IN_GRAPHS = {"xla_gpu_enable_command_buffer": f"{IN_GRAPHS},WHILE,CONDITIONAL"}


def compiler_options() -> dict[str, Any]:
    """Options of XLA for the default device."""
    match jax.default_backend():
        case "cpu":
            return {"xla_cpu_prefer_vector_width": 512}
        case "gpu":
            return LOOPS_IN_GRAPHS
        case _:
            return {}
