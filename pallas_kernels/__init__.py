"""How a Llama runs on a Hopper GPU: one Mosaic GPU kernel a file.

A kernel is a function of arrays. Its docstring is its contract (what goes in, what comes out, what is refused, what
it costs in bytes); `reference/` says what the numbers are. All of them sum in float32 and round once, on the way out.

`compat.py` holds what reaches into jax, and the target that a kernel is made for: a GPU, or the interpreter that runs
it on a CPU and looks for races. Start with `gemv.py` and the loop that decoding spends its time in, `row_product.py`.
"""
