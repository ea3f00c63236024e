"""Products of vectors with a matrix of floats or codes: `dot` for any device, and `cpu_product` for XLA on a CPU."""

from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from llamaspec.model.weights.adapted import Adapted
from llamaspec.model.weights.codes import QuantizedMatrix
from llamaspec.model.weights.gpu_codes import Stacked
from llamaspec.model.weights.groups import LANES, PAIR, ROW
from llamaspec.model.weights.params import Matrix

MOST_DECODED = 1 << 24  # most weights of a quantized matrix to decode at once: 64 MB in float32
MOST_CPU_DECODED = 1 << 20  # the same on a CPU: 4 MB
FEWEST_ROWS = 16  # least rows of a block; if no block has as many, the whole matrix is one block
MOST_ONE_BY_ONE = 4  # vectors that a CPU multiplies by integer codes one after the other
MOST_KEPT = 1 << 22  # weights: their codes stay in a CPU's caches from one vector to the next
# Fewer vectors in bfloat16 use too few lanes with the matrix as first operand. With more, a copy of it costs little.
NARROW_BY_ROWS = range(13, 65)  # numbers of vectors for which a bfloat16 matrix is the first operand of the dot
MOST_SLICES = 64  # of 16 columns, in one loop; with more, XLA's loops on a CPU are slow


def dot(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """Multiply with XLA's dot, on any device. HIGHEST keeps a GPU from rounding float32 to TF32."""
    if isinstance(weight, Adapted):
        return _adapted_product(x, weight, dot)
    if isinstance(weight, Stacked):
        return jnp.concatenate([dot(x, part) for part in weight.parts], axis=-1)
    if isinstance(weight, QuantizedMatrix):
        x = _padded(x.astype(jnp.float32), weight)
        return _by_blocks(lambda part: dot(x, part.weights()), weight, most=MOST_DECODED)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contract, lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def cpu_product(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """Multiply on a CPU, where XLA multiplies one vector at memory speed only if the program has no dot.

    For one vector, the product is a sum of slices of 16 columns. These operations are elementwise, so XLA makes one
    vectorized loop of them, on both cores. The barrier keeps the last, small sum out of the loop. The loop converts or
    decodes weights in registers; a dot would first convert the whole matrix in memory.

    Several vectors use a dot, except that a few vectors multiply integer codes one after the other. The choice depends
    only on the number of vectors, so the values of other rows in a batch do not change a row's bits.
    """
    if isinstance(weight, Adapted):
        return _adapted_product(x, weight, cpu_product)
    if isinstance(weight, Stacked):
        return jnp.concatenate([cpu_product(x, part) for part in weight.parts], axis=-1)
    vectors = x.size // x.shape[-1]
    if not (block := _block(weight)):
        return _dot_of_many(x, weight)
    if 1 < vectors <= MOST_ONE_BY_ONE and isinstance(weight, QuantizedMatrix) and weight.integers:
        return _one_by_one(x, weight)
    if vectors > 1:
        return _dot_of_many(x, weight)
    v = x.reshape(-1).astype(jnp.float32)
    y = _quantized_sums(v, weight, block) if isinstance(weight, QuantizedMatrix) else _plain_sums(v, weight, block)
    return y.reshape(*x.shape[:-1], -1)


def partial_sums(weight: Matrix | jax.ShapeDtypeStruct) -> int:
    """Count the float32 partial sums that `cpu_product` stores before the last sum: 16 for each block of a row.

    `weight` may be shapes instead of arrays. The small matrices of an adapter are multiplied by dots.
    """
    if isinstance(weight, Adapted):
        return partial_sums(weight.matrix)
    if isinstance(weight, Stacked):
        return sum(partial_sums(part) for part in weight.parts)
    block = _block(weight)
    rows, cols = (len(weight.codes), weight.cols) if isinstance(weight, QuantizedMatrix) else weight.shape
    return rows * (cols // block) * LANES if block else 0


def _adapted_product(x: Float[Array, "*batch cols"], weight: Adapted, product: Callable) -> Float[Array, "*batch rows"]:
    """Multiply by the matrix with `product`, and add the adapters' part in float32: B (A x) for each stacked weight."""
    x32 = x.astype(jnp.float32)
    parts = [
        dot(dot(x32, a.astype(jnp.float32)), b.astype(jnp.float32)) for a, b in zip(weight.a, weight.b, strict=True)
    ]
    return product(x, weight.matrix) + jnp.concatenate(parts, axis=-1)


def lane_sums(
    w: Float[Array, "*rows n"], v: Float[Array, "*some n"], lanes: int = LANES
) -> Float[Array, "*rows lanes"]:
    """Multiply each row of w by v, and add up the products that are `lanes` columns apart."""
    slices = (slice(i, i + lanes) for i in range(0, w.shape[-1], lanes))
    return lax.optimization_barrier(sum(w[..., s].astype(jnp.float32) * v[..., s] for s in slices))


def last_sum(partial_sums: Float[Array, "*rows n"]) -> Float[Array, " *rows"]:
    """Add up each row by a dot with ones, because XLA's own sums of many short rows take several times as long."""
    return jnp.dot(partial_sums, jnp.ones(partial_sums.shape[-1]), precision=lax.Precision.HIGHEST)


def _dot_of_many(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """Multiply several vectors with a dot. A quantized matrix is decoded in a loop over two or more blocks of rows.

    Without a loop, XLA would decode the matrices of all layers before the first product, and keep them all in memory.
    """
    if not isinstance(weight, QuantizedMatrix):
        assert not isinstance(weight, Stacked | Adapted)
        if x.dtype == weight.dtype == jnp.bfloat16 and x.size // x.shape[-1] in NARROW_BY_ROWS:
            return _narrow_dot_by_rows(x, weight)
        return _dot_by_rows(x, weight) if x.dtype == weight.dtype == jnp.float32 else dot(x, weight)
    xs = weight.split(_padded(x.astype(jnp.float32), weight))

    def by(block: QuantizedMatrix) -> Float[Array, "*batch some"]:
        return reduce(jnp.add, map(_dot_by_rows, xs, block.parts()))

    return _by_blocks(by, weight, most=min(MOST_CPU_DECODED, len(weight.codes) * weight.cols // 2))


def _dot_by_rows(x: Float[Array, "*batch cols"], w: Float[Array, "rows cols"]) -> Float[Array, "*batch rows"]:
    """Multiply several vectors by a float32 matrix that is the first operand of the dot.

    XLA's dot copies its second operand into tiles for every product. That is as much work as the product itself if the
    second operand is the matrix and the vectors are few. Barriers keep XLA from exchanging the two to save a
    transposition.
    """
    columns = lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
    y = lax.dot_general(w, columns, (((1,), (0,)), ((), ())), lax.Precision.HIGHEST)
    return lax.optimization_barrier(y).T.reshape(*x.shape[:-1], -1)


def _narrow_dot_by_rows(x: Float[Array, "*batch cols"], w: Float[Array, "rows cols"]) -> Float[Array, "*batch rows"]:
    """Multiply as `_dot_by_rows` does, in bfloat16.

    The vectors remain rows, because XLA takes several times as long if they are columns. Zero rows pad the vectors to
    whole registers.
    """
    vectors = x.reshape(-1, x.shape[-1])
    padded = lax.optimization_barrier(jnp.pad(vectors, [(0, -len(vectors) % LANES), (0, 0)]))
    y = dot(w, padded)  # [rows, padded vectors]
    return lax.optimization_barrier(y).T[: len(vectors)].reshape(*x.shape[:-1], -1)


def _one_by_one(x: Float[Array, "*batch cols"], weight: QuantizedMatrix) -> Float[Array, "*batch rows"]:
    """Multiply a few vectors, one after the other, by blocks of codes that stay in a CPU's cache.

    Decoding integers in registers for each vector costs less than decoding the matrix to memory once. The barrier makes
    each product wait for the previous one; otherwise XLA would decode once for all vectors. A loop over vectors would
    be slower, because XLA compiles a short loop for a single thread.
    """
    vectors = x.reshape(-1, x.shape[-1])

    def by(part: QuantizedMatrix) -> Float[Array, "vectors rows"]:
        products: list[Array] = []
        for vector in vectors:
            vector, part, *_ = lax.optimization_barrier((vector, part, *products[-1:]))
            products.append(cpu_product(vector, part))
        return jnp.stack(products)

    return _by_blocks(by, weight, most=MOST_KEPT).reshape(*x.shape[:-1], -1)


def _by_blocks(
    product: Callable[[QuantizedMatrix], Float[Array, "*batch some"]], weight: QuantizedMatrix, *, most: int
) -> Float[Array, "*batch rows"]:
    """Apply `product` to one block of rows after the other; a block has up to `most` weights. Return all results."""
    rows = len(weight.codes)
    block = max((size for size in range(1, rows + 1) if rows % size == 0 and size * weight.cols <= most), default=1)
    if block == rows or block < FEWEST_ROWS:
        return product(weight)
    y = lax.map(product, jax.tree.map(lambda a: a.reshape(-1, block, *a.shape[1:]), weight))
    return jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], rows)  # y is [blocks, *batch, block]


def _block(weight: Matrix | jax.ShapeDtypeStruct) -> int | None:
    """Choose how many columns of a row to multiply in one loop: a divisor of the row's length; None if none fits.

    A loop has at most `MOST_SLICES` slices of 16 columns for floats, and at most `QuantizedMatrix.slices` for codes.
    """
    assert not isinstance(weight, Stacked | Adapted)
    if isinstance(weight, QuantizedMatrix):
        cols, step = weight.cols, max(weight.group, PAIR) if weight.group < weight.cols else ROW
        most = max(step, weight.slices * LANES)
    else:
        cols, step, most = weight.shape[1], LANES, MOST_SLICES * LANES
    return max((size for size in range(step, min(cols, most) + 1, step) if cols % size == 0), default=None)


def _plain_sums(x: Float[Array, " cols"], weight: Float[Array, "rows cols"], block: int) -> Float[Array, " rows"]:
    w = weight.reshape(len(weight), -1, block)
    v = lax.optimization_barrier(x).reshape(-1, block)
    return last_sum(lane_sums(w, v).reshape(len(w), -1))


def _quantized_sums(x: Float[Array, " cols"], weight: QuantizedMatrix, block: int) -> Float[Array, " rows"]:
    """Multiply a vector by codes. A group's scale multiplies its 16 partial sums; a row's scale multiplies the sum.

    A group's minimum multiplies 16 partial sums of x, because adding the minimum to each weight would take two thirds
    longer. The sum with scales and the sum with minima are therefore rounded separately, and the two may cancel.
    """
    v = lax.optimization_barrier(_padded(x, weight) * weight.unit).reshape(-1, block)
    rows, grouped = len(weight.codes), weight.group < weight.cols or weight.cols == block
    group = weight.group if grouped else block
    in_loop = grouped or weight.minima is not None  # whether the loop multiplies by scales

    def of_group(a: Array, g: int) -> Array:
        """Take the entries of `a` for group `g` of each block; if a row has only one entry, take this entry."""
        return a.reshape(rows, -1, block // group, 1)[:, :, g] if grouped else a[..., None]

    def sums(g: int) -> Float[Array, "rows blocks lanes"]:
        """Compute the partial sums of group `g` of each block."""
        pieces = weight.pieces(block, g * group, (g + 1) * group)
        if weight.zeros is not None:
            zeros = of_group(weight.zeros, g).astype(jnp.float32)
            pieces = ((column, levels - zeros) for column, levels in pieces)
        total = jnp.asarray(sum(levels * v[:, column : column + LANES] for column, levels in pieces))
        if in_loop:
            total = total * weight.real_scales(of_group(weight.scales, g))
        if weight.minima is not None:
            inputs = sum(v[:, column : column + LANES] for column in range(g * group, (g + 1) * group, LANES))
            total = total + inputs * of_group(weight.minima, g)
        return total

    partial_sums = lax.optimization_barrier(sum(sums(g) for g in range(block // group)))
    y = last_sum(partial_sums.reshape(rows, -1))
    return y if in_loop else y * weight.real_scales(weight.scales[:, 0])


def _padded(x: Float[Array, "*batch cols"], weight: QuantizedMatrix) -> Float[Array, "*batch padded"]:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, weight.cols - x.shape[-1])])
