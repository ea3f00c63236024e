"""Triton kernels of flash-attn, interpreted. A clone is in PYTHONPATH. Docstrings name the called functions."""

import llamaspec.benchmarks.audits.others.interpreted as here  # isort: skip
from llamaspec.benchmarks.audits.others.torch_ops import gradients

here.package("flash_attn")
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss  # noqa: E402  # pyright: ignore
from flash_attn.ops.triton.layer_norm import rms_norm_fn  # noqa: E402  # pyright: ignore
from flash_attn.ops.triton.rotary import apply_rotary  # noqa: E402  # pyright: ignore


def rmsnorm(x, weight, *, eps):
    """Call `flash_attn.ops.triton.layer_norm.rms_norm_fn`."""
    return rms_norm_fn(x, weight, None, eps=eps)


def rmsnorm_backward(x, weight, dy, *, eps):
    """Call the backward of `flash_attn.ops.triton.layer_norm.rms_norm_fn`."""
    return gradients(lambda x, weight: rmsnorm(x, weight, eps=eps), x, weight, slope=dy)


def _rotated(x, positions, frequencies, **options):
    return apply_rotary(x, *here.angles(positions[0], frequencies), **options)


def rope_halves(x, positions, frequencies):
    """Call `flash_attn.ops.triton.rotary.apply_rotary`."""
    return _rotated(x, positions, frequencies)


def rope_interleaved(x, positions, frequencies):
    """Call `flash_attn.ops.triton.rotary.apply_rotary(interleaved=True)`."""
    return _rotated(x, positions, frequencies, interleaved=True)


def rope_halves_backward(dy, positions, frequencies):
    """Call `flash_attn.ops.triton.rotary.apply_rotary(conjugate=True)`."""
    return _rotated(dy, positions, frequencies, conjugate=True)


def cross_entropy(logits, targets, weights):
    """Call `flash_attn.ops.triton.cross_entropy.cross_entropy_loss`."""
    return (cross_entropy_loss(logits, targets)[0] * weights).sum()


def cross_entropy_backward(logits, targets, weights):
    """Call the backward of `flash_attn.ops.triton.cross_entropy.cross_entropy_loss`."""
    return gradients(lambda x: cross_entropy_loss(x, targets)[0], logits, slope=weights)[0]
