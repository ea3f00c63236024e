"""Kernels of a Llama for NVIDIA GPUs: one Mosaic GPU kernel per file.

A kernel is a function of arrays. Its docstring is its contract: inputs, outputs, refused arguments, and the bytes that
it reads and writes. `reference/` defines the exact results. Every kernel adds in float32, and rounds a result once,
when it writes it. If a kernel does not support its arguments, it raises `unsupported.Unsupported`.

A model uses five kernels: `gemv`, `norm_qkv`, `norm_gate_up`, `attention_decode` and `attention_prefill`.
`attention_paged` is attention over a paged cache, for many sequences at once. No model calls `rmsnorm` and `softmax`;
read these two first to learn how kernels are written.

`parts/` has the building blocks. Start with `rmsnorm.py`, then read `gemv.py` and its loop, `parts/row_product.py`.
Decoding spends most of its time in this loop. `parts/card.py` says what a GPU can do. `parts/compat.py` defines the
target of a kernel: a GPU, or the interpreter, which runs kernels on a CPU and looks for races.
"""
