"""Triton kernels of vLLM, interpreted. Its unpacked wheel is in PYTHONPATH. Docstrings name the called functions."""

import llamaspec.benchmarks.audits.others.interpreted as here  # isort: skip
import math
from enum import IntEnum
from types import SimpleNamespace

import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.language.extra import libdevice  # pyright: ignore[reportMissingImports]

# The kernels take these from modules that look for a GPU, or that need compiled code.
PLATFORM = SimpleNamespace(
    is_rocm=lambda: False,
    is_xpu=lambda: False,
    is_cuda_alike=lambda: True,
    has_device_capability=lambda _: True,
    fp8_dtype=lambda: torch.float8_e4m3fn,
)
here.package("vllm")
here.package("vllm.triton_utils", tl=tl, triton=triton, tldevice=libdevice, LOG2E=math.log2(math.e))
MODES = "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD"
here.package("vllm.v1.kv_cache_interface", KVQuantMode=IntEnum("KVQuantMode", MODES, start=0))
here.package("vllm.platforms", current_platform=PLATFORM)
here.package("vllm.v1.worker.gpu.buffer_utils", StagedWriteTensor=None, UvaBackedTensor=None)
here.package("vllm.model_executor.layers.rotary_embedding.base", RotaryEmbeddingBase=torch.nn.Module)
here.package(
    "vllm.model_executor.determinism.batch_invariant_configs",
    _get_matmul_config=lambda m, n, k, dtype, default: default,
    _get_descriptor_matmul_config=None,
    resolve_tuned_matmul_configs=None,
)
here.package("vllm.envs", VLLM_BATCH_INVARIANT=False)
here.package("vllm.utils.mem_utils", get_max_shared_memory_bytes=lambda: 232_448)
here.package(
    "vllm.utils.platform_utils",
    num_compute_units=lambda _device: torch.cuda.get_device_properties(0).multi_processor_count,
)
here.stand_ins(
    "vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope",
    "vllm.logger",
    "vllm.sampling_params",
    "vllm.utils.nccl",
    "vllm.utils.torch_utils",
    "vllm.v1.outputs",
)

OPS = "vllm.v1.attention.ops"
batch_invariant = here.without_packages("vllm.model_executor.determinism.batch_invariant")
beam = here.without_packages("vllm.models.beam.nvidia.layernorm")
decoding = here.without_packages(f"{OPS}.triton_decode_attention")
int8 = here.without_packages("vllm.model_executor.layers.quantization.utils.int8_utils")
logprob = here.without_packages("vllm.v1.worker.gpu.sample.logprob")
merging = here.without_packages(f"{OPS}.triton_merge_attn_states")
filtering = here.without_packages("vllm.v1.worker.gpu.sample.min_p")
mrope = here.without_packages("vllm.model_executor.layers.rotary_embedding.mrope")
norm = here.without_packages("vllm.models.inkling.nvidia.ops.norm")
prefilling = here.without_packages(f"{OPS}.triton_prefill_attention")
silu = here.without_packages("vllm.models.inkling.nvidia.ops.silu_and_mul")
unified = here.without_packages(f"{OPS}.triton_unified_attention")


def softmax(x):
    """Call `batch_invariant.softmax`."""
    return batch_invariant.softmax(x)


def rmsnorm(x, weight, *, eps):
    """Call `batch_invariant.rms_norm_batch_invariant`."""
    return batch_invariant.rms_norm_batch_invariant(x, weight, eps)


def rmsnorm_inkling(x, weight, *, eps):
    """Call `models.inkling.nvidia.ops.norm.rmsnorm`."""
    return norm.rmsnorm(x, weight, eps)


def rmsnorm_after_sum(x, weight, *, eps):
    """Call `models.inkling.nvidia.ops.norm.add_rmsnorm` with a residual of zeros."""
    return norm.add_rmsnorm(torch.zeros_like(x), x, weight, eps)[0]


def add(x, y):
    """Return the sum from `models.inkling.nvidia.ops.norm.add_rmsnorm`, which also computes a norm."""
    return norm.add_rmsnorm(x, y, torch.ones_like(x[0]), 1e-5)[1]


def rmsnorm_beam(x, weight, *, eps):
    """Call `models.beam.nvidia.layernorm.beam_rms_norm`."""
    return beam.beam_rms_norm(x, weight, eps)


def gemm(x, weight):
    """Call `batch_invariant.matmul_persistent`."""
    return batch_invariant.matmul_persistent(x, weight.T)


def linear(x, weight, bias):
    """Call `batch_invariant.matmul_persistent` with a bias."""
    return batch_invariant.matmul_persistent(x, weight.T, bias)


def swiglu(gate, up):
    """Call `models.inkling.nvidia.ops.silu_and_mul.silu_and_mul_triton`."""
    return silu.silu_and_mul_triton(torch.stack([gate, up], -1).reshape(len(gate), -1))


def _rotated(x, positions, frequencies, *, halves):
    """Apply multimodal RoPE. Its three sections get equal positions, which is how models use it for text."""
    batch, seq, heads, dim = x.shape
    cos, sin = (a.reshape(1, batch * seq, dim // 2).expand(3, -1, -1) for a in here.angles(positions, frequencies))
    q = x.reshape(batch * seq, heads * dim).clone()
    sections = [dim // 2, 0, 0]
    return mrope.triton_mrope(q, q.clone(), cos, sin, sections, dim, dim, False, halves)[0].reshape(x.shape)


def rope_halves(x, positions, frequencies):
    """Call `rotary_embedding.mrope.triton_mrope`."""
    return _rotated(x, positions, frequencies, halves=True)


def rope_interleaved(x, positions, frequencies):
    """Call `rotary_embedding.mrope.triton_mrope(is_neox_style=False)`."""
    return _rotated(x, positions, frequencies, halves=False)


def cross_entropy(logits, targets, weights):
    """Call `v1.worker.gpu.sample.logprob.compute_token_logprobs`."""
    return -(logprob.compute_token_logprobs(logits, targets[:, None])[:, 0] * weights).sum()


def distribution(logits, seen, *, temperature, top_k, top_p, min_p, repetition_penalty):
    """Call `v1.worker.gpu.sample.min_p.apply_min_p`, and then torch's softmax."""
    filtered, row = logits[None].clone(), torch.zeros(1, dtype=torch.int32)
    filtering.apply_min_p(filtered, row, torch.tensor([min_p]))
    return filtered[0].softmax(-1)


def quantize(w, *, scheme):
    """Call `int8_utils.per_token_quant_int8`, which gives each row of `w` a scale."""
    return int8.per_token_quant_int8(w)


def attention_paged(q, k_pages, v_pages, table, lengths):
    """Call `triton_decode_attention.decode_attention_fwd`, with 4 splits."""
    out, (batch, heads, dim), splits = torch.full_like(q, torch.nan), q.shape, 4
    lse = torch.full((batch, heads), torch.nan)
    partial = torch.full((batch, heads, splits, dim + 1), torch.nan)
    page = k_pages.shape[1]
    decoding.decode_attention_fwd(
        q, k_pages, v_pages, out, lse, table, lengths, partial, splits, dim**-0.5, page_size=page
    )
    return out


def attention_paged_unified(q, k_pages, v_pages, table, lengths):
    """Call `triton_unified_attention.unified_attention`, with one query for each sequence."""
    out, batch = torch.full_like(q, torch.nan), len(q)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    unified.unified_attention(
        q,
        k_pages,
        v_pages,
        out,
        starts,
        1,
        lengths,
        int(lengths.max()),
        q.shape[-1] ** -0.5,
        True,
        (-1, -1),
        table,
        0,
        None,
        None,
        None,
    )
    return out


def attention_prefill(q, k, v, offsets, *, window):
    """Call `triton_prefill_attention.context_attention_fwd`."""
    batch, seq, heads, dim = q.shape
    q, k, v = (a[:, :seq].reshape(batch * seq, -1, dim) for a in (q, k, v))
    out = torch.full_like(q, torch.nan)
    starts, lengths = torch.arange(batch) * seq, torch.full((batch,), seq)
    prefilling.context_attention_fwd(q, k, v, out, starts, lengths, seq, sliding_window_q=window and window - 1)
    return out.reshape(batch, seq, heads, dim)


def attention_decode(q, k, v, lengths, *, window):
    """Call `triton_merge_attn_states.merge_attn_states` on torch's attention over two halves of the keys."""
    return here.in_two_parts(q, k, v, lengths, merge=_merged)


def _merged(first, first_lse, second, second_lse):
    out = torch.full_like(first, torch.nan)
    merging.merge_attn_states(out, first, first_lse.T.contiguous(), second, second_lse.T.contiguous())
    return out
