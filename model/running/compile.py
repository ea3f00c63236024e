"""XLA's compiler options for each platform. Benchmarks compile models with the same options."""

from typing import Any

import jax
import numpy as np

from llamaspec.model.ops.table import Ops
from llamaspec.model.weights.params import Params
from llamaspec.reference.config import Config

IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"  # XLA's default

# By default XLA makes one CUDA graph of each sequence of kernels, but the host runs the decoding loop. After every
# token the host decides whether to continue, which takes up to 70 us of a step on a busy host. With loops and branches
# in the graph, the GPU decides.
LOOPS_IN_GRAPHS = {"xla_gpu_enable_command_buffer": f"{IN_GRAPHS},WHILE,CONDITIONAL"}

# Without graphs the host launches each kernel separately. Only in this case does XLA's profiler name the instruction of
# a kernel.
NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}

# By default XLA times several ways to compute each product and fusion while it compiles, which takes a quarter of a
# cold start. If we turn off only that, XLA uses Triton kernels with a bad tiling for products, and a prompt of 512
# tokens takes 14 times as long. So we also turn off Triton kernels. XLA then calls cuBLASLt, which chooses a good
# kernel without timing.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

# The gradient of an embedding adds many rows into one. XLA's kernel for that adds them in the order in which threads
# arrive, so the same training on the same GPU ends with other bits. With this option XLA sorts the rows first.
FIXED_ORDER = {"xla_gpu_exclude_nondeterministic_ops": True}


def compiler_options(platform: str) -> dict[str, Any]:
    """Return XLA's options for "cpu", "gpu" or another platform.

    On a CPU we use vectors of 512 bits. XLA's default is 256, because some CPUs lower their clock rate for 512.
    """
    match platform:
        case "cpu":
            return {"xla_cpu_prefer_vector_width": 512}
        case "gpu":
            return LOOPS_IN_GRAPHS
        case _:
            return {}


def untuned_options(platform: str) -> dict[str, Any]:
    """Return XLA's options without any choice that depends on times measured during compilation.

    Two processes that compile one program with these options compute the same bits, no matter how busy the GPU is. With
    autotuning they may not: XLA times several ways to sum a product and takes the fastest. On a busy GPU, each process
    may find that a different way is the fastest.
    """
    return compiler_options(platform) | (UNTUNED if platform == "gpu" else {})


def training_options(platform: str) -> dict[str, Any]:
    """Return XLA's options for programs that compute the same bits in every run."""
    return untuned_options(platform) | (FIXED_ORDER if platform == "gpu" else {})


def model_options(platform: str, params: Params, config: Config, *, ops: Ops, batch: int) -> dict[str, Any]:
    """Return the options for programs that prefill and decode `batch` sequences on one device. `params` may be shapes.

    On a GPU we turn autotuning off for one sequence in bfloat16 if our kernels compute all products of a decoding step
    and all attention. XLA then computes only the products of a prompt, and these are as fast with untuned cuBLASLt as
    with autotuning (benchmarks/results/prompts-h100.md). We leave autotuning on in the cases that we have not compared:
    float32, experts, ops that the kernels refuse, several sequences, several devices. There a slow prompt would cost
    more than a slow start.
    """
    kernels = (op for name, op in ops._asdict().items() if name != "moe_add")  # only experts need moe_add
    # We recognize kernels by their attributes, because importing their class would import Pallas, which takes a second.
    by_kernels = all(getattr(op, "accepted", None) and not op.refused for op in kernels)
    bfloat16 = params.embedding.dtype == np.dtype(jax.numpy.bfloat16)
    compared = batch == 1 and by_kernels and bfloat16 and not config.experts
    return untuned_options(platform) if compared else compiler_options(platform)
