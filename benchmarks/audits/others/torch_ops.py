"""Functions of torch. Docstrings name the called functions."""

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]


def gradients(function, *inputs, slope):
    """Return the gradients of `function` with respect to `inputs`; `slope` is the gradient of its output.

    Works on copies, because some backward kernels overwrite their arguments.
    """
    copies = [a.clone().requires_grad_() for a in inputs]
    return torch.autograd.grad(function(*copies), copies, slope.clone())


def add(x, y):
    """Return `x + y`."""
    return x + y


def argmax(x):
    """Call `argmax`."""
    return x.argmax(-1)


def softmax(x):
    """Call `softmax`."""
    return torch.softmax(x, -1)


def softmax_backward(p, dp):
    """Call `_softmax_backward_data`."""
    return torch._softmax_backward_data(dp, p, -1, p.dtype)


def logsumexp(x):
    """Call `logsumexp`."""
    return torch.logsumexp(x, -1)


def rmsnorm(x, weight, *, eps):
    """Call `nn.functional.rms_norm`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rmsnorm_backward(x, weight, dy, *, eps):
    """Call the backward of `nn.functional.rms_norm`."""
    return gradients(lambda x, weight: rmsnorm(x, weight, eps=eps), x, weight, slope=dy)


def attention(q, k, v, mask):
    """Call `nn.functional.scaled_dot_product_attention`."""
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    grouped = q.shape[1] > k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask[:, None].to(q.dtype), enable_gqa=grouped).transpose(1, 2)


def attention_backward(q, k, v, mask, do):
    """Call the backward of `nn.functional.scaled_dot_product_attention`."""
    return gradients(lambda q, k, v: attention(q, k, v, mask), q, k, v, slope=do)


def linear(x, weight, bias):
    """Call `nn.functional.linear`."""
    return F.linear(x, weight, bias)


def linear_backward(x, weight, dy):
    """Call the backward of `nn.functional.linear`."""
    return gradients(F.linear, x, weight, torch.zeros_like(dy[0]), slope=dy)


def gemm(x, weight):
    """Call `mm`."""
    return torch.mm(x, weight.T)


def gemv(x, weight):
    """Call `mv`."""
    return torch.mv(weight, x)


def swiglu(gate, up):
    """Return `nn.functional.silu(gate) * up`."""
    return F.silu(gate) * up


def swiglu_backward(gate, up, dy):
    """Call the backward of `nn.functional.silu(gate) * up`."""
    return gradients(swiglu, gate, up, slope=dy)


def embedding(tokens, table):
    """Call `nn.functional.embedding`."""
    return F.embedding(tokens, table)


def embedding_backward(tokens, dx, *, vocab):
    """Call the backward of `nn.functional.embedding`."""
    table = torch.zeros(vocab, dx.shape[-1], dtype=dx.dtype)
    return gradients(lambda table: F.embedding(tokens, table), table, slope=dx)[0]


def losses(logits, targets):
    return F.cross_entropy(logits, targets.long(), reduction="none")


def cross_entropy(logits, targets, weights):
    """Call `nn.functional.cross_entropy(reduction="none")`."""
    return (losses(logits, targets) * weights).sum()


def cross_entropy_backward(logits, targets, weights):
    """Call the backward of `nn.functional.cross_entropy(reduction="none")`."""
    return gradients(lambda x: losses(x, targets), logits, slope=weights.to(logits.dtype))[0]


def route(x, router, *, experts_per_token, renormalized=True):
    """Call `softmax(dtype=float32)` and `topk`."""
    weights, chosen = torch.softmax(F.linear(x, router), -1, dtype=torch.float32).topk(experts_per_token)
    return chosen, weights / weights.sum(-1, keepdim=True) if renormalized else weights
