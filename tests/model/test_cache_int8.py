"""The int8 KV cache: the numbers that it stores, attention over it, and equal texts of both backends."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamaspec import SamplingOptions, load
from llamaspec.model.cache import LayerCache, append, cache_bytes, empty_cache, from_int8, position_bytes, to_int8
from llamaspec.model.ops.attention import SPANS, attend
from llamaspec.model.ops.gpu import pallas_ops
from llamaspec.model.ops.gpu_products import STEPS
from llamaspec.model.ops.table import Positions
from llamaspec.model.ops.xla import XLA
from llamaspec.model.weights.loading import abstract_params
from llamaspec.reference.attention import attention, causal_mask
from llamaspec.reference.config import Config
from llamaspec.reference.quantizers import kv_cache
from tests.model.quantize.test_quantized_models import written_logits
from tests.support.random_models import CONFIGS, SMALL
from tests.support.strategies import Noise, assert_within, attention_bound, noises, roundoff, share_of

U32 = roundoff(np.float32)
INT8 = np.dtype(np.int8)
SMALLEST = 2.0**-126  # a smaller float32 may be flushed to 0
# A float32 quotient by the scale is rounded, so the largest number can be slightly more than 127 scales.
STEP = 1 / 2 + 127 * 4 * U32


@given(noise=noises, head_dim=st.sampled_from([1, 16, 17]))  # each example compiles
def test_a_row_is_the_definition_s(noise, head_dim):
    """The int8 codes and scales of a row equal the reference's within float32's rounding.

    Only codes at a tie may differ.
    """
    x = noise(5, head_dim)
    codes, scales = (np.asarray(a, np.float64) for a in from_int8(to_int8(jnp.asarray(x))))
    exact = kv_cache.quantize(x)
    assert_within(scales, exact.scales[:, 0], 4 * U32 * exact.scales[:, 0] + SMALLEST)
    assert_within(codes * scales[:, None], x, STEP * scales[:, None] + 127 * SMALLEST)
    with np.errstate(divide="ignore", invalid="ignore"):
        from_tie = np.abs(np.abs(np.nan_to_num(x / exact.scales.astype(np.float64)) % 1) - 0.5)
    sure = (from_tie > 127 * 4 * U32) & (exact.scales > SMALLEST)
    np.testing.assert_array_equal(codes[sure], exact.codes[sure])
    assert (np.abs(codes) <= 127).all()


@given(noise=noises)
def test_a_row_is_packed_as_the_definition_s(noise):
    rows = to_int8(jnp.asarray(noise(5, 16)))
    stored = kv_cache.unpack(np.asarray(rows))
    codes, scales = from_int8(rows)
    np.testing.assert_array_equal(stored.codes, codes)
    np.testing.assert_array_equal(stored.scales[:, 0], scales)


def test_zeros_stay_zeros():
    codes, scales = from_int8(to_int8(jnp.zeros((2, 6))))
    assert not codes.any() and not scales.any()


@given(noise=noises, first=st.sampled_from([1, 4]))  # each example compiles
def test_appending_in_steps_stores_the_same_bytes(noise, first):
    """Appending tokens to the int8 cache in two steps stores the same bytes as appending them in one step."""
    head_dim = 6
    new = jnp.asarray(noise(2, 6, 3, head_dim))
    config = Config(**{**vars(SMALL), "kv_heads": 3, "head_dim": head_dim})
    empty = empty_cache(config, batch=2, capacity=9, dtype=INT8).layers[0].k
    starts = jnp.array([0, 2])
    together = append(empty, new, starts)
    apart = append(append(empty, new[:, :first], starts), new[:, first:], starts + first)
    np.testing.assert_array_equal(together, apart)
    np.testing.assert_array_equal(together[1, :, 2:8], to_int8(new[1].swapaxes(0, 1)))
    assert not together[0, :, 6:].any()


@settings(max_examples=share_of(10))  # each example compiles
@given(
    noise=st.builds(Noise, seed=st.integers(0, 2**32 - 1), exponent=st.integers(-4, 1), outliers=st.booleans()),
    heads=st.sampled_from([(2, 2), (6, 2)]),
    queries=st.sampled_from([1, 3]),
    longest=st.sampled_from([3, SPANS.longest]),
    window=st.sampled_from([None, 3]),
)
def test_attention_is_within_the_bound_of_the_definition(noise, heads, queries, longest, window):
    """Attention over an int8 cache is within its error bound, compared with exact attention over the stored numbers.

    Compared with exact attention over the numbers before quantization, it is within the wider bound stated in
    `reference.quantizers.kv_cache`.
    """
    head_dim, keys = 6, 8
    config = Config(**{**vars(SMALL), "heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim})
    q = noise(queries, heads[0], head_dim)
    k, v = noise(keys, heads[1], head_dim), noise(keys, heads[1], head_dim)
    empty = empty_cache(config, batch=1, capacity=keys + 1, dtype=INT8).layers[0]
    start = jnp.zeros(1, jnp.int32)
    stored = LayerCache(*(append(rows, jnp.asarray(a[None]), start) for rows, a in zip(empty, (k, v), strict=True)))
    angles = jnp.zeros((1, queries, head_dim // 2))
    positions = Positions(jnp.arange(keys - queries, keys)[None], angles, angles)
    h = attend(
        jnp.asarray(q[None]), stored, positions, window=window, config=config, spans=SPANS._replace(longest=longest)
    )
    actual = np.asarray(h).reshape(queries, heads[0], head_dim)

    levels: list[np.ndarray] = []
    scales: list[float] = []
    for rows in stored:
        codes, s = (np.asarray(a, np.float64)[0, :, :keys].swapaxes(0, 1) for a in from_int8(rows))
        levels.append(codes * s[..., None])
        scales.append(np.max(s))
    mask = causal_mask(queries, keys, offset=keys - queries, window=window)
    # A code is multiplied by its scale after the sum, so each score and each output has one more rounding.
    levels_k, levels_v = levels
    rounding = attention_bound(q, levels_k, levels_v, mask, dtype="float32", sums="float32") * (1 + 2 * U32)
    assert_within(actual, attention(q, levels_k, levels_v, mask), rounding)

    largest = np.max(np.sum(np.abs(q.astype(np.float64)), axis=-1))
    e = STEP * scales[0] * largest / np.sqrt(head_dim)
    lost = np.expm1(2 * e) * np.max(np.abs(v)) + STEP * scales[1] + 127 * SMALLEST
    assert_within(actual, attention(q, k, v, mask), rounding + lost)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_memory_is_a_byte_a_number_and_a_scale_a_vector(name):
    config = CONFIGS[name]
    sizes = {}
    for dtype in (np.dtype(np.float32), INT8):
        cache = empty_cache(config, batch=2, capacity=5, dtype=dtype)
        sizes[dtype] = sum(array.nbytes for array in jax.tree.leaves(cache.layers))
        assert sizes[dtype] == 2 * 5 * position_bytes(config, dtype=dtype)
        assert cache_bytes(config, batch=2, capacity=5, dtype=dtype) == sizes[dtype] + 5 * config.head_dim * 4
    assert sizes[INT8] * 4 * config.head_dim == sizes[np.dtype(np.float32)] * (config.head_dim + 4)


@pytest.mark.slow  # 5 s
def test_both_backends_tell_the_same_story():
    stories = []
    for backend in ("jax", "reference"):
        llama = load("stories", context=64, cache="int8", backend=backend, greedy=True)
        generation = llama.generate("Once upon a time", max_new_tokens=24, sampling=SamplingOptions(temperature=0.0))
        stories.append([token.id for token in generation])
    assert stories[0] == stories[1]
    assert len(stories[0]) == 24


@pytest.mark.slow  # 5 s
def test_logits_are_those_of_the_reference_s_cache(run, tmp_path):
    """With an int8 cache, both backends give nearly equal logits; a float32 cache gives logits that are farther away.

    A few codes near a rounding tie may differ between the backends.
    """
    forms = ("--cache", "int8"), ("--cache", "int8", "--backend", "reference"), ("--backend", "reference")
    actual, exact, plain = written_logits(run, tmp_path, "1,5,9,200,7", forms)
    assert 2 * np.linalg.norm(actual - exact) < np.linalg.norm(exact - plain) < np.linalg.norm(plain) / 10


def test_kernels_leave_it_to_the_plain_form():
    """With an int8 cache, norm_qkv and attend run as XLA ops.

    In a decode step, the matrix product of norm_qkv is still a kernel.
    """
    config = Config(**{**vars(SMALL), "dim": 128, "heads": 2, "kv_heads": 1, "head_dim": 64})
    dtype = np.dtype(np.float32)
    params = abstract_params(config, dtype=dtype, positions=8)
    cache = jax.eval_shape(lambda: empty_cache(config, batch=1, capacity=8, dtype=INT8)).layers[0]
    positions = jax.eval_shape(lambda: Positions(jnp.zeros((1, 1), jnp.int32), *jnp.zeros((2, 1, 1, 32))))
    x, q = jax.ShapeDtypeStruct((1, 1, 128), dtype), jax.ShapeDtypeStruct((1, 1, 2, 64), dtype)
    ops, reasons = pallas_ops(config, params, capacity=8, cache_dtype=INT8)
    calls = {
        "norm_qkv": ((x, params.layers[0], cache, positions), {}),
        "attend": ((q, cache, positions), {"window": None}),
    }
    for name, (arguments, fixed) in calls.items():
        assert re.search("float32.*int8", reasons[name] or "")
        routed, plain = (
            str(jax.make_jaxpr(partial(getattr(table, name), config=config, **fixed))(*arguments))
            for table in (ops, STEPS if name == "norm_qkv" else XLA)
        )
        assert routed == plain


def test_another_cache_is_refused(run):
    code, out, err = run("generate", "Once", "--cache", "int4")
    assert (code, out) == (2, "") and "'int4' is not 'int8'" in err


def test_a_gpu_allocates_its_own_empty_cache(monkeypatch):
    config = Config(dim=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=8, vocab=8, context=8, eps=1e-5, theta=1e4)
    sizes = {"batch": 1, "capacity": 4, "dtype": np.dtype(np.float32)}
    on_cpu = empty_cache(config, **sizes)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    on_gpu = empty_cache(config, **sizes)
    jax.tree.map(np.testing.assert_array_equal, on_cpu, on_gpu)
    assert jax.tree.structure(on_cpu) == jax.tree.structure(on_gpu)
    arrays = jax.tree.leaves(on_gpu.layers)
    assert len({array.unsafe_buffer_pointer() for array in arrays}) == len(arrays)
