"""Quantizers that use the inputs of a matrix: AWQ, GPTQ and SmoothQuant, with the code grids of `model.quantize`."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from llamaspec.learn.quantizers.guarantees import U64, Matrix, WeightDetails, of_weights
from llamaspec.learn.quantizers.schemes import COLS, GROUP, SCHEMES, StoredMatrix
from llamaspec.model.quantize.methods import ALPHA
from llamaspec.reference.quantizers import affine, awq, gptq, smoothquant

Inputs = Float64[np.ndarray, "tokens cols"]


class CalibratedQuantizer(NamedTuple):
    """A quantizer: the file that defines it, its bits per weight, its guarantee in short, and its function."""

    page: str
    bits: float
    guarantee: str
    store: Callable[[Matrix, Inputs], StoredMatrix]


def _scaled(w: Matrix, s: np.ndarray, name: str) -> StoredMatrix:
    """Multiply each column of w by its factor in s [cols], quantize by the scheme `name`, and divide by s again.

    The product and the quotient are rounded to float64.
    """
    restored, (codes, scales, within) = SCHEMES[name].store(w * s)
    assert scales is not None and within is not None
    return StoredMatrix(restored / s, WeightDetails(codes, scales / s, within / s + 4 * U64 * np.abs(w)))


def _awq(w: Matrix, x: Inputs) -> StoredMatrix:
    return _scaled(w, awq.search(w, x, rounded=SCHEMES["q4"].rounded), "q4")


def _smoothquant(w: Matrix, x: Inputs) -> StoredMatrix:
    return _scaled(w, smoothquant.factors(np.max(np.abs(x), axis=0), w, alpha=ALPHA), "q8_row")


def _gptq(w: Matrix, x: Inputs) -> StoredMatrix:
    cols = w.shape[1]
    w, x = (np.pad(a, [(0, 0), (0, -cols % GROUP)]) for a in (w, x))
    q = gptq.quantize(w, x, bits=4, group=GROUP, even=True)
    codes, scales = q.codes.astype(int) - of_weights(q.zeros, w).astype(int), of_weights(q.scales, w)
    return StoredMatrix(affine.dequantize(q)[:, :cols], WeightDetails(codes[:, :cols], scales[:, :cols], None))


METHODS = {
    "awq": CalibratedQuantizer(
        *("awq.py", 4.5),
        "q4's half step, over the factor of the column; on the calibration no worse than plain rounding",
        _awq,
    ),
    "gptq": CalibratedQuantizer("gptq.py", 4.5, "a bound of the squared error of outputs, none of a weight", _gptq),
    "smoothquant": CalibratedQuantizer(
        *("smoothquant.py", 8 + 32 / COLS),
        "q8_row's half step, over the factor of the column; judged with float activations",
        _smoothquant,
    ),
}
