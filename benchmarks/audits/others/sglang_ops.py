"""Triton kernels of SGLang, interpreted. Its unpacked wheel is in PYTHONPATH. Docstrings name the called functions."""

import llamaspec.benchmarks.audits.others.interpreted as here  # isort: skip
import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]

for name in ("sglang", "sglang.srt", "sglang.srt.layers"):
    here.package(name)
# The kernels take these from modules that look for a GPU, or that need compiled code.
here.package(
    "sglang.srt.utils",
    is_cuda=lambda: False,  # or kernels that CUDA C++ replaces are left out
    is_hip=lambda: False,
    is_npu=lambda: False,
    is_gfx95_supported=lambda: False,
    is_gfx1250_supported=lambda: False,
    get_device_name=lambda: "H200",
    get_device_core_count=lambda: 132,
    get_bool_env_var=lambda *_: False,
)
here.package("sglang.srt.utils.custom_op", register_custom_op=lambda **_: lambda function: function)
here.package("sglang.kernels.kernel_api_logging", debug_kernel_api=lambda function: function)
here.package(
    "sglang.kernels.ops.diffusion.common.platform",
    lazy_fallback=lambda *_: None,
    select_impl=lambda function, **_: function,
)
here.package("sglang.srt.layers.dp_attention", is_dp_attention_enabled=lambda: False)
here.stand_ins("sglang.srt.environ")

OPS = "sglang.kernels.ops"
decoding = here.without_packages(f"{OPS}.attention.decode_attention")
embeddings = here.without_packages(f"{OPS}.embeddings.vocab_parallel_embedding")
fused_rmsnorm = here.without_packages(f"{OPS}.layernorm.fused_rmsnorm")
infer = here.without_packages(f"{OPS}.diffusion.norm.norm_triton")
int8 = here.without_packages(f"{OPS}.quantization.int8_kernel")
merging = here.without_packages(f"{OPS}.attention.merge_state")
onepass = here.without_packages(f"{OPS}.diffusion.norm.rmsnorm_onepass_triton")
prefilling = here.without_packages(f"{OPS}.attention.prefill_attention")
rotary = here.without_packages(f"{OPS}.diffusion.rope.rotary_triton")
router = here.without_packages(f"{OPS}.moe.router")
row_argmax = here.without_packages(f"{OPS}.speculative.row_argmax")
softcap = here.without_packages(f"{OPS}.activation.softcap")


def argmax(x):
    """Call `speculative.row_argmax.row_argmax`."""
    return row_argmax.row_argmax(x)


def capped(x, *, cap):
    """Call `activation.softcap.softcap_to_float32_logits`."""
    return softcap.softcap_to_float32_logits(x, cap, torch.full_like(x, torch.nan, dtype=torch.float32))


def embedding(tokens, table):
    """Call the kernel of `embeddings.vocab_parallel_embedding`."""
    vocab, dim = table.shape
    out = torch.full((len(tokens), dim), torch.nan, dtype=table.dtype)
    block = min(1024, triton.next_power_of_2(dim))
    kernel = embeddings._vocab_parallel_embedding_kernel[(len(tokens), triton.cdiv(dim, block))]
    kernel(tokens, table, out, dim, table.stride(0), 0, vocab, 0, vocab, vocab, BLOCK_H=block)
    return out


def rmsnorm(x, weight, *, eps):
    """Call `layernorm.fused_rmsnorm.fused_rmsnorm`."""
    return fused_rmsnorm.fused_rmsnorm(x, weight, eps)


def rmsnorm_twice(x, weight, *, eps):
    """Return the first norm of `layernorm.fused_rmsnorm.fused_dual_residual_rmsnorm`, with a residual of zeros."""
    return fused_rmsnorm.fused_dual_residual_rmsnorm(x, torch.zeros_like(x), weight, weight, eps)[1]


def rmsnorm_onepass(x, weight, *, eps):
    """Call `diffusion.norm.rmsnorm_onepass_triton.triton_one_pass_rms_norm`."""
    return onepass.triton_one_pass_rms_norm(x, weight, eps)


def rmsnorm_infer(x, weight, *, eps):
    """Call `diffusion.norm.norm_triton.norm_infer(is_rms_norm=True)`."""
    return infer.norm_infer(x, weight, None, eps, is_rms_norm=True)


def layernorm(x, weight, bias, *, eps):
    """Call `diffusion.norm.norm_triton.norm_infer`."""
    return infer.norm_infer(x, weight, bias, eps)


def rope_interleaved(x, positions, frequencies):
    """Call `diffusion.rope.rotary_triton.apply_rotary_embedding`, with one sequence's positions."""
    cos, sin = here.angles(positions[0], frequencies)
    return rotary.apply_rotary_embedding(x, cos, sin)


def quantize(w, *, scheme):
    """Call `quantization.int8_kernel.per_token_quant_int8`, which gives each row of `w` a scale."""
    return int8.per_token_quant_int8(w)


def route_by_tiles(x, router_weight, *, experts_per_token, renormalized=True, bias=None):
    """Call `moe.router.fused_moe_router_shim` with more than 8 experts, so that its kernel multiplies tiles."""
    return route(x, router_weight, experts_per_token=experts_per_token, renormalized=renormalized, bias=bias)


def route(x, router_weight, *, experts_per_token, renormalized=True, bias=None):
    """Call `moe.router.fused_moe_router_shim`."""
    weights, experts = router.fused_moe_router_shim(0.0, x, router_weight, experts_per_token, renormalized, bias)
    return experts, weights


def attention_paged(q, k_pages, v_pages, table, lengths):
    """Call `attention.decode_attention.decode_attention_fwd`, with at most 4 splits."""
    (batch, heads, dim), splits, page = q.shape, 4, k_pages.shape[1]
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    slots = (table[:, :, None] * page + torch.arange(page, device=q.device)).reshape(batch, -1)
    indices = torch.cat([row[:length] for row, length in zip(slots, lengths.tolist(), strict=True)])
    out, partial = torch.full_like(q, torch.nan), torch.full((batch, heads, splits, dim), torch.nan)
    lse, counts = torch.full((batch, heads, splits), torch.nan), torch.full((batch,), splits, dtype=torch.int32)
    k, v = (a.reshape(-1, *a.shape[2:]) for a in (k_pages, v_pages))
    decoding.decode_attention_fwd(q, k, v, out, starts, indices, partial, lse, counts, splits, dim**-0.5, 1.0, 1.0)
    return out


def attention_prefill(q, k, v, offsets, *, window):
    """Call `attention.prefill_attention.context_attention_fwd`."""
    batch, seq, heads, dim = q.shape
    q, k, v = (a[:, :seq].reshape(batch * seq, -1, dim) for a in (q, k, v))
    out = torch.full_like(q, torch.nan)
    starts, lengths = torch.arange(batch) * seq, torch.full((batch,), seq)
    prefilling.context_attention_fwd(q, k, v, out, starts, lengths, seq)
    return out.reshape(batch, seq, heads, dim)


def attention_decode(q, k, v, lengths, *, window):
    """Call `attention.merge_state.merge_state_triton` on torch's attention over two halves of the keys."""
    return here.in_two_parts(q, k, v, lengths, merge=lambda *parts: merging.merge_state_triton(*parts)[0])
