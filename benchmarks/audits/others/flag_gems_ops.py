"""Triton kernels of FlagGems, interpreted. Docstrings name the called functions."""

import os

os.environ.setdefault("GEMS_VENDOR", "nvidia")

import llamaspec.benchmarks.audits.others.interpreted as here  # isort: skip
from importlib import import_module

import torch  # pyright: ignore[reportMissingImports]
from triton.runtime.interpreter import InterpretedFunction  # pyright: ignore[reportMissingImports]

from llamaspec.benchmarks.audits.others.torch_ops import gradients

# FlagGems caches compiled kernels itself, and its caches do not support the interpreter.
here.package("flag_gems")
here.package(
    "flag_gems.utils.libentry",
    libentry=lambda: lambda kernel: kernel,
    libtuner=lambda configs, key, **_: here.one_configuration(configs, key),
)
if here.INTERPRETED:
    vars(import_module("flag_gems.utils.pointwise_dynamic"))["JITFunction"] = InterpretedFunction
InterpretedFunction.cache_key = property(lambda kernel: kernel.__name__)
from flag_gems import fused, ops  # noqa: E402  # pyright: ignore[reportMissingImports]
from flag_gems.ops import attention as attending  # noqa: E402  # pyright: ignore[reportMissingImports]


def add(x, y):
    """Call `flag_gems.ops.add`."""
    return ops.add(x, y)


def argmax(x):
    """Call `flag_gems.ops.argmax`."""
    return ops.argmax(x, -1)


def softmax(x):
    """Call `flag_gems.ops.softmax`."""
    return ops.softmax(x, -1)


def softmax_backward(p, dp):
    """Call `flag_gems.ops.softmax_backward`."""
    return ops.softmax_backward(dp, p, -1, p.dtype)


def rmsnorm(x, weight, *, eps):
    """Call `flag_gems.ops.rms_norm_forward`."""
    return ops.rms_norm_forward(x, (x.shape[-1],), weight, eps)[0]


def rmsnorm_backward(x, weight, dy, *, eps):
    """Call `flag_gems.ops.rms_norm_backward`."""
    inverse = ops.rms_norm_forward(x, (x.shape[-1],), weight, eps)[1]
    return ops.rms_norm_backward(dy, x, inverse, (x.shape[-1],), weight, eps)


def swiglu(gate, up):
    """Call `flag_gems.fused.silu_and_mul`."""
    return fused.silu_and_mul(gate, up)


def swiglu_backward(gate, up, dy):
    """Call the backward of `flag_gems.fused.silu_and_mul`."""
    return gradients(fused.silu_and_mul, gate, up, slope=dy)


def embedding(tokens, table):
    """Call `flag_gems.ops.embedding`."""
    return ops.embedding(table, tokens)


def embedding_backward(tokens, dx, *, vocab):
    """Call `flag_gems.ops.embedding_backward`."""
    return ops.embedding_backward(dx, tokens, vocab)


def gemm(x, weight):
    """Call `flag_gems.ops.mm`."""
    return ops.mm(x, weight.T)


def gemv(x, weight):
    """Call `flag_gems.ops.mv`."""
    return ops.mv(weight, x)


def linear(x, weight, bias):
    """Call `flag_gems.ops.addmm`."""
    return ops.addmm(torch.zeros_like(weight[:, 0]) if bias is None else bias, x, weight.T)


def _rotated(x, positions, frequencies, *, interleaved):
    cos, sin = here.angles(positions, frequencies)
    table = (a.reshape(-1, a.shape[-1]) for a in (cos, sin))
    at = torch.arange(positions.numel()).reshape(positions.shape)
    return fused.apply_rotary_pos_emb(x, x, *table, at, rotary_interleaved=interleaved)[0]


def rope_halves(x, positions, frequencies):
    """Call `flag_gems.fused.apply_rotary_pos_emb`."""
    return _rotated(x, positions, frequencies, interleaved=False)


def rope_interleaved(x, positions, frequencies):
    """Call `flag_gems.fused.apply_rotary_pos_emb(rotary_interleaved=True)`."""
    return _rotated(x, positions, frequencies, interleaved=True)


def losses(logits, targets):
    return fused.cross_entropy_loss(logits, targets.long(), reduction="none")


def cross_entropy(logits, targets, weights):
    """Call `flag_gems.fused.cross_entropy_loss(reduction="none")`."""
    return (losses(logits, targets) * weights).sum()


def cross_entropy_backward(logits, targets, weights):
    """Call the backward of `flag_gems.fused.cross_entropy_loss(reduction="none")`."""
    return gradients(lambda x: losses(x, targets), logits, slope=weights.to(logits.dtype))[0]


def _attended(q, k, v, mask):
    q, k, v = (a.transpose(1, 2).contiguous() for a in (q, k, v))
    heads = q.shape[:2]
    mask = mask[:, None].expand(*heads, *mask.shape[1:]).contiguous()
    return attending.scaled_dot_product_attention_forward(q, k, v, mask, enable_gqa=True)[0].transpose(1, 2)


def attention(q, k, v, mask):
    """Call `flag_gems.ops.scaled_dot_product_attention_forward`."""
    return _attended(q, k, v, mask.to(q.dtype))


def attention_of_booleans(q, k, v, mask):
    """Call `flag_gems.ops.scaled_dot_product_attention_forward` with a mask of booleans, True where a key is seen."""
    return _attended(q, k, v, mask == 0)
