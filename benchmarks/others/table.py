"""Contracts for each function: its op, and its documented domain where that is smaller than the contract's."""

from typing import Any

from verify.campaign import Job

SEEING = {"hidden": ["none", "every other", "all but the last"], "n": [2, 3, 7, 33, 128, 513]}  # no row of -inf alone
SEEN = {"mask": ["none", "window", "every other", "all but the last"], "queries": [1, 2, 3], "keys": [8, 9, 17, 33]}
BOTH = ("float32", "bfloat16")
ALONE = ("float32",)
HEADS = {"kv_heads": [1, 2], "group": [1, 2, 3], "head_dim": [16, 64]}


def _jax(op: str, function: str = "", **fields: Any) -> Job:
    return Job(op, f"benchmarks.others.jax_ops:{function or op}", arrays="jax", **fields)


def _ort(op: str, **only: Any) -> Job:
    return Job(op, f"benchmarks.others.onnxruntime_ops:{op}", arrays="numpy", dtypes=ALONE, only=only)


def _torch(op: str, *, dtypes: tuple[str, ...] = BOTH) -> Job:
    return Job(op, f"benchmarks.others.torch_ops:{op}", arrays="torch", dtypes=dtypes)


# The contracts accept everything here. docs/found.md has what they do not accept, and why.
JAX = [
    _jax("add", dtypes=BOTH),
    _jax("argmax", dtypes=BOTH),
    _jax("attention", dtypes=BOTH, only=SEEN),
    _jax("attention_decode", dtypes=BOTH, only={"padding": [0.0, 100.0], "lengths": [(1,), (7, 8), (33, 1, 16)]}),
    _jax("embedding", dtypes=BOTH),
    _jax("gemm", dtypes=BOTH),
    _jax("gemv", dtypes=BOTH),
    _jax("linear", dtypes=BOTH),
    _jax("softmax", dtypes=ALONE, only=SEEING),
    _jax("softmax", "softmax_of_what_is_seen", dtypes=ALONE),
    _jax("swiglu", dtypes=BOTH),
]
TRITON = [
    _jax("softmax", "triton_softmax", dtypes=ALONE, only=SEEING),
    _jax("rmsnorm", "triton_rmsnorm", dtypes=ALONE, only={"eps": [1e-5]}),
    _jax(
        "attention_decode",
        "triton_attention_decode",
        dtypes=ALONE,
        only={**HEADS, "padding": [0.0], "lengths": [(1,), (7, 8), (33, 16)], "shift": [0.0]},
    ),
    _jax(
        "attention_prefill",
        "triton_attention_prefill",
        dtypes=ALONE,
        only={**HEADS, "group": [1], "offsets": [(0,), (0, 0)], "queries": [16], "spare": [0], "window": [None]},
    ),
    _jax(
        "attention_paged",
        "triton_attention_paged",
        dtypes=ALONE,
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
TORCH = [_torch("attention"), _torch("linear"), _torch("rmsnorm"), _torch("swiglu", dtypes=ALONE)]
GGUF = [
    Job(op, f"benchmarks.others.gguf_ops:{op}", arrays="numpy", dtypes=ALONE) for op in ("ggml_decode", "ggml_encode")
]
