"""Options of XLA for a device. A benchmark that times a model compiles it with the same ones."""

from typing import Any

import jax
import numpy as np

from llamaspec.model.ops.table import Ops
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"  # by default

# By default each run of kernels is one CUDA graph, but the host runs the loop around them, and decides after every
# token whether there is another: up to 70 us of a step on a busy host. With loops and branches in the graph the GPU
# decides by itself.
LOOPS_IN_GRAPHS = {"xla_gpu_enable_command_buffer": f"{IN_GRAPHS},WHILE,CONDITIONAL"}

# The host launches each kernel by itself. XLA's profiler names the instruction of such a kernel only.
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}

# XLA times several ways to compute each product and fusion while it compiles, which takes a quarter of a cold start.
# Without that it takes Triton kernels with a bad tiling for products, and a prompt of 512 tokens takes 14 times as
# long. Without such kernels, too, it calls cuBLASLt, which knows by itself how to compute a product.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


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


def untuned_options(platform: str) -> dict[str, Any]:
    """Give the options of XLA without any choice that depends on time measured while compiling.

    Two processes that compile one program with these options compute the same bits, however busy the GPU is. With
    tuning they may not: XLA times several ways to sum a product and takes the fastest, and on a busy GPU each process
    may measure another one to be fastest.
    """
    return compiler_options(platform) | (UNTUNED if platform == "gpu" else {})


def model_options(platform: str, params: Params, config: Config, *, ops: Ops, batch: int) -> dict[str, Any]:
    """Give the options for the programs that read and decode `batch` sequences on one device; `params` may be shapes.

    On a GPU nothing is tuned for one sequence, if kernels compute a step's products and all attention. XLA is left the
    products of a prompt, and cuBLASLt computes those as fast as tuned ones, of floats and of codes that XLA decodes
    (benchmarks/results/prompts-h100.md). Tuned is what was not compared: float32, experts, what kernels refuse, several
    sequences, several devices. A cold start happens once, and a slow prompt would be slow every time.
    """
    kernels = (op for name, op in ops._asdict().items() if name != "moe_add")  # which only experts need
    # Tables with kernels are told by what they hold: importing their class would import Pallas, which takes a second.
    by_kernels = all(getattr(op, "accepted", None) and not op.refused for op in kernels)
    bfloat16 = params.embedding.dtype == np.dtype(jax.numpy.bfloat16)
    compared = batch == 1 and by_kernels and bfloat16 and not config.experts
    return untuned_options(platform) if compared else compiler_options(platform)
