"""Kernels of flash-linear-attention, interpreted. Docstrings name the called functions."""

import llamaspec.benchmarks.audits.others.interpreted as here  # isort: skip
from llamaspec.benchmarks.audits.others.torch_ops import gradients

for name in ("fla", "fla.ops", "fla.ops.attn"):
    here.package(name, __version__="0")  # or its models would be imported
from fla.modules.activations import ops as activations  # noqa: E402  # pyright: ignore
from fla.modules.fused_cross_entropy.ops import cross_entropy_loss  # noqa: E402  # pyright: ignore
from fla.modules.norm.layernorm import rms_norm  # noqa: E402  # pyright: ignore
from fla.modules.rotary.ops import rotary_embedding  # noqa: E402  # pyright: ignore
from fla.ops.attn.parallel import parallel_attn  # noqa: E402  # pyright: ignore
from fla.ops.utils.logsumexp import logsumexp_fwd  # noqa: E402  # pyright: ignore
from fla.ops.utils.softmax import softmax_bwd, softmax_fwd  # noqa: E402  # pyright: ignore


def softmax(x):
    """Call `fla.ops.utils.softmax.softmax_fwd`."""
    return softmax_fwd(x)


def softmax_backward(p, dp):
    """Call `fla.ops.utils.softmax.softmax_bwd`."""
    return softmax_bwd(p, dp)


def logsumexp(x):
    """Call `fla.ops.utils.logsumexp.logsumexp_fwd`."""
    return logsumexp_fwd(x)


def rmsnorm(x, weight, *, eps):
    """Call `fla.modules.norm.layernorm.rms_norm`."""
    return rms_norm(x, weight, None, eps=eps)


def rmsnorm_backward(x, weight, dy, *, eps):
    """Call the backward of `fla.modules.norm.layernorm.rms_norm`."""
    return gradients(lambda x, g: rms_norm(x, g, None, eps=eps), x, weight, slope=dy)


def swiglu(gate, up):
    """Call `fla.modules.activations.swiglu`."""
    return activations.swiglu(gate, up)


def swiglu_backward(gate, up, dy):
    """Call the backward of `fla.modules.activations.swiglu`."""
    return gradients(activations.swiglu, gate, up, slope=dy)


def _rotated(x, positions, frequencies, *, interleaved):
    cos, sin = (a.to(x.dtype) for a in here.angles(positions[0], frequencies))  # it takes no others
    return rotary_embedding(x, cos, sin, interleaved=interleaved)


def rope_halves(x, positions, frequencies):
    """Call `fla.modules.rotary.ops.rotary_embedding`, with one sequence's positions."""
    return _rotated(x, positions, frequencies, interleaved=False)


def rope_interleaved(x, positions, frequencies):
    """Call `fla.modules.rotary.ops.rotary_embedding(interleaved=True)`, with one sequence's positions."""
    return _rotated(x, positions, frequencies, interleaved=True)


def rope_halves_backward(dy, positions, frequencies):
    """Call the backward of `fla.modules.rotary.ops.rotary_embedding`, with one sequence's positions."""
    return gradients(lambda x: rope_halves(x, positions, frequencies), dy, slope=dy)[0]


def cross_entropy(logits, targets, weights):
    """Call `fla.modules.fused_cross_entropy.ops.cross_entropy_loss`."""
    return (cross_entropy_loss(logits, targets)[0] * weights).sum()


def cross_entropy_backward(logits, targets, weights):
    """Call the backward of `fla.modules.fused_cross_entropy.ops.cross_entropy_loss`."""
    return gradients(lambda x: cross_entropy_loss(x, targets)[0], logits, slope=weights)[0]


def attention_prefill(q, k, v, offsets, *, window):
    """Call `fla.ops.attn.parallel.parallel_attn`."""
    return parallel_attn(q, k, v, window_size=window)


def attention_backward(q, k, v, mask, do):
    """Call the backward of `fla.ops.attn.parallel.parallel_attn`, which is causal."""
    return gradients(parallel_attn, q, k, v, slope=do)
