"""Jobs for functions of other libraries: each has an op, and a narrower domain if the library documents one."""

from dataclasses import replace
from typing import Any

from llamaspec.benchmarks.audits.others.refused import REFUSED
from llamaspec.benchmarks.audits.others.rows import library_of
from llamaspec.verify.campaign import CandidateJob
from llamaspec.verify.catalogue import contract_for

SEEING = {
    "hidden": ["none", "every other", "all but the last"],
    "n": [2, 3, 7, 33, 128, 513],
}  # no row with nothing but -inf
SEEN: dict[str, Any] = {
    "mask": ["none", "window", "every other", "all but the last"],
    "queries": [1, 2, 3],
    "keys": [8, 9, 17, 33],
}
F32_BF16 = ("float32", "bfloat16")
F32_BF16_F16 = ("float32", "bfloat16", "float16")
F32 = ("float32",)
FEW = {"rows": [1, 2, 3, 17], "tokens": [1, 2, 3, 17], "batch": [1, 2], "seq": [1, 2, 9, 17], "heads": [1, 3, 7]}
ONE_SEQUENCE: dict[str, Any] = {"batch": [1]}  # one sequence, for kernels that take one table of angles
VISIBLE: dict[str, Any] = {"hidden": ["none"]}  # no row with nothing but -inf
HEADS = {"kv_heads": [1, 2], "group": [1, 2, 3], "head_dim": [16, 64]}


def _jax(op: str, function: str = "", **fields: Any) -> CandidateJob:
    return CandidateJob(op, f"llamaspec.benchmarks.audits.others.jax_ops:{function or op}", arrays="jax", **fields)


def _ort(op: str, **only: Any) -> CandidateJob:
    return CandidateJob(
        op, f"llamaspec.benchmarks.audits.others.onnxruntime_ops:{op}", arrays="numpy", dtypes=F32, only=only
    )


def _torch(
    op: str, function: str = "", *, library: str = "torch", dtypes: tuple[str, ...] = F32_BF16_F16, **only: Any
) -> CandidateJob:
    return CandidateJob(
        op,
        f"llamaspec.benchmarks.audits.others.{library}_ops:{function or op}",
        arrays="torch",
        dtypes=dtypes,
        only=only,
    )


def _interpreted(
    library: str, op: str, function: str = "", *, dtypes: tuple[str, ...] = F32_BF16_F16, **only: Any
) -> CandidateJob:
    """Make the job of a Triton kernel, with few rows, because the interpreter takes a millisecond for each program."""
    few = {name: values for name, values in FEW.items() if name in contract_for(op).draws}
    return _torch(op, function, library=library, dtypes=dtypes, **{**few, **only})


# The contracts accept all these functions. docs/found.md lists the functions that they do not accept, and why.
JAX = [
    _jax("add", dtypes=F32_BF16),
    _jax("argmax", dtypes=F32_BF16),
    _jax("attention", dtypes=F32_BF16, only=SEEN),
    _jax("attention_decode", dtypes=F32_BF16, only={"padding": [0.0, 100.0], "lengths": [(1,), (7, 8), (33, 1, 16)]}),
    _jax("attention_weights", dtypes=F32_BF16, only=SEEN),
    _jax("embedding", dtypes=F32_BF16),
    _jax("gemm", dtypes=F32_BF16),
    _jax("gemv", dtypes=F32_BF16),
    _jax("linear", dtypes=F32_BF16),
    _jax("shared_expert", dtypes=F32_BF16),
    _jax("softmax", dtypes=F32, only=SEEING),
    _jax("softmax", "softmax_of_what_is_seen", dtypes=F32),
    _jax("swiglu", dtypes=F32_BF16),
]
TRITON = [
    _jax("softmax", "triton_softmax", dtypes=F32, only={**SEEING, "rows": [1, 2, 3, 5]}),
    _jax("rmsnorm", "triton_rmsnorm", dtypes=F32, only={"eps": [1e-5], "rows": [1, 2, 3, 5]}),
    _jax(
        "attention_decode",
        "triton_attention_decode",
        dtypes=F32,
        only={**HEADS, "padding": [0.0], "lengths": [(1,), (7, 8), (33, 16)], "shift": [0.0]},
    ),
    _jax(
        "attention_prefill",
        "triton_attention_prefill",
        dtypes=F32,
        only={**HEADS, "group": [1], "offsets": [(0,), (0, 0)], "queries": [16], "spare": [0], "window": [None]},
    ),
    _jax(
        "attention_paged",
        "triton_attention_paged",
        dtypes=F32,
        only={**HEADS, "page": [16], "padding": [0.0], "lengths": [(1,), (7, 8), (33, 16)], "shift": [0.0]},
    ),
]
ONNXRUNTIME = [
    _ort("add"),
    _ort("argmax"),
    _ort(
        "attention_decode",
        head_dim=[8, 16, 64],
        padding=[0.0, 100.0],
        lengths=[(1,), (7,), (16, 33), (1, 8), (33, 2, 17)],
    ),
    _ort("attention_prefill", head_dim=[8, 16, 64], offsets=[(0,), (0, 0), (7,), (16,)], padding=[0.0]),
    _ort("embedding"),
    _ort("gemm"),
    _ort("gemv"),
    _ort("gemv_quantized", scheme=["q4", "q8"]),
    _ort("rmsnorm"),
    _ort("rope_halves"),
    _ort("rope_interleaved"),
    _ort("softmax", hidden=["none", "every other", "all but the last"], n=SEEING["n"]),
]
TORCH = [
    _torch("add"),
    _torch("argmax"),
    _torch("attention"),
    _torch("attention_backward"),
    _torch("cross_entropy"),
    _torch("cross_entropy_backward"),
    _torch("embedding"),
    _torch("embedding_backward"),
    _torch("gemm"),
    _torch("gemv"),
    _torch("linear"),
    _torch("linear_backward"),
    _torch("logsumexp"),
    _torch("rmsnorm"),
    _torch("rmsnorm_backward"),
    _torch("route"),
    _torch("softmax", **VISIBLE),
    _torch("softmax_backward"),
    _torch("swiglu"),
    _torch("swiglu_backward"),
]
LIGER = [
    _interpreted("liger_kernel", "cross_entropy"),
    _interpreted("liger_kernel", "cross_entropy_backward"),
    _interpreted("liger_kernel", "rmsnorm"),
    _interpreted("liger_kernel", "rmsnorm", "rmsnorm_llama"),
    _interpreted("liger_kernel", "rmsnorm_backward"),
    _interpreted("liger_kernel", "rope_halves"),
    _interpreted("liger_kernel", "rope_halves_backward"),
    _interpreted("liger_kernel", "rope_interleaved", **ONE_SEQUENCE),
    _interpreted("liger_kernel", "softmax", **VISIBLE),
    _interpreted("liger_kernel", "softmax_backward"),
    _interpreted("liger_kernel", "swiglu"),
    _interpreted("liger_kernel", "swiglu_backward"),
]
FLA = [
    _interpreted(
        "fla", "attention_prefill", head_dim=[16, 64], offsets=[(0,), (0, 0)], queries=[16], spare=[0], window=[None, 3]
    ),
    _interpreted("fla", "attention_backward", mask=["causal"], queries=[9], keys=[9], head_dim=[16, 64]),
    _interpreted("fla", "cross_entropy"),
    _interpreted("fla", "cross_entropy_backward"),
    _interpreted("fla", "logsumexp"),
    _interpreted("fla", "rmsnorm"),
    _interpreted("fla", "rmsnorm_backward"),
    _interpreted("fla", "rope_halves", **ONE_SEQUENCE),
    _interpreted("fla", "rope_halves_backward", **ONE_SEQUENCE),
    _interpreted("fla", "rope_interleaved", **ONE_SEQUENCE),
    _interpreted("fla", "softmax", **VISIBLE),
    _interpreted("fla", "softmax_backward"),
    _interpreted("fla", "swiglu"),
    _interpreted("fla", "swiglu_backward"),
]
FLASH_ATTN = [
    _interpreted("flash_attn", "cross_entropy"),
    _interpreted("flash_attn", "cross_entropy_backward"),
    _interpreted("flash_attn", "rmsnorm"),
    _interpreted("flash_attn", "rmsnorm_backward"),
    _interpreted("flash_attn", "rope_halves", **ONE_SEQUENCE),
    _interpreted("flash_attn", "rope_halves_backward", **ONE_SEQUENCE),
    _interpreted("flash_attn", "rope_interleaved", **ONE_SEQUENCE),
]
UNSLOTH = [
    _interpreted("unsloth", "cross_entropy"),
    _interpreted("unsloth", "cross_entropy_backward"),
    _interpreted("unsloth", "rmsnorm"),
    _interpreted("unsloth", "rope_halves", **ONE_SEQUENCE),
    _interpreted("unsloth", "rope_halves_backward", **ONE_SEQUENCE),
    _interpreted("unsloth", "swiglu"),
    _interpreted("unsloth", "swiglu_backward"),
]
FLAG_GEMS = [
    _interpreted("flag_gems", "attention", mask=["none", "every other"], head_dim=[128]),
    _interpreted("flag_gems", "attention", "attention_of_booleans", mask=["none", "every other"], head_dim=[128]),
    _interpreted("flag_gems", "cross_entropy"),
    _interpreted("flag_gems", "cross_entropy_backward", dtypes=F32),
    _interpreted("flag_gems", "embedding", count=[1, 2, 17], vocab=[1, 3, 17]),
    _interpreted("flag_gems", "embedding_backward", count=[1, 2, 17], vocab=[1, 3, 17]),
    _interpreted("flag_gems", "gemm"),
    _interpreted("flag_gems", "gemv"),
    _interpreted("flag_gems", "linear"),
    _interpreted("flag_gems", "rmsnorm"),
    _interpreted("flag_gems", "rmsnorm_backward"),
    _interpreted("flag_gems", "rope_halves"),
    _interpreted("flag_gems", "rope_interleaved"),
    _interpreted("flag_gems", "softmax", **VISIBLE),
    _interpreted("flag_gems", "softmax_backward"),
]
CACHE: dict[str, Any] = {
    "padding": [0.0],
    "lengths": [(1,), (7, 8), (33, 1, 16)],
    "shift": [0.0, -16.0],
    "kv_heads": [1, 2],
    "group": [1, 3],
}
VLLM = [
    _interpreted("vllm", "add"),
    _interpreted("vllm", "attention_decode", window=[None], **CACHE),
    _interpreted("vllm", "attention_paged", **CACHE),
    _interpreted("vllm", "attention_paged", "attention_paged_unified", **{**CACHE, **HEADS, "page": [16]}),
    _interpreted(
        "vllm", "attention_prefill", **{**HEADS, "offsets": [(0,), (0, 0)], "padding": [0.0], "window": [None, 3, 8]}
    ),
    _interpreted("vllm", "cross_entropy"),
    _torch(
        "distribution",
        library="vllm",
        dtypes=F32,
        temperature=[1.0],
        top_k=[0],
        top_p=[1.0],
        repetition_penalty=[1.0],
    ),
    _interpreted("vllm", "gemm"),
    _interpreted("vllm", "linear"),
    _interpreted("vllm", "quantize", dtypes=F32, scheme=["q8_row"]),
    _interpreted("vllm", "rmsnorm"),
    _interpreted("vllm", "rmsnorm", "rmsnorm_after_sum"),
    _interpreted("vllm", "rmsnorm", "rmsnorm_beam"),
    _interpreted("vllm", "rmsnorm", "rmsnorm_inkling"),
    _interpreted("vllm", "rope_halves"),
    _interpreted("vllm", "rope_interleaved"),
    _interpreted("vllm", "softmax", **VISIBLE),
    _interpreted("vllm", "swiglu"),
]
SGLANG = [
    _interpreted("sglang", "argmax", dtypes=F32),
    _interpreted("sglang", "attention_decode", window=[None], **CACHE),
    _interpreted("sglang", "attention_paged", **CACHE),
    _interpreted(
        "sglang", "attention_prefill", **{**HEADS, "offsets": [(0,), (0, 0)], "padding": [0.0], "window": [None]}
    ),
    _interpreted("sglang", "capped"),
    _interpreted("sglang", "embedding", count=[1, 2, 17], vocab=[1, 3, 17]),
    _interpreted("sglang", "layernorm"),
    _interpreted("sglang", "quantize", dtypes=F32, scheme=["q8_row"]),
    _interpreted("sglang", "rmsnorm"),
    _interpreted("sglang", "rmsnorm", "rmsnorm_infer"),
    _interpreted("sglang", "rmsnorm", "rmsnorm_onepass"),
    _interpreted("sglang", "rmsnorm", "rmsnorm_twice"),
    _interpreted("sglang", "rope_interleaved", **ONE_SEQUENCE),
    _interpreted("sglang", "route", experts=[1, 2, 4, 8], shares=["of all"]),
    _interpreted(
        "sglang",
        "route",
        "route_by_tiles",
        tokens=[1, 17, 33],
        dim=[256],
        experts=[16, 32],
        chosen=[1, 2],
        shares=["of all"],
    ),
]
GGUF = [
    CandidateJob(op, f"llamaspec.benchmarks.audits.others.gguf_ops:{op}", arrays="numpy", dtypes=F32)
    for op in ("ggml_decode", "ggml_encode")
]
TRANSFORMERS = [
    _torch("attention", library="transformers", **SEEN),
    _torch("attention_backward", library="transformers", **SEEN),
    _torch("moe", library="transformers", shares=["renormalized"]),
    _torch("qk_norm", library="transformers"),
    _torch("rmsnorm", library="transformers"),
    _torch("rmsnorm_backward", library="transformers"),
    _torch("rope_halves", library="transformers"),
    _torch("rope_halves_backward", library="transformers"),
    _torch("rope_interleaved", library="transformers"),
    _torch("route", library="transformers", shares=["renormalized"]),
]
BITSANDBYTES = [
    _torch("quantize", library="bitsandbytes", dtypes=F32, scheme=["nf4", "q8_row"], cols=[64, 128]),
    _torch("dequantize", library="bitsandbytes", dtypes=F32, scheme=["nf4"], cols=[64, 128]),
]
TORCHAO = [
    _torch("quantize", library="torchao", dtypes=F32, scheme=["mxfp4"], cols=[32, 64, 128]),
    _torch("quantize", library="torchao", dtypes=F32, scheme=["q8", "q8_row"], cols=[64, 128]),
]
QUANTO = [
    _torch(op, library="quanto", dtypes=F32, scheme=["q8_row"]) for op in ("quantize", "dequantize", "gemv_quantized")
]
SCIPY = [
    CandidateJob(
        "softmax", "llamaspec.benchmarks.audits.others.scipy_ops:softmax", arrays="numpy", dtypes=F32, only=VISIBLE
    ),
    CandidateJob("logsumexp", "llamaspec.benchmarks.audits.others.scipy_ops:logsumexp", arrays="numpy", dtypes=F32),
]
FOREIGN_JOBS = [
    *TORCH,
    *TRANSFORMERS,
    *SCIPY,
    *LIGER,
    *FLA,
    *FLASH_ATTN,
    *UNSLOTH,
    *FLAG_GEMS,
    *VLLM,
    *SGLANG,
    *BITSANDBYTES,
    *TORCHAO,
    *QUANTO,
]


def _accepted(job: CandidateJob) -> CandidateJob:
    refused, _ = REFUSED.get(":".join(library_of(job.candidate)), ((), ""))
    return replace(job, dtypes=tuple(dtype for dtype in job.dtypes if dtype not in refused))


ACCEPTED = [job for job in map(_accepted, FOREIGN_JOBS) if job.dtypes]
