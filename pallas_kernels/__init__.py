"""Kernels of a Llama for Hopper GPUs: one Mosaic GPU kernel per file.

A kernel is a function of arrays. Its docstring is its contract: inputs, outputs, refused arguments, and its cost in
bytes. `reference/` defines the numbers. Every kernel sums in float32 and rounds once, when it writes the result. If a
kernel does not support its arguments, it raises `unsupported.Unsupported`.

A model uses five kernels: `gemv`, `norm_qkv`, `norm_gate_up`, `attention_decode` and `attention_prefill`.
`attention_paged` is attention over a paged cache, for many sequences at once. No model calls `rmsnorm` and `softmax`;
read these two first to learn how kernels are written.

`parts/` has the building blocks. Start with `rmsnorm.py`, then read `gemv.py` and its loop, `parts/row_product.py`,
where decoding spends most of its time. `parts/compat.py` has the target of a kernel: a GPU, or the interpreter that
runs it on a CPU and looks for races.
"""
