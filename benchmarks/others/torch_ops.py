"""Functions of torch."""

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]


def softmax(x):
    return torch.softmax(x, -1)


def rmsnorm(x, weight, *, eps):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def attention(q, k, v, mask):
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    grouped = q.shape[1] > k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask[:, None].to(q.dtype), enable_gqa=grouped).transpose(1, 2)


def linear(x, weight, bias):
    return F.linear(x, weight, bias)


def swiglu(gate, up):
    return F.silu(gate) * up
