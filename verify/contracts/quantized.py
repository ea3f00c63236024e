"""Quantized weights: rounding them, packing them, and multiplying by them, in every scheme.

A code must be exact, with one exception. A weight may be so close to the middle between two levels that the rounding of
a scale, or of a quotient, decides which level is nearer; then both codes are right. We compare a product with the
product of the dequantized weights.
"""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.linear import linear
from llamaspec.reference.quantizers import ggml
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.ops import (
    dequantize,
    gemm_quantized,
    gemv_quantized,
    ggml_decode,
    ggml_encode,
    pack,
    quantize,
    unpack,
)
from llamaspec.reference.quantizers.schemes import SCHEMES
from llamaspec.verify.bounds.precision import TINY, Precision, U, precision
from llamaspec.verify.bounds.running_error import exactly, gamma, projected
from llamaspec.verify.contract import (
    Arguments,
    Claim,
    Contract,
    Expected,
    Large,
    Law,
    Trial,
    as_float64,
    beyond,
    independent,
)
from llamaspec.verify.contracts.linear import systematic
from llamaspec.verify.draws.draw import Values, sizes, values

INTEGER = ["q8", "q8_row", "q4"]  # schemes with integer codes
NEAR = 8 * U  # relative change of a weight by the rounding of a scale or a quotient


def _weights(w: Values, rows: int, cols: int, precision: Precision) -> np.ndarray:
    """Make weights without -0, since not all formats have it."""
    return w.array("w", rows, cols, precision=precision) + np.zeros(1, precision.dtype)


def quantize_arguments(*, precision: Precision, rows: int, cols: int, w: Values, scheme: str) -> Arguments:
    return {"w": _weights(w, rows, cols, precision), "scheme": scheme}


def expect_quantize(w: np.ndarray, *, scheme: str) -> tuple[Expected, Expected]:
    kind = SCHEMES[scheme]
    exact = as_float64(w)
    q = kind.quantize(w)
    group = kind.group or w.shape[1]
    top = np.concatenate(
        [
            np.broadcast_to(np.max(np.abs(part), axis=1, keepdims=True), part.shape)
            for part in np.split(exact, range(group, w.shape[1], group), axis=1)
        ],
        axis=1,
    )
    largest = np.abs(exact) == top  # unchanged below, so that the scale is unchanged
    codes = q.codes.astype(np.int64)
    either = np.zeros(codes.shape)
    for nudge in (1 - NEAR, 1 + NEAR):
        nudged = kind.quantize(np.where(largest, exact, exact * nudge)).codes.astype(np.int64)
        either = np.maximum(either, np.abs(nudged - codes))
    scales = q.scales
    if scheme in INTEGER:
        either[_exact_ties(exact, np.repeat(as_float64(scales), group, axis=1)[:, : w.shape[1]])] = 0
    if scales.dtype.kind != "f":
        zeros = np.zeros(scales.shape)
        scale = Expected(scales, zeros, zeros, zeros, rounded=False)
    else:
        scale = Expected(as_float64(scales), 3 * U * scales, 3 * U * scales, as_float64(scales))
    return Expected(codes, either, either, np.zeros(codes.shape), rounded=False), scale


def _exact_ties(w: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Find the weights that lie halfway between two levels, if their scale is a power of two.

    Dividing by such a scale, or multiplying by its inverse, is exact. So only the rule for ties decides the code.
    """
    power_of_two = np.frexp(scales)[0] == 0.5
    doubled = 2 * w / np.where(power_of_two, scales, 1)
    return power_of_two & (doubled % 2 == 1)


def _negated(trial: Trial) -> Claim | None:
    if trial.arguments["scheme"] in ("nf4",):  # its levels are not symmetric
        return None
    codes, scales = trial.again(w=-trial.arguments["w"] + np.zeros(1, trial.arguments["w"].dtype))
    chosen = SCHEMES[trial.arguments["scheme"]]
    flipped, once = (
        chosen.dequantize(Quantized(a.astype(b.codes.dtype), s.astype(b.scales.dtype)))
        for a, s in ((codes, scales), trial.outputs)
        for b in [chosen.quantize(trial.arguments["w"])]
    )
    return Claim(flipped, -once, 0.0)


def stored_arguments(*, precision: Precision, rows: int, cols: int, w: Values, scheme: str) -> Arguments:
    q = SCHEMES[scheme].quantize(_weights(w, rows, cols, precision))
    return {"codes": q.codes, "scales": q.scales, "scheme": scheme}


def expect_dequantize(codes: np.ndarray, scales: np.ndarray, *, scheme: str) -> Expected:
    value = dequantize(codes, scales, scheme=scheme)
    hard = U * np.abs(value) + TINY
    return Expected(value, hard, hard, np.abs(value))


def gemv_arguments(*, precision: Precision, rows: int, cols: int, x: Values, w: Values, scheme: str) -> Arguments:
    stored = stored_arguments(precision=precision, rows=rows, cols=cols, w=w, scheme=scheme)
    return {"x": x.array("x", cols, precision=precision), **stored}


def gemm_arguments(
    *, precision: Precision, batch: int, rows: int, cols: int, x: Values, w: Values, scheme: str
) -> Arguments:
    stored = stored_arguments(precision=precision, rows=rows, cols=cols, w=w, scheme=scheme)
    return {"x": x.array("x", batch, cols, precision=precision), **stored}


def expect_product(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, *, scheme: str) -> Expected:
    weight, n = dequantize(codes, scales, scheme=scheme), x.shape[-1]
    size = linear(np.abs(as_float64(x)), np.abs(weight))
    y = projected(exactly(x), weight)
    tiny = 4 * TINY * (n + 1) * (1 + np.max(np.abs(weight), initial=0)) * (1 + np.max(np.abs(as_float64(x)), initial=0))
    # Multiplying each weight, or the sum of each group, by the scale rounds once more.
    hard, alarm = y.error + gamma(3) * size + tiny, (4 * np.sqrt(n) + 4) * U * size + tiny
    return Expected(y.value, hard, np.where(systematic(x, weight), hard, alarm), size)


def _column(trial: Trial) -> Claim:
    unit = np.zeros_like(trial.arguments["x"])
    unit[..., -1] = 1
    stored = {name: trial.arguments[name] for name in ("codes", "scales", "scheme")}
    column = np.broadcast_to(dequantize(**stored)[:, -1], trial.outputs[0].shape)
    return Claim(trial.again(x=unit)[0], column, _rounding(trial) * np.abs(column) + TINY)


def _rounding(trial: Trial) -> float:
    return U + precision(trial.outputs[0].dtype.name).unit


def pack_arguments(*, precision: Precision, rows: int, pairs: int, w: Values, scheme: str) -> Arguments:
    return {"codes": SCHEMES[scheme].quantize(_weights(w, rows, 2 * pairs, precision)).codes, "scheme": scheme}


def unpack_arguments(*, precision: Precision, rows: int, pairs: int, w: Values, scheme: str) -> Arguments:
    codes = pack_arguments(precision=precision, rows=rows, pairs=pairs, w=w, scheme=scheme)["codes"]
    return {"packed": pack(codes, scheme=scheme), "scheme": scheme}


def _exact(value: np.ndarray) -> Expected:
    zeros = np.zeros(value.shape)
    return Expected(value.astype(np.int64), zeros, zeros, zeros, rounded=False)


def encode_arguments(*, precision: Precision, rows: int, blocks: int, w: Values, name: str) -> Arguments:
    cols = blocks * ggml.TYPES[name].weights
    return {"w": _weights(w, rows, cols, precision).astype(np.float32), "name": name}


def decode_arguments(*, precision: Precision, rows: int, blocks: int, w: Values, name: str) -> Arguments:
    drawn = encode_arguments(precision=precision, rows=rows, blocks=blocks, w=w, name=name)
    return {"data": ggml_encode(drawn["w"], name=name), "name": name}


def expect_decode(data: np.ndarray, *, name: str) -> Expected:
    value = ggml_decode(data, name=name)
    kind = ggml.TYPES[name]
    q = kind.unpack(data.reshape(*data.shape[:-1], -1, kind.bytes))
    # Some types subtract a minimum, which is a product, too. A code of 0 means minus that minimum.
    minimum = np.abs(kind.dequantize(q._replace(codes=0 * q.codes)))
    size = np.abs(value) + 2 * minimum
    hard = 3 * U * size + 4 * TINY
    return Expected(value, hard, hard, size)


SCHEME = st.sampled_from(sorted(SCHEMES))
SHAPES = {"rows": st.sampled_from([1, 2, 3]), "cols": sizes(32, 64, 128, most=193)}
WEIGHTS = values(-8, 8, without=["denormal"])
PAIRS = {"rows": st.sampled_from([1, 2, 3]), "pairs": sizes(8, 32, most=65)}
BLOCKS = {"rows": st.sampled_from([1, 2]), "blocks": st.sampled_from([1, 2, 3])}
# We do not list types that search for their scales: they do not define the exact bytes.
ENCODED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0"]
LARGE = Large({"rows": beyond(16, 128, 8192), "cols": beyond(256, 1024, 8192)}, beside={"rows": [2], "cols": [40]})
MANY_PAIRS = Large(
    {"rows": beyond(16, 128, 8192), "pairs": beyond(256, 8192)},
    beside={"rows": [2], "pairs": [20], "scheme": ["q4", "nf4", "mxfp4", "q8"]},
)
MANY_BLOCKS = Large(
    {"rows": beyond(16, 128, 8192), "blocks": (5, 33, 261)},
    beside={"rows": [2], "blocks": [2]},
    closer={"rows": {"blocks": [1]}},
    ends={"blocks": "261 blocks are 8,352 columns, or 66,816 for types with longer blocks"},
)
STORED = "codes [rows cols] and scales [rows groups] as quantize returns them; the last group may be shorter"

QUANTIZE = Contract(
    definition=quantize,
    shapes={**SHAPES, "cols": sizes(32, 64, 128, 256, most=513)},
    values={"w": WEIGHTS | values(-8, 8, kinds=["halves", "last"]), "scheme": SCHEME},
    arguments=quantize_arguments,
    expect=expect_quantize,
    domain="w [rows cols], finite, no subnormal numbers and no -0; scheme is one of " + ", ".join(sorted(SCHEMES)),
    bound="hard and alarm: codes exact, except for weights within 8 u of the middle of two levels; scales 3 u; a "
    "weight exactly in the middle of two integer codes has the even code if its scale is a power of two",
    laws=[Law("quantizing and dequantizing -w gives the negative of the result for w", _negated)],
    large=LARGE,
)
DEQUANTIZE = Contract(
    definition=dequantize,
    shapes=SHAPES,
    values={"w": WEIGHTS, "scheme": SCHEME},
    arguments=stored_arguments,
    expect=expect_dequantize,
    domain=STORED,
    bound="hard and alarm: u |w|, one product",
    large=LARGE,
)
GEMV = Contract(
    definition=gemv_quantized,
    shapes=SHAPES,
    values={"x": values(-8, 8), "w": WEIGHTS, "scheme": SCHEME},
    arguments=gemv_arguments,
    expect=expect_product,
    domain="x [cols]; " + STORED + "; summed in float32",
    bound="hard: gamma_(n + 3) |W| |x| with the dequantized W; alarm: (4 sqrt(n) + 4) u |W| |x|",
    laws=[Law("the last unit vector gives the last column", _column)],
    large=LARGE,
)
GEMM = Contract(
    definition=gemm_quantized,
    shapes={"batch": st.sampled_from([1, 2, 3, 7, 8, 9]), **SHAPES},
    values=GEMV.values,
    arguments=gemm_arguments,
    expect=expect_product,
    domain="x [batch cols]; " + STORED + "; summed in float32",
    bound=GEMV.bound,
    laws=[independent("a vector", "x"), *GEMV.laws],
    large=Large({**LARGE.sizes, "batch": beyond(16, 64, 8192)}, beside={"batch": [2], **LARGE.beside}),
)
PACK = Contract(
    definition=pack,
    shapes=PAIRS,
    values={"w": WEIGHTS, "scheme": SCHEME},
    arguments=pack_arguments,
    expect=lambda codes, *, scheme: _exact(pack(codes, scheme=scheme)),
    domain="codes [rows cols] of a scheme, cols even",
    bound="exact",
    large=MANY_PAIRS,
)
UNPACK = Contract(
    definition=unpack,
    shapes=PAIRS,
    values={"w": WEIGHTS, "scheme": SCHEME},
    arguments=unpack_arguments,
    expect=lambda packed, *, scheme: _exact(unpack(packed, scheme=scheme)),
    domain="packed bytes as pack returns them",
    bound="exact",
    large=MANY_PAIRS,
)
GGML_ENCODE = Contract(
    definition=ggml_encode,
    shapes=BLOCKS,
    values={"w": values(-6, 1, without=["denormal"]), "name": st.sampled_from(ENCODED)},
    arguments=encode_arguments,
    expect=lambda w, *, name: _exact(ggml_encode(w, name=name)),
    domain="w [rows cols] of whole blocks, float32; name is one of " + ", ".join(ENCODED),
    bound="exact: the format defines every rounding",
    large=MANY_BLOCKS,
)
GGML_DECODE = Contract(
    definition=ggml_decode,
    shapes=BLOCKS,
    values={"w": values(-6, 1, without=["denormal"]), "name": st.sampled_from(list(ggml.TYPES))},
    arguments=decode_arguments,
    expect=expect_decode,
    domain="data [rows bytes] of whole blocks; name is one of " + ", ".join(ggml.TYPES),
    bound="hard and alarm: 3 u (|w| + 2 |minimum|), two products and a difference",
    large=MANY_BLOCKS,
)
