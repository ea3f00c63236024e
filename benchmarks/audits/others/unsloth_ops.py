"""Triton kernels of unsloth, interpreted. A clone is in PYTHONPATH. Docstrings name the called functions."""

import llamaspec.benchmarks.audits.others.interpreted as here  # isort: skip
import logging
from functools import partial

import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from packaging.version import Version
from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

from llamaspec.benchmarks.audits.others.torch_ops import gradients


def settings(n):
    """Choose block size and warps for a row of `n` numbers, as `unsloth.kernels.utils` does on a GPU."""
    return triton.next_power_of_2(n), 4


# The kernels take these from modules that look for a GPU.
for package in ("unsloth", "unsloth.kernels", "unsloth_zoo"):
    here.package(package)
here.package("unsloth.device_type", DEVICE_COUNT=1)
here.package("unsloth_zoo.utils", Version=Version)
here.package("unsloth_zoo.loss_utils", patch_loss_functions=None, post_patch_loss_function=None)
here.package("transformers.models.llama.modeling_llama", logger=logging.getLogger(), LlamaRMSNorm=torch.nn.Module)
here.package(
    "unsloth.kernels.utils",
    calculate_settings=settings,
    torch_gpu_device=torch.cuda.device,
    torch_device_stream=None,
    MAX_FUSED_SIZE=65536,
    triton_tanh=None,
    triton_cast=partial(tl.cast, _semantic=interpreter.interpreter_semantic),
    is_cdna=lambda: False,
)
from unsloth.kernels.cross_entropy_loss import Fast_CrossEntropyLoss  # noqa: E402  # pyright: ignore
from unsloth.kernels.rms_layernorm import Fast_RMS_Layernorm  # noqa: E402  # pyright: ignore
from unsloth.kernels.rope_embedding import fast_rope_embedding  # noqa: E402  # pyright: ignore
from unsloth.kernels.swiglu import swiglu_DWf_DW_dfg_kernel, swiglu_fg_kernel  # noqa: E402  # pyright: ignore


def rmsnorm(x, weight, *, eps):
    """Call `unsloth.kernels.rms_layernorm.Fast_RMS_Layernorm`."""
    return Fast_RMS_Layernorm.apply(x, weight, eps, False)


def swiglu(gate, up):
    """Call `unsloth.kernels.swiglu.swiglu_fg_kernel`."""
    return swiglu_fg_kernel(gate[None], up[None])[0]


def swiglu_backward(gate, up, dy):
    """Call `unsloth.kernels.swiglu.swiglu_DWf_DW_dfg_kernel`."""
    _, dup, dgate = swiglu_DWf_DW_dfg_kernel(dy.clone(), gate.clone(), up.clone())
    return dgate, dup


def rope_halves(x, positions, frequencies):
    """Call `unsloth.kernels.rope_embedding.fast_rope_embedding`, with one sequence's positions."""
    cos, sin = (torch.cat([a, a], -1) for a in here.angles(positions[0], frequencies))
    q = x.transpose(1, 2)
    return fast_rope_embedding(q.clone(), q.clone(), cos, sin)[0].transpose(1, 2)


def rope_halves_backward(dy, positions, frequencies):
    """Call the backward of `unsloth.kernels.rope_embedding.fast_rope_embedding`."""
    return gradients(lambda x: rope_halves(x, positions, frequencies), dy, slope=dy)[0]


def cross_entropy(logits, targets, weights):
    """Call `unsloth.kernels.cross_entropy_loss.Fast_CrossEntropyLoss`."""
    return (Fast_CrossEntropyLoss.apply(logits, targets, 0, 0) * weights).sum()


def cross_entropy_backward(logits, targets, weights):
    """Call the backward of `unsloth.kernels.cross_entropy_loss.Fast_CrossEntropyLoss`."""
    return gradients(lambda x: Fast_CrossEntropyLoss.apply(x * 1, targets, 0, 0), logits, slope=weights)[0]
