"""Functions of other libraries that violate a contract: LIBRARY:FUNCTION, the dtypes, and the reason.

If a reason begins with "bug", docs/found.md reproduces the bug with a few lines of torch. In all other cases, the
function does what its code says. docs/found/ has a replay file for each violation, named after the function.
"""

HALF = ("bfloat16", "float16")
EVERY = ("float32", *HALF)

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "fla:logsumexp": (EVERY, "bug: NaN where one whole block of 65,536 scores is -inf"),
    "fla:rope_halves": (HALF, "only takes cosines and sines of the inputs' dtype, so they are rounded"),
    "fla:rope_halves_backward": (HALF, "only takes cosines and sines of the inputs' dtype, so they are rounded"),
    "fla:rope_interleaved": (HALF, "only takes cosines and sines of the inputs' dtype, so they are rounded"),
    "fla:softmax_backward": (HALF, "products p dp and their sum in the inputs' dtype, for a float32 result"),
    "flag_gems:attention_of_booleans": (EVERY, "bug: the mask is turned around"),
    "flag_gems:cross_entropy": (EVERY, "bug: the running maximum starts at 0"),
    "flag_gems:cross_entropy_backward": (("float32",), "bug: the running maximum starts at 0"),
    "flag_gems:embedding_backward": (
        ("float16",),
        "gradients of a token are added in float16 (in bfloat16 by float32)",
    ),
    "liger_kernel:cross_entropy": (HALF, "each token's loss is rounded to the logits' dtype"),
    "liger_kernel:cross_entropy_backward": (HALF, "gradients are rounded before they are multiplied by the losses'"),
    "liger_kernel:rmsnorm_llama": (HALF, "x is rounded before it is multiplied by the weight, as in transformers"),
    "liger_kernel:softmax_backward": (HALF, "products p dp and their sum in the inputs' dtype"),
    "liger_kernel:swiglu": (HALF, "silu is rounded before the product"),
    "sglang:attention_paged": (
        HALF,
        "each product of q and k is rounded, if every query head has its own key head",
    ),
    "sglang:quantize": (("float32",), "a row of zeros has a scale of 1e-10 / 127"),
    "torch:attention_backward": (HALF, "each query head's gradients are rounded before a group's are added"),
    "torch:cross_entropy": (HALF, "each token's loss is rounded to the logits' dtype"),
    "torch:cross_entropy_backward": (HALF, "log-probabilities are rounded before they are exponentiated"),
    "torch:embedding_backward": (HALF, "gradients of a token are added in the inputs' dtype, one after the other"),
    "torch:logsumexp": (HALF, "maximum and logarithm are rounded before they are added"),
    "torch:route": (HALF, "logits are rounded before the softmax"),
    "torch:swiglu": (HALF, "two kernels: silu is rounded before the product"),
    "torch:swiglu_backward": (HALF, "two kernels: silu is rounded before the product"),
    "transformers:attention": (HALF, "scores are rounded before the softmax"),
    "transformers:attention_backward": (HALF, "scores are rounded before the softmax"),
    "transformers:moe": (HALF, "each step of an expert is rounded"),
    "transformers:qk_norm": (HALF, "x is rounded before it is multiplied by the weight"),
    "transformers:rmsnorm": (HALF, "x is rounded before it is multiplied by the weight"),
    "transformers:rmsnorm_backward": (HALF, "gradients are rounded at each step"),
    "transformers:rope_halves": (HALF, "cosines, sines and products are rounded"),
    "transformers:rope_halves_backward": (HALF, "cosines, sines and products are rounded"),
    "transformers:rope_interleaved": (HALF, "cosines and sines are rounded"),
    "transformers:route": (HALF, "logits are rounded before the softmax"),
    "unsloth:rmsnorm": (HALF, "x is rounded before it is multiplied by the weight"),
    "unsloth:swiglu": (HALF, "silu is rounded before the product"),
    "unsloth:swiglu_backward": (HALF, "silu is rounded before the products"),
    "vllm:attention_paged": (
        HALF,
        "products of q and k and their sum are rounded, if every query head has its own key head",
    ),
    "vllm:quantize": (("float32",), "a row of zeros has a scale of 1e-10 / 127"),
}
