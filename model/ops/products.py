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

MOST_DECODED = 1 << 24  # largest number of weights to decode at once (64 MB in float32)
MOST_CPU_DECODED = 1 << 20  # largest number of weights to decode at once on a CPU (4 MB)
FEWEST_ROWS = 16  # smallest number of rows in a block; if no such block fits, the whole matrix is one block
MOST_ONE_BY_ONE = 4  # largest number of vectors that a CPU multiplies by integer codes one after the other
MOST_KEPT = 1 << 22  # number of weights with codes that stay in a CPU's caches from one vector to the next
# The numbers of vectors in bfloat16 for which the matrix is the first operand of the dot. With fewer vectors, the dot
# would use too few lanes. With more vectors, XLA's copy of the matrix costs little.
NARROW_BY_ROWS = range(13, 65)
MOST_SLICES = 64  # largest number of slices (16 columns each) in one loop; longer loops of XLA on a CPU are slow


def dot(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """Multiply with XLA's dot, on any device. HIGHEST keeps a GPU from rounding float32 to TF32."""
    if isinstance(weight, Adapted):
        return adapted_product(x, weight, dot)
    if isinstance(weight, Stacked):
        return jnp.concatenate([dot(x, part) for part in weight.parts], axis=-1)
    if isinstance(weight, QuantizedMatrix):
        x = _padded(x.astype(jnp.float32), weight)
        return _by_blocks(lambda part: dot(x, part.weights()), weight, most=MOST_DECODED)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contract, lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def cpu_product(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """Multiply vectors by a matrix on a CPU.

    For one vector, we add products of slices of 16 columns instead of using XLA's dot. All these operations are
    elementwise, so XLA compiles them to one vectorized and parallel loop, which decodes weights in registers and runs
    at memory speed. A dot would first convert the whole matrix in memory. A barrier keeps the last, small sum out of
    the loop.

    For several vectors, we use a dot. There is one exception: we multiply a few vectors by a matrix of integer codes
    one vector after the other. The choice depends on the number of vectors and on the matrix, not on the values of the
    vectors. So in a batch of a given size, the other rows do not change a row's bits.
    """
    if isinstance(weight, Adapted):
        return adapted_product(x, weight, cpu_product)
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


def cpu_product_of_each(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """Multiply several vectors by a matrix on a CPU, each with the sums of `cpu_product` for one vector.

    We read a matrix of floats once for all vectors, and blocks of integer codes stay in a CPU's cache from one vector
    to the next. All other matrices are read once per vector.
    """
    vectors = x.reshape(-1, x.shape[-1])
    if isinstance(weight, Stacked):
        return jnp.concatenate([cpu_product_of_each(x, part) for part in weight.parts], axis=-1)
    if isinstance(weight, Adapted) or not (block := _block(weight)):
        y = lax.map(lambda vector: cpu_product(vector[None, None], weight)[0, 0], vectors)
    elif isinstance(weight, QuantizedMatrix):
        y = _one_by_one(vectors, weight)
    else:
        y = _plain_sums_of_each(vectors.astype(jnp.float32), weight, block)
    return y.reshape(*x.shape[:-1], -1)


def partial_sums(weight: Matrix | jax.ShapeDtypeStruct) -> int:
    """Return the number of float32 partial sums that `cpu_product` stores before the last sum.

    `weight` may be shapes instead of arrays. The small matrices of an adapter need no partial sums, because we multiply
    them by dots.
    """
    if isinstance(weight, Adapted):
        return partial_sums(weight.matrix)
    if isinstance(weight, Stacked):
        return sum(partial_sums(part) for part in weight.parts)
    block = _block(weight)
    rows, cols = (len(weight.codes), weight.cols) if isinstance(weight, QuantizedMatrix) else weight.shape
    return rows * (cols // block) * LANES if block else 0


def adapted_product(x: Float[Array, "*batch cols"], weight: Adapted, product: Callable) -> Float[Array, "*batch rows"]:
    """Multiply by the matrix with `product`, and add the adapters' part in float32: B (A x) for each stacked weight.

    If sequences choose their adapters, x is [batch, seq, cols].
    """
    x32 = x.astype(jnp.float32)

    def part(a: Float[Array, "rank cols"], b: Float[Array, "rows rank"]) -> Float[Array, "*batch rows"]:
        if not len(a):
            return jnp.zeros((*x.shape[:-1], len(b)))
        hidden = dot(x32, a.astype(jnp.float32))
        if weight.chosen is not None:
            hidden = jnp.where(weight.chosen[:, None], hidden, 0)
        return dot(hidden, b.astype(jnp.float32))

    return product(x, weight.matrix) + jnp.concatenate([*map(part, weight.a, weight.b)], axis=-1)


def lane_sums(
    w: Float[Array, "*#rows n"], v: Float[Array, "*#rows n"], lanes: int = LANES
) -> Float[Array, "*rows lanes"]:
    """Multiply rows of w by rows of v elementwise, and return `lanes` sums of products per row. The rows broadcast.

    Sum i adds the products at columns i, i + lanes, i + 2 lanes and so on.
    """
    slices = (slice(i, i + lanes) for i in range(0, w.shape[-1], lanes))
    return lax.optimization_barrier(sum(w[..., s].astype(jnp.float32) * v[..., s] for s in slices))


def last_sum(partial_sums: Float[Array, "*rows n"]) -> Float[Array, " *rows"]:
    """Add up the numbers of each row by a dot with ones.

    XLA's own sums of many short rows take several times as long.
    """
    return jnp.dot(partial_sums, jnp.ones(partial_sums.shape[-1]), precision=lax.Precision.HIGHEST)


def _dot_of_many(x: Float[Array, "*batch cols"], weight: Matrix) -> Float[Array, "*batch rows"]:
    """Multiply several vectors by a matrix with a dot.

    We decode a quantized matrix in a loop over two or more blocks of rows. Without the loop, XLA would decode the
    matrices of all layers before the first product, and keep them all in memory.
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
    """Multiply several vectors by a float32 matrix, with the matrix as the first operand of the dot.

    XLA's dot copies its second operand into tiles for every product. If the second operand is the matrix and there are
    few vectors, this copy is as much work as the product. Barriers keep XLA from exchanging the two operands, which it
    would do to avoid a transposition.
    """
    columns = lax.optimization_barrier(x.reshape(-1, x.shape[-1]).T)
    y = lax.dot_general(w, columns, (((1,), (0,)), ((), ())), lax.Precision.HIGHEST)
    return lax.optimization_barrier(y).T.reshape(*x.shape[:-1], -1)


def _narrow_dot_by_rows(x: Float[Array, "*batch cols"], w: Float[Array, "rows cols"]) -> Float[Array, "*batch rows"]:
    """Multiply several vectors by a bfloat16 matrix, with the matrix as the first operand of the dot.

    Here the vectors are rows, because XLA needs several times as long if they are columns. We append rows of zeros, so
    that the number of vectors fills whole registers.
    """
    vectors = x.reshape(-1, x.shape[-1])
    padded = lax.optimization_barrier(jnp.pad(vectors, [(0, -len(vectors) % LANES), (0, 0)]))
    y = dot(w, padded)  # [rows, padded vectors]
    return lax.optimization_barrier(y).T[: len(vectors)].reshape(*x.shape[:-1], -1)


def _one_by_one(x: Float[Array, "*batch cols"], weight: QuantizedMatrix) -> Float[Array, "*batch rows"]:
    """Multiply a few vectors, one after the other, by blocks of codes that stay in a CPU's cache.

    Decoding integers in registers for each vector costs less than decoding the matrix to memory once. The barrier makes
    each product wait for the previous product; otherwise XLA would decode the matrix to memory once for all vectors. A
    `lax` loop over vectors would be slower, because XLA compiles a short loop for a single thread.
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
    """Apply `product` to one block of rows after the other, and join the results; a block has up to `most` weights."""
    rows = len(weight.codes)
    block = max((size for size in range(1, rows + 1) if rows % size == 0 and size * weight.cols <= most), default=1)
    if block == rows or block < FEWEST_ROWS:
        return product(weight)
    y = lax.map(product, jax.tree.map(lambda a: a.reshape(-1, block, *a.shape[1:]), weight))
    return jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], rows)  # y is [blocks, *batch, block]


def _block(weight: Matrix | jax.ShapeDtypeStruct) -> int | None:
    """Choose how many columns of a matrix one loop multiplies. The result divides the matrix's number of columns.

    A loop has at most `MOST_SLICES` slices of 16 columns for floats, and at most `QuantizedMatrix.slices` slices for
    codes. Returns None if no such divisor exists.
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


def _plain_sums_of_each(
    x: Float[Array, "vectors cols"], weight: Float[Array, "rows cols"], block: int
) -> Float[Array, "vectors rows"]:
    """Compute `_plain_sums` for several vectors. The inner loop is over vectors, so each weight is read once."""
    w = weight.reshape(len(weight), 1, -1, block)
    v = lax.optimization_barrier(x).reshape(1, len(x), -1, block)
    return last_sum(lane_sums(w, v).reshape(len(weight) * len(x), -1)).reshape(len(weight), len(x)).T


def _quantized_sums(x: Float[Array, " cols"], weight: QuantizedMatrix, block: int) -> Float[Array, " rows"]:
    """Multiply a vector by a matrix of codes.

    If each group of columns has a scale, we multiply the group's 16 partial sums by it. If a row has only one scale, we
    multiply the row's last sum by the scale. For a group with a minimum, we multiply 16 partial sums of x by the
    minimum, because adding the minimum to each weight would take two thirds longer. So the sum with scales and the sum
    with minima are rounded separately, and the two sums may cancel.
    """
    v = lax.optimization_barrier(_padded(x, weight) * weight.unit).reshape(-1, block)
    rows, grouped = len(weight.codes), weight.group < weight.cols or weight.cols == block
    group = weight.group if grouped else block
    in_loop = grouped or weight.minima is not None  # whether the loop multiplies by scales

    def of_group(a: Array, g: int) -> Array:
        """Return the scales, zero points or minima `a` for group `g` of each block.

        If a row is one group with several blocks, all blocks use the only entry of the row.
        """
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
