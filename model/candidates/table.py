"""Which functions of this package are called as the reference is, and what each is made for."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Candidate(NamedTuple):
    """A function for `op`, by the name that `llamaspec verify --candidate` takes."""

    op: str
    function: str
    only: Mapping[str, Sequence[Any]] = {}  # what draws of the op's contract are narrowed to
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    kernel: bool = False  # takes seconds a call, and more for each new shape, where it is interpreted


def _plain(op: str, *, name: str = "", **made_for: Any) -> Candidate:
    return Candidate(op, f"model.candidates.plain:{name or op}", **made_for)


def _kernel(op: str, **made_for: Any) -> Candidate:
    return Candidate(op, f"model.candidates.kernels:{op}", kernel=True, **made_for)


# A cache of ours holds leftovers beyond its length, which are finite, and where XLA reads it at least one position.
_CACHE = {"padding": [0.0, 100.0]}
_LENGTHS = {"lengths": [(1,), (7, 8), (33, 1, 16), (17,)]}
_HEADS = {"head_dim": [64, 128]}
# Kinds whose numbers are about as large as each other.
_EVEN = [
    f"{kind}({seed}) * 2**{exponent}"
    for kind in ("integers", "normal", "positive", "equal", "last", "halves", "zeros")
    for seed in range(4)
    for exponent in (-8, 0, 8)
]

CANDIDATES = [
    _plain("argmax"),
    _plain("attention_decode", only={**_CACHE, **_LENGTHS}),
    _plain("attention_prefill", only=_CACHE),
    _plain("distribution", only={"temperature": [1.0, 0.7, 1.5, 0.125], "repetition_penalty": [1.0]}),
    _plain("draw", dtypes=("float32",)),
    _plain("gemm"),
    _plain("gemv"),
    _plain("gemv", name="cpu_gemv", only={"cols": [16, 128, 512, 513]}),
    _plain("rmsnorm"),
    _plain("rope_halves"),
    _kernel("add"),
    _kernel("argmax"),
    _kernel("attention_decode", only=_HEADS),
    _kernel("attention_paged", only={**_HEADS, "page": [8, 16]}),
    _kernel("attention_prefill", only=_HEADS, dtypes=("bfloat16",)),
    _kernel("gemm", only={"rows": [64, 128], "cols": [64, 192]}, dtypes=("bfloat16",)),
    _kernel("gemv", only={"rows": [8, 16, 32], "cols": [256, 512, 768]}),
    # Not where some numbers are a thousand times as large as others: the kernel takes a group of them in fixed point,
    # each off by 2^-21 of the largest, which is more than the contract has for a small one. tests/kernels hold it to
    # its own.
    _kernel(
        "gemv_quantized",
        only={"rows": [8, 16], "cols": [1024, 1280], "scheme": ["q8", "q8_row", "q4"], "x": _EVEN},
    ),
    _kernel("rmsnorm"),
    _kernel("rope_halves", only={"pairs": [32, 64]}),
    _kernel("softmax"),
    _kernel("swiglu"),
]
