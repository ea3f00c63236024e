"""Options of XLA for a device. A benchmark that times a model compiles it with the same ones."""

from typing import Any

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"  # by default

# By default each run of kernels is one CUDA graph, but the host runs the loop around them, and decides after every
# token whether there is another: up to 70 us of a step on a busy host. With loops and branches in the graph the GPU
# decides by itself.
LOOPS_IN_GRAPHS = {"xla_gpu_enable_command_buffer": f"{IN_GRAPHS},WHILE,CONDITIONAL"}


def compiler_options(platform: str) -> dict[str, Any]:
    """Give the options of XLA for "cpu", "gpu" or another platform.

    On a CPU vectors are 512 bits wide. XLA halves them by default, because some CPUs clock down. On a GPU its tuning
    stays on, though it takes 1.5 to 3 s of a cold start: see benchmarks/results/prompts-h100.md.
    """
    match platform:
        case "cpu":
            return {"xla_cpu_prefer_vector_width": 512}
        case "gpu":
            return LOOPS_IN_GRAPHS
        case _:
            return {}
