"""XLA's compiler options for each platform. Benchmarks compile a model with the same options."""

from typing import Any

import jax
import numpy as np

from llamaspec.model.ops.table import Ops
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"  # by default

# By default XLA makes one CUDA graph of each sequence of kernels, but the host runs the decoding loop. It then decides
# after every token whether to go on, which takes up to 70 us of a step on a busy host. With loops and branches in the
# graph the GPU decides.
LOOPS_IN_GRAPHS = {"xla_gpu_enable_command_buffer": f"{IN_GRAPHS},WHILE,CONDITIONAL"}

# Without graphs the host launches each kernel separately. Only then does XLA's profiler name a kernel's instruction.
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}

# By default XLA times several ways to compute each product and fusion while it compiles, which takes a quarter of a
# cold start. With only that turned off, XLA uses Triton kernels with a bad tiling for products, and a prompt of 512
# tokens takes 14 times as long. So we turn off Triton kernels, too: XLA then calls cuBLASLt, which chooses a good
# kernel without timing.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def compiler_options(platform: str) -> dict[str, Any]:
    """Return XLA's options for "cpu", "gpu" or another platform.

    On a CPU we use vectors of 512 bits. XLA's default is 256, because some CPUs lower their clock for 512.
    """
    match platform:
        case "cpu":
            return {"xla_cpu_prefer_vector_width": 512}
        case "gpu":
            return LOOPS_IN_GRAPHS
        case _:
            return {}


def untuned_options(platform: str) -> dict[str, Any]:
    """Return XLA's options without any choice that depends on time measured while compiling.

    Two processes that compile one program with these options compute the same bits, however busy the GPU is. With
    tuning they may not: XLA times several ways to sum a product and takes the fastest, and on a busy GPU each process
    may measure another one to be fastest.
    """
    return compiler_options(platform) | (UNTUNED if platform == "gpu" else {})


def model_options(platform: str, params: Params, config: Config, *, ops: Ops, batch: int) -> dict[str, Any]:
    """Return the options for programs that read and decode `batch` sequences on one device; `params` may be shapes.

    On a GPU we turn tuning off for one sequence in bfloat16 if our kernels compute all products of a decoding step and
    all attention. XLA then computes only the products of a prompt, and these are as fast with untuned cuBLASLt as with
    tuning (benchmarks/results/prompts-h100.md). We leave tuning on where we have not compared: float32, experts, ops
    that the kernels refuse, several sequences, several devices. There a slow prompt would cost more than a slow start.
    """
    kernels = (op for name, op in ops._asdict().items() if name != "moe_add")  # only experts need moe_add
    # We recognize kernels by their attributes: importing their class would import Pallas, which takes a second.
    by_kernels = all(getattr(op, "accepted", None) and not op.refused for op in kernels)
    bfloat16 = params.embedding.dtype == np.dtype(jax.numpy.bfloat16)
    compared = batch == 1 and by_kernels and bfloat16 and not config.experts
    return untuned_options(platform) if compared else compiler_options(platform)
