"""Options of XLA for a device. A benchmark that times a model compiles it with the same ones."""

from typing import Any

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"  # by default

# By default each run of kernels is one CUDA graph, but the host runs the loop around them, and decides after every
# token whether there is another: up to 70 us of a step on a busy host. With loops and branches in the graph the GPU
# decides by itself.
LOOPS_IN_GRAPHS = {"xla_gpu_enable_command_buffer": f"{IN_GRAPHS},WHILE,CONDITIONAL"}

# XLA times several ways to compute each product and fusion while it compiles, which takes 1.5 to 3 s of a cold start.
# It stays on: untuned, on an H100 with jax 0.11.2, 512 tokens of an 8B in q8 take 363 ms for 26. A process that has
# compiled tuned programs gives untuned ones what it found, so only a process of its own shows that.


def compiler_options(platform: str) -> dict[str, Any]:
    """Give the options of XLA for "cpu", "gpu" or another platform.

    On a CPU vectors are 512 bits wide. XLA halves them by default, because some CPUs clock down.
    """
    match platform:
        case "cpu":
            return {"xla_cpu_prefer_vector_width": 512}
        case "gpu":
            return LOOPS_IN_GRAPHS
        case _:
            return {}
