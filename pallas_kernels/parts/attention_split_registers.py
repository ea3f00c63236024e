r"""A thread block's part of attention while decoding, in bfloat16, for all cards of compute capability 8.0 or later.

This part computes the same numbers as `attention_split`. Keys and values go from memory to registers. Each warp has its
own online softmax over its keys, so warps wait for each other only at the end, where their results are combined.

`mma.m16n8k16` multiplies A [16, 16] by B [16, 8] and adds C [16, 8]. A warp is 8 quads of 4 lanes. Quad i has rows i
and i + 8 of A and column i of B. Lane j of the quad has columns 2 j, 2 j + 1, 2 j + 8 and 2 j + 9 of A, the same rows
of B, and columns 2 j and 2 j + 1 of C. The order of the terms is free, as long as A and B agree.

Scores: A is 16 keys, and B the queries. A lane loads 16 adjacent bytes of a key, and the same 16 bytes of its quad's
query. These eight terms serve two products.

Values: A is V^T and B the weights, with keys as rows. C of the scores has keys as rows too, but a lane has a pair of
queries where B needs a pair of keys. So `movmatrix` transposes them. A lane loads 16 bytes of the values of its four
keys, and `prmt` joins numbers of two keys in a word. Each pair of its eight columns is a product: the first of the pair
is in row i of A, and the second in row i + 8. So a lane gets eight adjacent numbers of o, for two queries.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array

from llamaspec.pallas_kernels.parts.attention_split import LOWEST
from llamaspec.pallas_kernels.parts.compat import WARPS, Target, store_in_pieces, tiled_layout
from llamaspec.pallas_kernels.parts.inline import (
    address,
    all_words,
    array,
    assembly,
    float32,
    int32,
    int64,
    load,
    load_global,
    ptx,
    real,
    times,
    total,
    word,
    words,
)
from llamaspec.pallas_kernels.parts.integer_mma import Lane
from llamaspec.pallas_kernels.parts.key_rows import KeyRows
from llamaspec.pallas_kernels.parts.wgmma import filled

KEYS = 16  # of a warp in a step
COLUMNS = 8  # queries of a thread block, padded
WIDE = 8  # numbers that a lane loads at once: 16 bytes

# Layouts of keys and values [WARPS, KEYS, head_dim], of scores [WARPS, KEYS, COLUMNS], of o [WARPS, COLUMNS, head_dim],
# of q [COLUMNS, head_dim], and of a number for each query of each warp.
K = tiled_layout(((WARPS, 8, 32), (1, 1, WIDE)), warps=-6, lanes=(-5, -4))
V = tiled_layout(((WARPS, KEYS, 64), (1, 8, 8), (1, 2, 8), (1, 1, WIDE)), warps=-12, lanes=(-10, -8))
SCORES = tiled_layout(((WARPS, KEYS, COLUMNS), (1, 8, 2), (1, 1, 1)), warps=-9, lanes=(-5, -7))
OUT = tiled_layout(((WARPS, COLUMNS, 64), (1, 2, 8), (1, 1, 4)), warps=-9, lanes=(-7, -8))
Q = tiled_layout(((COLUMNS, 32), (1, WIDE)), warps=None, lanes=(-4, -3))
STATISTICS = SCORES.reduce(1)

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
TRANSPOSE = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
ROUND = "cvt.rn.bf16x2.f32 $0, $2, $1;"
LOWER, UPPER = 0x5410, 0x7632  # `prmt`: the lower halves of two words, and the upper halves


@dataclass(frozen=True)
class SplitAttentionRegisters:
    """`attention_split.SplitAttention` without a ring, for up to 8 queries of a key head."""

    group: int  # query heads of a key head in this thread block
    head_dim: int

    @property
    def columns(self) -> int:
        return COLUMNS

    @property
    def _scale(self) -> float:
        return math.log2(math.e) / math.sqrt(self.head_dim)

    def scratch(self) -> dict[str, Any]:
        return {}

    def run(self, q_ref, keys: KeyRows, o_ref, stats_ref, staged: dict[str, Any]) -> None:
        """Attend from q [group, head_dim], and write o [COLUMNS, head_dim] and stats [2, COLUMNS].

        For one split, stats_ref is None.
        """
        del staged
        o, m, sums = self._attend(_queries(q_ref, keys.target), keys)
        largest = jnp.max(m, axis=0)
        weight = jnp.exp2((m - lax.broadcast_in_dim(largest, m.shape, (1,))) * self._scale)
        sums = jnp.sum(jnp.sum(sums, axis=1) * weight, axis=0)
        o = jnp.sum(o * lax.broadcast_in_dim(plgpu.layout_cast(weight, OUT.reduce(2)), o.shape, (0, 1)), axis=0)
        if stats_ref is None:
            share = plgpu.layout_cast(jnp.where(sums == 0, 0.0, 1 / sums), OUT.reduce(2).reduce(0))
            o = (o * lax.broadcast_in_dim(share, o.shape, (0,))).astype(jnp.bfloat16)
        else:
            for place, statistic in enumerate((largest * self._scale, sums)):
                store_in_pieces(stats_ref.at[place], statistic)
        store_in_pieces(o_ref, o)

    def _attend(self, q, keys: KeyRows) -> tuple[Any, Any, Any]:
        """Compute, for each warp, o, m (the largest score) and sums of weights, one sum for each of the warp's keys."""
        target = keys.target
        shape, wide = (WARPS, KEYS, COLUMNS), (WARPS, COLUMNS, self.head_dim)

        def places(shape, layout):
            """Return the index, within the tile, of each element's key."""
            warp, key = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))
            return warp * KEYS + key

        of_scores, of_values = places(shape, SCORES), places((WARPS, KEYS, self.head_dim), V)

        def visible(place, step):
            key = place + keys.first_key(step)
            return (key >= keys.start) & (key < keys.stop)

        def walk_step(i, state):
            k, o, m, sums = state
            v = _load_values(keys.rows("v", i), target)
            scores = jnp.where(visible(of_scores, i), _scores(k, q, target), -jnp.inf)
            k = _load_keys(keys.rows("k", jnp.minimum(i + 1, keys.steps - 1)), target)
            larger = jnp.maximum(m, jnp.max(scores, axis=1))
            rescale = jnp.exp2((m - larger) * self._scale)
            p = jnp.exp2((scores - lax.broadcast_in_dim(larger, shape, (0, 2))) * self._scale)
            sums = sums * lax.broadcast_in_dim(rescale, shape, (0, 2)) + p
            v = jnp.where(visible(of_values, i), v, jnp.zeros((), v.dtype))
            o = o * lax.broadcast_in_dim(plgpu.layout_cast(rescale, OUT.reduce(2)), wide, (0, 1))
            return k, _add_weighted(o, v, p, target), larger, sums

        state = (
            _load_keys(keys.rows("k", jnp.int32(0)), target),
            filled(0.0, *wide, layout=OUT),
            filled(LOWEST, WARPS, COLUMNS, layout=STATISTICS),
            filled(0.0, *shape, layout=SCORES),
        )
        _, o, m, sums = lax.fori_loop(0, keys.steps, walk_step, state)
        return o, m, sums


def _load_keys(rows: Sequence[Any], target: Target) -> Array:
    """Load a tile of keys, given as consecutive arrays of rows."""

    def places(lane: Lane, head_dim: int) -> list[tuple[Any, Any, int]]:
        return [(octet, lane.quad, 32 * chunk) for octet in range(2) for chunk in range(head_dim // 32)]

    return _load_rows(rows, K, places, lambda lane: lane.place, target)


def _load_values(rows: Sequence[Any], target: Target) -> Array:
    """Load a tile of values, given as consecutive arrays of rows."""

    def places(lane: Lane, head_dim: int) -> list[tuple[Any, Any, int]]:
        first, second = times(lane.place, 2), total(times(lane.place, 2), word(1))
        chunks = range(0, head_dim, 64)
        return [(octet, row, column) for column in chunks for octet in range(2) for row in (first, second)]

    return _load_rows(rows, V, places, lambda lane: lane.quad, target)


def _load_rows(
    rows: Sequence[Any],
    layout: Any,
    places: Callable[[Lane, int], list[tuple[Any, Any, int]]],
    column_of: Callable[[Lane], Any],
    target: Target,
) -> Array:
    """Load a tile [WARPS, KEYS, head_dim] from arrays of 8, 16, 32 or 64 rows.

    `places(lane, head_dim)` lists the 16-byte loads of a lane. Each load has an octet (0 or 1) of the warp's 16 keys, a
    row in the octet, and a column. We add eight times `column_of(lane)` to the column.
    """
    (size, head_dim), shape = rows[0].shape, (WARPS, KEYS, rows[0].shape[1])
    if target.interpret:
        return jnp.concatenate([plgpu.load(some, layout=None) for some in rows]).reshape(shape)

    def run(_, refs):
        lane = Lane.of_thread()
        column = times(column_of(lane), 2 * WIDE)
        starts = [
            total(_octet_address(refs, lane, octet, size, head_dim), arith.extui(int64(), column)) for octet in range(2)
        ]
        registers = []
        for octet, row, first in places(lane, head_dim):
            place = total(starts[octet], arith.extui(int64(), total(times(row, 2 * head_dim), word(2 * first))))
            registers.append(load_global(place, 4, written=True))
        return array(registers, shape, np.dtype(jnp.bfloat16), layout)

    tile = plgpu.ShapeDtypeStruct(shape, np.dtype(jnp.bfloat16), layout=layout)
    inlined: Any = plgpu.inline_mgpu(arg_types=([plgpu.RefType()] * len(rows),), return_type=tile)
    return inlined(run)(list(rows))


def _octet_address(refs: Sequence[Any], lane: Lane, octet: int, size: int, head_dim: int) -> Any:
    """Return the address of the first or second 8 keys of a lane's warp, in arrays of `size` rows each."""
    addresses = []
    for warp in range(WARPS):
        run, row = divmod(KEYS * warp + 8 * octet, size)
        addresses.append(address(refs[run], 2 * head_dim * row))
    chosen = addresses[0]
    for warp in range(1, WARPS):
        own = arith.cmpi(arith.CmpIPredicate.eq, lane.warp, word(warp))
        chosen = arith.select(own, addresses[warp], chosen)
    return chosen


def _queries(q_ref, target: Target) -> Array:
    """Load q [group, head_dim] as [COLUMNS, head_dim]. The last query is repeated to fill the columns."""
    group, head_dim = q_ref.shape
    if target.interpret:
        q = plgpu.load(q_ref, layout=None)
        return jnp.concatenate([q, *[q[-1:]] * (COLUMNS - group)])

    def run(_, q_ref):
        lane = Lane.of_thread()
        row = arith.minui(lane.quad, word(group - 1))
        at = total(times(row, 2 * head_dim), times(lane.place, 2 * WIDE))
        registers = [load(q_ref, total(at, word(64 * chunk)), int32(), 4) for chunk in range(head_dim // 32)]
        return array(registers, (COLUMNS, head_dim), np.dtype(jnp.bfloat16), Q)

    q = plgpu.ShapeDtypeStruct((COLUMNS, head_dim), np.dtype(jnp.bfloat16), layout=Q)
    inlined: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=q)
    return inlined(run)(q_ref)


def _scores(k: Array, q: Array, target: Target) -> Array:
    """Multiply keys by queries."""
    shape = (WARPS, KEYS, COLUMNS)
    if target.interpret:
        return jnp.einsum("wkd,qd->wkq", k, q, preferred_element_type=jnp.float32)

    def run(_, k, q):
        keys = [words(register, int32()) for register in k.registers.flat]
        queries = [words(register, int32()) for register in q.registers.flat]
        upper, lower = keys[: len(keys) // 2], keys[len(keys) // 2 :]
        c = [real(0.0)] * 4
        for a, b, query in zip(upper, lower, queries, strict=True):
            for at in (0, 2):
                c = _mma([a[at], b[at], a[at + 1], b[at + 1]], query[at : at + 2], c)
        return array([[number] for number in c], shape, np.dtype("float32"), SCORES)

    scores = plgpu.ShapeDtypeStruct(shape, np.dtype("float32"), layout=SCORES)
    inlined: Any = plgpu.inline_mgpu(arg_types=(K, Q), return_type=scores)
    return inlined(run)(k, q)


def _add_weighted(o: Array, v: Array, p: Array, target: Target) -> Array:
    """For each query, add the values to o, each value multiplied by its key's weight p."""
    if target.interpret:
        return o + jnp.einsum("wkd,wkq->wqd", v, p.astype(v.dtype), preferred_element_type=jnp.float32)

    def run(_, o, v, p):
        weights = all_words(p, float32())
        b = [_transposed(*weights[:2]), _transposed(*weights[2:])]
        sums = all_words(o, float32())  # for each 64 columns: 8 of the first query, then 8 of the second
        values = [words(register, int32()) for register in v.registers.flat]
        for chunk in range(len(sums) // 16):
            first, second, third, fourth = values[4 * chunk : 4 * chunk + 4]  # keys 2 j, 2 j + 1, 2 j + 8 and 2 j + 9
            for pair in range(4):
                a = [
                    _joined(some[pair], other[pair], half)
                    for some, other in ((first, second), (third, fourth))
                    for half in (LOWER, UPPER)
                ]
                places = [16 * chunk + 8 * query + 2 * pair + row for row in (0, 1) for query in (0, 1)]
                products = _mma(a, b, [sums[place] for place in places])
                for place, number in zip(places, products, strict=True):
                    sums[place] = number
        registers = [sums[at : at + 4] for at in range(0, len(sums), 4)]
        return array(registers, o.shape, np.dtype("float32"), OUT)

    new_o = plgpu.ShapeDtypeStruct(o.shape, np.dtype("float32"), layout=OUT)
    inlined: Any = plgpu.inline_mgpu(arg_types=(OUT, V, SCORES), return_type=new_o)
    return inlined(run)(o, v, p)


def _mma(a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """Multiply A by B and add C. Arguments are a lane's parts, in the order of the instruction."""
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    return assembly(MMA, [*a, *b, *c], [float32()] * 4, constraints)


def _transposed(first: Any, second: Any) -> Any:
    """Round weights, and transpose them: from one key and two queries per lane to two keys and one query."""
    pair = assembly(ROUND, [first, second], [int32()], "=r,f,f")
    return ptx(TRANSPOSE, pair, results=1)[0]


def _joined(a: Any, b: Any, half: int) -> Any:
    return ptx(f"prmt.b32 $0, $1, $2, {half};", [a, b], results=1)[0]
