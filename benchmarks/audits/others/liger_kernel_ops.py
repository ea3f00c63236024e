"""Kernels of Liger-Kernel, interpreted. Docstrings name the called functions."""

import llamaspec.benchmarks.audits.others.interpreted as here  # isort: skip
import torch  # pyright: ignore[reportMissingImports]
from liger_kernel import ops  # pyright: ignore[reportMissingImports]

from llamaspec.benchmarks.audits.others.torch_ops import gradients


def softmax(x):
    """Call `LigerSoftmaxFunction`."""
    return ops.LigerSoftmaxFunction.apply(x)


def softmax_backward(p, dp):
    """Call `softmax._softmax_backward`, which takes the probabilities p."""
    from liger_kernel.ops import softmax as module  # pyright: ignore[reportMissingImports]
    from liger_kernel.ops.utils import calculate_settings  # pyright: ignore[reportMissingImports]

    return module._softmax_backward(dp.clone(), p, *calculate_settings(p.shape[-1]), False)


def rmsnorm(x, weight, *, eps):
    """Call `LigerRMSNormFunction(casting_mode="gemma")`, which rounds once."""
    return ops.LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)


def rmsnorm_llama(x, weight, *, eps):
    """Call `LigerRMSNormFunction(casting_mode="llama")`."""
    return ops.LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


def rmsnorm_backward(x, weight, dy, *, eps):
    """Call the backward of `LigerRMSNormFunction(casting_mode="gemma")`."""
    return gradients(lambda x, g: rmsnorm(x, g, eps=eps), x, weight, slope=dy)


def swiglu(gate, up):
    """Call `LigerSiLUMulFunction`."""
    return ops.LigerSiLUMulFunction.apply(gate, up)


def swiglu_backward(gate, up, dy):
    """Call the backward of `LigerSiLUMulFunction`."""
    return gradients(swiglu, gate, up, slope=dy)


def rope_halves(x, positions, frequencies):
    """Call `LigerRopeFunction`."""
    cos, sin = (torch.cat([a, a], -1) for a in here.angles(positions, frequencies))
    q = x.transpose(1, 2).clone()
    return ops.LigerRopeFunction.apply(q, q.clone(), cos, sin)[0].transpose(1, 2)


def rope_halves_backward(dy, positions, frequencies):
    """Call the backward of `LigerRopeFunction`."""
    return gradients(lambda x: rope_halves(x, positions, frequencies), dy, slope=dy)[0]


def rope_interleaved(x, positions, frequencies):
    """Call `LigerLlama4RopeFunction`, with one sequence's positions."""
    q = x.clone()
    freqs = torch.complex(*here.angles(positions[0], frequencies))
    return ops.LigerLlama4RopeFunction.apply(q, q.clone(), freqs)[0]


def losses(logits, targets):
    return ops.LigerCrossEntropyFunction.apply(logits, targets.long(), None, -100, 0.0, 0.0, "none")[0]


def cross_entropy(logits, targets, weights):
    """Call `LigerCrossEntropyFunction(reduction="none")`."""
    return (losses(logits.clone(), targets) * weights).sum()


def cross_entropy_backward(logits, targets, weights):
    """Call the backward of `LigerCrossEntropyFunction(reduction="none")`."""
    return gradients(lambda x: losses(x * 1, targets), logits, slope=weights)[0]
