"""Modules and functions of transformers, on torch's CPU. Docstrings name the called functions."""

from types import SimpleNamespace

import torch  # pyright: ignore[reportMissingImports]
from transformers.models.cohere import modeling_cohere as cohere  # pyright: ignore[reportMissingImports]
from transformers.models.llama import modeling_llama as llama  # pyright: ignore[reportMissingImports]
from transformers.models.mixtral import modeling_mixtral as mixtral  # pyright: ignore[reportMissingImports]
from transformers.models.qwen3 import modeling_qwen3 as qwen3  # pyright: ignore[reportMissingImports]

from llamaspec.benchmarks.audits.others.torch_ops import gradients


def with_weights(module, **weights):
    """Return a function that calls `module` with these weights."""
    return lambda *inputs: torch.func.functional_call(module, weights, inputs)


def rmsnorm(x, weight, *, eps):
    """Call `LlamaRMSNorm`."""
    return with_weights(llama.LlamaRMSNorm(x.shape[-1], eps), weight=weight)(x)


def rmsnorm_backward(x, weight, dy, *, eps):
    """Call the backward of `LlamaRMSNorm`."""
    return gradients(lambda x, weight: rmsnorm(x, weight, eps=eps), x, weight, slope=dy)


def qk_norm(q, k, q_weight, k_weight, *, eps):
    """Call `Qwen3RMSNorm`, on the heads of q and of k."""
    module = qwen3.Qwen3RMSNorm(q.shape[-1], eps)
    return with_weights(module, weight=q_weight)(q), with_weights(module, weight=k_weight)(k)


def _rotated(module, x, positions, frequencies, widened):
    angles = positions[..., None].float() * frequencies
    cos, sin = (widened(a).to(x.dtype) for a in (angles.cos(), angles.sin()))
    q = x.transpose(1, 2)
    return module.apply_rotary_pos_emb(q, q, cos, sin)[0].transpose(1, 2)


def rope_halves(x, positions, frequencies):
    """Call `llama.apply_rotary_pos_emb`."""
    return _rotated(llama, x, positions, frequencies, lambda a: torch.cat([a, a], -1))


def rope_interleaved(x, positions, frequencies):
    """Call `cohere.apply_rotary_pos_emb`."""
    return _rotated(cohere, x, positions, frequencies, lambda a: a.repeat_interleave(2, -1))


def rope_halves_backward(dy, positions, frequencies):
    """Call the backward of `llama.apply_rotary_pos_emb`."""
    return gradients(lambda x: rope_halves(x, positions, frequencies), dy, slope=dy)[0]


def attention(q, k, v, mask):
    """Call `llama.eager_attention_forward`."""
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    return llama.eager_attention_forward(module, q, k, v, mask[:, None].to(q.dtype), q.shape[-1] ** -0.5)[0]


def attention_backward(q, k, v, mask, do):
    """Call the backward of `llama.eager_attention_forward`."""
    return gradients(lambda q, k, v: attention(q, k, v, mask), q, k, v, slope=do)


def route(x, router, *, experts_per_token, renormalized=True):
    """Call `MixtralTopKRouter`."""
    config = SimpleNamespace(num_experts_per_tok=experts_per_token, num_local_experts=len(router))
    config.hidden_size = x.shape[-1]
    _, weights, chosen = with_weights(mixtral.MixtralTopKRouter(config), weight=router)(x)
    return chosen, weights


def moe(x, router, gate, up, down, *, experts_per_token, renormalized=True):
    """Call `MixtralTopKRouter` and `MixtralExperts`."""
    chosen, weights = route(x, router, experts_per_token=experts_per_token)
    config = SimpleNamespace(num_local_experts=len(router), hidden_size=x.shape[-1], hidden_act="silu")
    config.intermediate_size, config._experts_implementation = gate.shape[1], "eager"
    experts = mixtral.MixtralExperts(config)
    return with_weights(experts, gate_up_proj=torch.cat([gate, up], 1), down_proj=down)(x, chosen, weights)
