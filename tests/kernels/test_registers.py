"""Code for registers, which the interpreter does not run. Each lane's numbers follow the tables of the PTX manual.

`tests.support.warps` runs it in NumPy for all threads of a block. The results must equal those of the code for whole
arrays, which the interpreter runs instead.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from llamaspec.model.weights.forms.table import LEVELS
from llamaspec.pallas_kernels.parts import attention_split_registers as attention
from llamaspec.pallas_kernels.parts import inline, int4, integer_mma
from llamaspec.pallas_kernels.parts.card import CARDS
from llamaspec.pallas_kernels.parts.compat import WARPS, Target, tiled_layout
from llamaspec.pallas_kernels.parts.fixed_point import DIGITS, VECTOR
from llamaspec.pallas_kernels.parts.integer_mma import CHUNK, PLACES, StepMemory
from tests.support.warps import Memory, emulated

RTX = Target(card=CARDS["rtx-3060"])
RUN = Target(card=CARDS["rtx-3060"], interpret=True)
FORMS = [
    *((8, group, None) for group in (16, 32, 64, 128, None)),
    *((bits, group, "minima") for bits, group in ((8, 16), (8, 32), (8, 128), (4, 16), (4, 32), (4, 64), (5, 32))),
    *((bits, group, None) for bits, group in ((4, 16), (4, 32), (4, 64), (4, 128), (5, 32), (6, 16))),
    (4, 64, "nf4"),
    (4, 32, "mxfp4"),
]


def bfloat16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape), jnp.bfloat16)


def step_in_registers(
    rng: np.random.Generator, bits: int, group: int | None, form: str | None, *, chunk: int, batch: int, runs: int
) -> StepMemory:
    """Draw the arrays of one step of a product: 16 neighboring rows of W, or twice 8 neighboring rows."""
    rows, columns = 16 // runs, group or 128
    groups, levels = chunk // columns, LEVELS.get(form or "")
    codes, low_bits = rng.integers(-128, 128, (16, chunk)).astype(np.int8), None
    if bits < 8:
        order, unsigned = int4.order_of(columns, levels=levels is not None), (codes & (1 << bits) - 1).astype(np.uint8)
        if bits > 4:
            codes, low_bits = (part.view(np.int32) for part in int4.packed_apart(unsigned, order, bits=bits))
        else:
            codes = int4.packed(unsigned, order).view(np.int32)

    def by_run(array: np.ndarray | None) -> Any:
        return None if array is None else list(array.reshape(runs, rows, -1))

    def numbers() -> np.ndarray:
        return rng.standard_normal((16, groups)).astype(np.float32)

    minima = form == "minima"
    return StepMemory(
        bits=bits,
        rows=16,
        group=columns,
        columns=chunk,
        codes=by_run(codes),
        scales=None if group is None else by_run(numbers()),
        digits=Memory(rng.integers(-128, 128, (batch, groups, columns // VECTOR, DIGITS, VECTOR)).astype(np.int8)),
        units=Memory(rng.standard_normal((batch, 1 + minima, groups)).astype(np.float32)),
        minima=minima,
        levels=levels,
        low_bits=by_run(low_bits),
        chunk=chunk,
        in_registers=True,
        least=by_run(numbers()) if minima else None,
    )


@pytest.mark.sampled(5)  # 0.3 s each
@pytest.mark.parametrize(("batch", "runs", "chunk"), [(1, 1, CHUNK), (2, 2, CHUNK // 2), (3, 1, CHUNK // 2)])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_step_of_codes(form, batch, runs, chunk):
    """Each lane multiplies its own codes by its own digits and scales, in every form, for one or several vectors."""
    rng = np.random.default_rng(0)
    step = step_in_registers(rng, *form, chunk=chunk, batch=batch, runs=runs)
    sums = [jnp.asarray(rng.standard_normal((16, WARPS, PLACES)), jnp.float32) for _ in range(batch)]
    with emulated(inline, integer_mma):
        actual = integer_mma.add(sums, step, RTX)
        expected = integer_mma.add(sums, step, RUN)
    places = PLACES if step.minima else DIGITS  # without minima, nothing reads the last lane's number
    for own, other in zip(actual, map(np.asarray, expected), strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(own[..., :places], other[..., :places], rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_and_weighted_values(head_dim):
    rng = np.random.default_rng(1)
    keys = attention.KEYS
    k, v, q = (jnp.asarray(bfloat16(rng, *shape, head_dim)) for shape in ((WARPS, keys), (WARPS, keys), (8,)))
    p = jnp.asarray(rng.uniform(size=(WARPS, keys, 8)), jnp.float32)
    o = jnp.asarray(rng.standard_normal((WARPS, 8, head_dim)), jnp.float32)
    scores, weighted = attention._scores(k, q, RUN), attention._add_weighted(o, v, p, RUN)
    with emulated(inline, attention):
        np.testing.assert_allclose(attention._scores(k, q, RTX), scores, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(attention._add_weighted(o, v, p, RTX), weighted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("run", [8, 16, 32, 64])
def test_a_tile_of_keys_and_values_from_runs_of_rows(head_dim, run):
    """A tile of keys and values is loaded from runs of rows anywhere in memory, such as the pages of a cache."""
    rng = np.random.default_rng(2)
    pages = bfloat16(rng, 3 * 64 // run, run, head_dim)
    memory, size = np.frombuffer(pages.tobytes(), np.uint8), pages[0].nbytes
    order = rng.permutation(len(pages))[: 64 // run]
    rows: Any = [Memory(pages[page], size * int(page)) for page in order]

    def load_global(address: np.ndarray, count: int, *, written: bool) -> list[np.ndarray]:
        assert written  # by an earlier kernel
        places = address.astype(np.int64)[:, None] + np.arange(4 * count)
        assert not (address % (4 * count)).any()
        return list(memory[places].view(np.uint32).T)

    expected = np.concatenate([pages[page] for page in order]).reshape(WARPS, attention.KEYS, head_dim)
    with emulated(inline, attention, integer_mma) as patch:
        patch.setattr(attention, "load_global", load_global)
        for load in (attention._load_keys, attention._load_values):
            np.testing.assert_array_equal(np.asarray(load(rows, RTX)), expected)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_queries_beyond_the_group_repeat_the_last(group):
    q = bfloat16(np.random.default_rng(3), group, 128)
    with emulated(inline, attention, integer_mma):
        loaded = attention._queries(Memory(q), RTX)
    np.testing.assert_array_equal(loaded, q[np.minimum(np.arange(8), group - 1)])


def test_e4m3_floats_become_float32():
    """Kernels convert e4m3 floats to float32 exactly by moving bits, for cards that have no instruction for this."""
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].view(np.int8)[:248].reshape(2, 124)  # without NaN
    codes = np.pad(codes, ((0, 2), (0, 4)))
    layout = tiled_layout(((4, 128), (1, 4)), warps=-4, lanes=-3)
    expected = np.asarray(inline.from_e4m3(jnp.asarray(codes), layout, RUN))
    np.testing.assert_array_equal(expected, codes.view(jnp.float8_e4m3fn).astype(np.float32))
    with emulated(inline):
        actual = inline.from_e4m3(jnp.asarray(codes), layout, RTX)
    np.testing.assert_array_equal(actual, expected)
