"""The product with quantized weights, for kernels that convert x to fixed point, one group of columns at a time.

The bound is the bound of `gemv_quantized` plus the error of fixed point. This error is relative to the largest number
of a group, so for a small number in a group of large numbers, it is larger than one rounding.
"""

import numpy as np
from hypothesis import strategies as st

from llamaspec.reference.linear import linear
from llamaspec.reference.quantizers.fixed_point import gemv_fixed_point
from llamaspec.reference.quantizers.schemes import SCHEMES
from llamaspec.verify.bounds.precision import U
from llamaspec.verify.bounds.running_error import exactly, fixed_point_product, gamma, in_fixed_point
from llamaspec.verify.contract import Claim, Contract, Expected, Large, Law, Trial, as_float64, beyond
from llamaspec.verify.contracts.quantized import INTEGER, STORED, WEIGHTS, dequantize, expect_product, gemv_arguments
from llamaspec.verify.draws.draw import sizes, values

GROUP = 128  # columns that share an exponent, if a whole row has one scale


def expect(x: np.ndarray, codes: np.ndarray, scales: np.ndarray, *, scheme: str) -> Expected:
    plain = expect_product(x, codes, scales, scheme=scheme)
    weight, n = np.abs(dequantize(codes, scales, scheme=scheme)), x.shape[-1]
    group = SCHEMES[scheme].group or GROUP
    off = linear(in_fixed_point(exactly(x), group=group).error, weight)
    product = fixed_point_product(
        exactly(x), as_float64(codes), as_float64(scales), group=group, roundings=-(-n // group) + 8
    )
    # The contract allows a sum of unscaled digits and a sum of scaled products, each in any order.
    hard = np.maximum(product.error, plain.hard + off * (1 + gamma(n + 3)))
    alarm = plain.alarm + off + 12 * U * plain.size
    return Expected(plain.value, hard, np.minimum(alarm, hard), plain.size)


def _powers_of_two(trial: Trial) -> Claim | None:
    """Multiply x by 4: the result must be 4 times as large, since only exponents change."""
    x = trial.arguments["x"]
    with np.errstate(over="ignore"):  # a number that overflows is not 4 times larger
        larger = (x * 4).astype(x.dtype)
    if not np.array_equal(as_float64(larger), 4 * as_float64(x)):
        return None
    return Claim(as_float64(trial.again(x=larger)[0]), 4 * as_float64(trial.outputs[0]), 5 * trial.bounds[0])


def _groups_apart(trial: Trial) -> Claim | None:
    """Set the codes of the first group to 0, then make x large there: the result must not change beyond its bound."""
    x, codes = trial.arguments["x"].copy(), trial.arguments["codes"].copy()
    group = SCHEMES[trial.arguments["scheme"]].group or GROUP
    if len(x) <= group or np.max(np.abs(as_float64(x))) > 16:
        return None
    codes[:, :group] = 0
    before = trial.again(codes=codes)[0]
    x[:group] = 1024
    return Claim(trial.again(x=x, codes=codes)[0], before, 2 * trial.bounds[0])


CONTRACT = Contract(
    definition=gemv_fixed_point,
    shapes={"rows": st.sampled_from([1, 2, 3]), "cols": sizes(32, 64, 128, 512, most=1025)},
    values={"x": values(-8, 8), "w": WEIGHTS, "scheme": st.sampled_from(INTEGER)},
    arguments=gemv_arguments,
    expect=expect,
    domain="x [cols], |x| below 2^127; " + STORED + "; schemes with integer codes: " + ", ".join(INTEGER),
    bound="hard: the larger bound of gemv_quantized and of exact sums of digits, plus 2^-21 |W| max |x| over each "
    "group of columns (with one scale, or 128 columns); alarm: (4 sqrt(n) + 16) u |W| |x|, plus the same term",
    laws=[
        Law("4 x gives 4 y", _powers_of_two),
        Law("a large group of x does not make other groups less accurate", _groups_apart),
    ],
    large=Large(
        {"cols": beyond(2048, 4096, 8192), "rows": beyond(64, 1024, 8192)}, beside={"rows": [3], "cols": [192]}
    ),
)
