"""A kernel that shows how Triton's own interpreter computes with bfloat16. Nothing is patched here."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def add_kernel(out, x, y, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


def add(x, y):
    """Return `tl.load(x) + tl.load(y)`."""
    out = torch.full_like(x, float("nan"))
    add_kernel[(1,)](out, x, y, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))  # pyright: ignore
    return out
