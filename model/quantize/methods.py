"""AWQ, GPTQ and SmoothQuant for one matrix, computed from sums over the matrix's inputs.

`reference.quantizers.awq`, `gptq` and `smoothquant` define the methods for inputs X [tokens, cols] in memory. This
module keeps only sums over X. If Q replaces a matrix W, the squared error of the outputs is

    || (Q - W) X^T ||^2  =  tr (Q - W) G (Q - W)^T        G = X^T X

So AWQ's search needs only G and the means of |X|, and GPTQ needs only G.

AWQ and GPTQ round to the grid of the scheme q4, which is symmetric around zero. All readers and kernels support q4, but
some do not support zero points.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64

from llamaspec.model.checkpoints.checkpoint import Form
from llamaspec.reference.quantizers import affine, awq, gptq, smoothquant, symmetric
from llamaspec.reference.quantizers.blocks import Quantized
from llamaspec.reference.quantizers.schemes import SCHEMES

Q4 = SCHEMES["q4"]
GROUP = 64  # columns that share a scale of q4
COLUMNS = 128  # number of columns that GPTQ rounds before it corrects all later columns
ALPHA = 0.5  # SmoothQuant's alpha; with 0.5, inputs and weights share the range equally


class Inputs(NamedTuple):
    """Statistics of the inputs X [tokens, cols] of a matrix, over all tokens."""

    gram: Float64[np.ndarray, "cols cols"] | None  # X^T X, for methods that need it
    means: Float64[np.ndarray, " cols"]  # means of |X|
    squares: Float64[np.ndarray, " cols"]  # means of X^2
    tops: Float64[np.ndarray, " cols"]  # the largest |X|


class Method(NamedTuple):
    """A method to quantize matrices that have the same inputs."""

    form: Form
    bits: int
    group: int | None  # number of columns that share a scale; None: all columns
    gram: bool  # whether the method needs `Inputs.gram`
    # The factors that multiply the columns of the stacked matrices before rounding, and divide the inputs; None: ones.
    factors: Callable[[np.ndarray, Inputs], np.ndarray] | None
    quantize: Callable[[np.ndarray, Inputs], Quantized]
    into_matrices: bool = False  # whether an earlier matrix may absorb the division of the inputs; if not, only norms


@partial(jax.jit, static_argnames="gram")
def _sums(x: Float[Array, "*batch cols"], *, gram: bool) -> tuple[Array | None, Array, Array, Array]:
    rows = x.reshape(-1, x.shape[-1])
    magnitudes = jnp.abs(rows)
    product = jnp.matmul(rows.T, rows, precision=jax.lax.Precision.HIGHEST) if gram else None
    return product, jnp.sum(magnitudes, axis=0), jnp.sum(rows * rows, axis=0), jnp.max(magnitudes, axis=0)


def observe(parts: Iterable[Float[Array, "*batch cols"]], *, gram: bool) -> Inputs:
    """Compute `Inputs` from X. Each of `parts` has some rows of X.

    Sums over the rows of a part are in float32, and sums over parts are in float64. Without `gram`, we do not compute
    X^T X.
    """
    total, tokens = None, 0
    for x in parts:
        seen = _sums(x, gram=gram)
        magnitudes, squares, tops = (np.asarray(a, np.float64) for a in seen[1:])
        product = None if seen[0] is None else np.asarray(seen[0], np.float64)
        tokens += x.size // x.shape[-1]
        if total is None:
            total = Inputs(product, magnitudes, squares, tops)
        else:
            products = None if product is None or total.gram is None else total.gram + product
            means, squares = total.means + magnitudes, total.squares + squares
            total = Inputs(products, means, squares, np.maximum(total.tops, tops))
    assert total
    return total._replace(means=total.means / tokens, squares=total.squares / tokens)


def errors(
    w: Float64[np.ndarray, "rows cols"], q: Float64[np.ndarray, "rows cols"], gram: Float64[np.ndarray, "cols cols"]
) -> Float64[np.ndarray, " rows"]:
    """Compute || (q - w) X^T ||^2 for each row of `w` and `q`, from `gram`, which is X^T X.

    >>> errors(np.array([[1.0, 1.0]]), np.array([[1.5, 0.0]]), np.array([[4.0, 1.0], [1.0, 1.0]]))
    array([1.])
    """
    moved = q - w
    return np.sum(moved @ gram * moved, axis=1)


def awq_factors(w: Float64[np.ndarray, "rows cols"], inputs: Inputs) -> Float64[np.ndarray, " cols"]:
    """Search for AWQ's factors as `reference.quantizers.awq.search` does, but from sums over the inputs."""
    assert inputs.gram is not None
    least, best = np.inf, np.ones(w.shape[1])
    for alpha in awq.ALPHAS:
        s = awq.scales(inputs.means, alpha=alpha)
        loss = np.sum(errors(w, Q4.dequantize(Q4.quantize(w * s)) / s, inputs.gram))
        if loss < least:
            least, best = loss, s
    return best


def gptq_codes(w: Float64[np.ndarray, "rows cols"], inputs: Inputs) -> Quantized:
    """Quantize as `reference.quantizers.gptq.quantize` does, but correct later columns once per block of columns.

    For some rows, GPTQ has a larger error than rounding to nearest. Such a row gets the nearest codes.
    """
    assert inputs.gram is not None
    nearest, largest = Q4.quantize(w), symmetric.largest_code(Q4.code_bits)
    scales = np.repeat(nearest.scales.astype(np.float64), GROUP, axis=1)
    live = np.where(np.diag(inputs.gram) == 0, 0, w)
    u = gptq.factor(inputs.gram, damp=gptq.DAMP)
    levels = np.empty_like(w)
    for start in range(0, w.shape[1], COLUMNS):
        block = slice(start, start + COLUMNS)
        missed = np.empty_like(live[:, block])
        for column in range(missed.shape[1]):
            i = start + column
            levels[:, i] = affine.encode(live[:, i], scales[:, i], np.zeros(1), lowest=-largest, highest=largest)
            missed[:, column] = (live[:, i] - scales[:, i] * levels[:, i]) / u[i, i]
            live[:, i : block.stop] -= missed[:, [column]] * u[i, i : block.stop]
        live[:, block.stop :] -= missed @ u[block, block.stop :]
    searched = nearest._replace(codes=levels.astype(np.int8))
    searched_errors, nearest_errors = (errors(w, Q4.dequantize(q), inputs.gram) for q in (searched, nearest))
    return nearest._replace(codes=np.where((searched_errors <= nearest_errors)[:, None], searched.codes, nearest.codes))


METHODS = {
    "awq": Method("int4", 4, GROUP, True, awq_factors, lambda w, inputs: Q4.quantize(w), into_matrices=True),
    "gptq": Method("int4", 4, GROUP, True, None, gptq_codes),
    "smoothquant": Method(
        form="int8",
        bits=8,
        group=None,
        gram=False,
        factors=lambda w, inputs: smoothquant.factors(inputs.tops, w, alpha=ALPHA),
        quantize=lambda w, inputs: SCHEMES["q8_row"].quantize(w),
    ),
}
