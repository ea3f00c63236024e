"""Kernels of a Llama for Hopper GPUs: one Mosaic GPU kernel a file.

A kernel is a function of arrays. Its docstring is its contract: inputs, outputs, what it refuses, and its cost in
bytes; `reference/` defines the numbers. Every kernel sums in float32 and rounds once, on the way out. A kernel that is
not made for its arguments raises `unsupported.Unsupported`.

A model runs by five of them: `gemv`, `norm_qkv`, `norm_gate_up`, `attention_decode` and `attention_prefill`.
`attention_paged` is attention over a cache in pages, for many sequences at once. `rmsnorm` and `softmax` are two ops by
themselves: no model calls them, and they are the ones to learn from.

`parts/` holds what kernels are made of. Start with `rmsnorm.py`, then `gemv.py` and the loop that decoding spends its
time in, `parts/row_product.py`. `parts/compat.py` holds the target that a kernel is made for: a GPU, or the interpreter
that runs it on a CPU and looks for races.
"""
